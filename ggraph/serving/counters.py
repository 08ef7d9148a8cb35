"""What a batch has done, for whoever watches it."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What a batch has done so far."""

    steps: int = 0
    prompt_rows: int = 0
    reused: int = 0  # tokens of prompts that were in the cache
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    restored: int = 0  # tokens whose rows were read from the disk
    seconds: float = 0.0  # of steps
