"""`ggraph serve`: HTTP in front of `ggraph.serving`, in the dialect of OpenAI's API.

`app.py` is the page to read first: which address does what. `worker.py` owns the thread in which
the batch runs; `schema.py` says what a request may hold; `voice.py` chooses an answer's tokens.
Needs the extra `serve`.
"""
