"""What a server may use, and who may use it."""

from dataclasses import dataclass

from ggraph import InputError


@dataclass(frozen=True)
class Settings:
    """Bounds of one server. `parallel` answers are computed together, `queued` more may wait, of
    which one request has at most `choices`. Without `keys` everybody may ask; without `origins` no
    page of another site. `body_bytes` bounds a request, `bodies_bytes` all that are arriving,
    `head_seconds` and `body_seconds` how long headers and a body may take to arrive. The latest
    `kept` responses, of `kept_bytes` together, can be gone on from. `draft` is the most tokens
    that are drafted where a request does not say. `alias` is what clients are told that the model
    is called, where that is not its own name."""

    parallel: int = 16
    queued: int = 256
    choices: int = 16
    body_bytes: int = 1 << 23
    bodies_bytes: int = 1 << 26
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    kept: int = 256
    kept_bytes: int = 1 << 24
    ping_seconds: float = 15.0
    draft: int = 8
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log_prompts: bool = False
    alias: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.parallel <= 64 or self.queued < 0 or not 1 <= self.choices <= 64:
            raise InputError(
                f"--parallel {self.parallel}, --queue {self.queued}: expected 1 to 64, 0 or more"
            )
        if not 0 <= self.draft <= 64:
            raise InputError(f"--draft-max {self.draft}: expected 0 to 64")
        if any(not k.strip() for k in self.keys):
            raise InputError("an API key is empty")
