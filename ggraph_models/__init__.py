"""In a clone, `models/` under the name that it has where the wheel is installed.

    from ggraph_models.api import Chat

The wheel holds `models/` itself under this name, and not this file.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent / "models")]
