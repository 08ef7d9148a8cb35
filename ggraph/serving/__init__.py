"""Many texts at once: one cache, one batch, and each text as it would be alone. No HTTP.

`batch.py` is the page to read first. A step serves rows of many texts (`steps.py`); a row sees the
list of slots that hold its text, wherever they lie, so that slots (`slots.py`) can be handed out
singly and shared as far as texts begin alike (`prefix.py`).
"""
