"""Talks to llama.cpp, or to one of its kin, in a process of its own, for benchmarks."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggraph import InputError

from .install import built

MISSING = (
    "llama.cpp is not here to compare with: pip install xllamacpp (extra [bench]), "
    "or leave it out with --peer none"
)
NOT_BUILT = "{0} is not here to compare with: ggraph bench install {0}, or leave it out of --peer"


@dataclass(frozen=True)
class Reply:
    """One request. `share` is the part of the asked-for cores that it really got (1: all)."""

    text: str
    prompt_tokens: int
    prompt_seconds: float
    new_tokens: int
    decode_seconds: float
    share: float
    raw: dict[str, Any]

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafted tokens and how many of them were kept; zeros without a head."""
        return self.raw.get("draft_n", 0), self.raw.get("draft_n_accepted", 0)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """New tokens per second; llama.cpp's clock starts when the first one is there."""
        timed = self.new_tokens - 1
        return timed / self.decode_seconds if self.decode_seconds and timed > 0 else 0.0


class Peer:
    """A peer on one GGUF file. InputError where it is absent or refuses the file.

    `name`: one that `ggraph bench install` builds. llama.cpp that was not built, or that is to
    draft with a `head`, is that of the wheel xllamacpp.
    """

    wheel = False  # whether it is that of the wheel, whatever was built

    def __init__(
        self,
        path: Path,
        threads: int,
        context: int = 2048,
        head: Path | None = None,
        chain: int = 4,
        name: str = "llama.cpp",
    ) -> None:
        native = built(name) if head is None and not self.wheel else None
        if native is None and name != "llama.cpp":
            raise InputError(NOT_BUILT.format(name))
        python = (sys.executable, "-m", f"{__package__}.peer_llama")
        command = [
            *(python if native is None else native.command), str(path.resolve()),
            str(threads), str(context),
            *([str(head.resolve()), str(chain)] if head is not None else []),
        ]  # fmt: skip
        self.name = name
        self.threads = threads
        self._process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        first = self._read()
        self.version: str = first["ready"] if native is None else native.version
        self.load_seconds: float = first["load_seconds"]
        self.pid = self._process.pid

    def ask(
        self,
        ids: Sequence[int] | str,
        new: int,
        *,
        keep: bool = False,
        ignore_end: bool = True,
    ) -> Reply:
        """Greedy continuation by `new` tokens of `ids`, or of a text that llama.cpp cuts itself;
        `keep` reuses the last request's cache."""
        return self._ask(ids, new, keep=keep, ignore_eos=ignore_end)

    def _ask(self, ids: Sequence[int] | str, new: int, **more: Any) -> Reply:
        assert self._process.stdin is not None
        request = {"ids": ids if isinstance(ids, str) else list(ids), "new": new, **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        raw = self._read()
        return Reply(
            raw["text"], raw["prompt_n"], raw["prompt_ms"] / 1e3, raw["predicted_n"],
            raw["predicted_ms"] / 1e3, raw["cpu"] / (raw["wall"] * self.threads), raw,
        )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise InputError(f"{self.name} ended without an answer (status {status})")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self.close()
            absent = "not installed" in found["error"]
            raise InputError(MISSING if absent else found["error"])
        return found


class LogprobPeer(Peer):
    """llama.cpp of the wheel xllamacpp, which alone tells chances: those built here say none."""

    wheel = True

    def logprobs(
        self, ids: Sequence[int] | str, new: int, count: int = 1, *, keep: bool = False
    ) -> Reply:
        """As `ask`; `raw` has the `ids` of all tokens, and of the first one's place `probs`, the
        `count` likeliest with their log-probabilities."""
        return self._ask(ids, new, keep=keep, probs=count)
