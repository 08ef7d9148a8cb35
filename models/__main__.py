"""`python -m models`: the runner."""

from .cli import main

main()
