"""Prompts to train on: from a file, and written by the target itself.

A tuned model that is given no more than the opening of a user's turn writes a prompt of the kind
that it was tuned on. Source: Xu et al. 2024 (arXiv 2406.08464).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ggraph import Array, InputError
from ggraph.decode.acceptance import Pick
from ggraph.errors import FormatError
from ggraph.text.chat import ChatTemplate
from ggraph.text.tokenizer import Tokenizer

from ..run.text import utf8

OWN_TOKENS = 128  # most tokens of a prompt that the target writes
_MARK = "\u2402"  # stands for the user's text in a rendered template


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: JSON lines with "prompt", or else one prompt a line."""
    if not path.is_file():
        raise InputError(f"no file of prompts at {path}")
    found: list[str] = []
    for number, line in enumerate(utf8(path.read_bytes(), str(path)).split("\n"), 1):
        if not line.strip():
            continue
        if path.suffix not in (".jsonl", ".json"):
            found.append(line)
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise FormatError(f"{path}:{number}: not a JSON object") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise FormatError(f'{path}:{number}: expected {{"prompt": "..."}}')
        found.append(prompt)
    if not found:
        raise InputError(f"{path} holds no prompts")
    return found


@dataclass(frozen=True)
class Turn:
    """Token ids around a user's text: `before` it, and `after` it up to the answer."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Turn":
        """From the chat template. InputError where a user's turn ends without an end token."""
        messages = [{"role": "user", "content": _MARK}]
        before, found, after = ChatTemplate.of(tokenizer).render(messages).partition(_MARK)
        ids = [tuple(tokenizer.encode(t, special=True, bos=False)) for t in (before, after)]
        if not found or not ids[0] or not ids[1] or ids[1][0] not in tokenizer.eos_ids:
            raise InputError(
                "the chat template does not close a user's turn with an end token, so that the "
                "target cannot write prompts: give prompts in a file, and an own share of 0"
            )
        return cls(*ids)


@dataclass(eq=False)
class OwnPrompt:
    """A pick that first writes a prompt with `write`, closes the turn, then answers with `answer`.

    `written` counts the tokens before the answer.
    """

    turn: Turn
    ends: frozenset[int]
    write: Pick
    answer: Pick
    written: int = 0
    queue: list[int] = field(default_factory=list)
    answering: bool = False

    @property
    def end_count(self) -> int:
        """End tokens until the answer has ended."""
        return 1 + sum(t in self.ends for t in self.turn.after)

    def __call__(self, logits: Array) -> int:
        """The next token."""
        if self.answering and not self.queue:
            return self.answer(logits)
        self.written += 1
        if self.queue:
            return self.queue.pop(0)
        token = self.write(logits)
        if token not in self.ends and self.written < OWN_TOKENS:
            return token
        self.answering, self.queue = True, list(self.turn.after[1:])
        return self.turn.after[0]


def without(prompts: Sequence[str], excluded: Sequence[str]) -> list[str]:
    """Prompts that are not, but for case and punctuation, among the excluded ones."""
    banned = {_plain(p) for p in excluded}
    return [p for p in prompts if _plain(p) not in banned]


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
