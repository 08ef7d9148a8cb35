"""`python -m models`: the runner."""

from .cli.app import main

main()
