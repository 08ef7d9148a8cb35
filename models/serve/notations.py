"""How models write calls of functions: a notation for each kind of chat template."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ggraph.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Notation:
    """Calls are `opening`, one or more calls with `joint` between them, and `closing`; a space in
    these is white space that may be missing. A call is one of `before`, its name, `between`, its
    arguments, `after`. Without an opening calls are the whole answer, and the functions' names tell
    them from text."""

    sign: str  # what a chat template contains that teaches it
    opening: str
    before: tuple[str, ...]  # the first is how calls are told
    between: str
    after: str
    joint: str
    closing: str
    unseen: str = ""  # a special token that may begin an answer of calls, and is no text
    id_letters: int | None = None  # how many a call's id has, where templates demand that
    single: bool = False  # whether templates take one call a message

    @property
    def marker(self) -> str:
        """What ends the text before calls; empty without an opening."""
        return self.opening.partition(" ")[0]

    @cached_property
    def first(self) -> re.Pattern[str]:
        """The first call up to its arguments; the group is its name."""
        return re.compile(_spaced(self.opening) + self._begun)

    @cached_property
    def later(self) -> re.Pattern[str]:
        """Another one."""
        return re.compile(_spaced(self.joint) + self._begun)

    @property
    def _begun(self) -> str:
        before = "|".join(map(re.escape, self.before))
        return rf"(?:{before})([\w.-]+){re.escape(self.between)}"

    def begun(self, name: str) -> list[str]:
        """A call up to its arguments, in all ways."""
        return [f"{before}{name}{self.between}" for before in self.before]

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls of these names and arguments."""
        each = (f"{self.begun(name)[0]}{arguments}{self.after}" for name, arguments in calls)
        opening, joint, closing = (
            p.replace(" ", "") for p in (self.opening, self.joint, self.closing)
        )
        return opening + joint.join(each) + closing

    def special(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The ids of its parts that are special tokens."""
        around = f"{self.opening} {self.joint} {self.closing} {self.unseen}".split()
        found = {part: tokenizer.id_of(part) for part in (*around, self.between)}
        return {p: i for p, i in found.items() if i is not None and i in tokenizer.special_ids}

    def id_of(self, given: str) -> str:
        """A call's id as templates take it; it follows from the one that was given."""
        if self.id_letters is None or len(given) == self.id_letters:
            return given
        return hashlib.sha256(given.encode()).hexdigest()[: self.id_letters]


def _spaced(text: str) -> str:
    return r"\s*".join(map(re.escape, text.split(" ")))


HERMES = Notation(  # Qwen's, too; a model whose template teaches none is told of it
    sign="<tool_call>",
    opening="<tool_call> ",
    before=('{"name": "',),
    between='", "arguments": ',
    after="}",
    joint=" </tool_call> <tool_call> ",
    closing=" </tool_call>",
)
LLAMA = Notation(
    sign='{"name": function name, "parameters": ',
    opening="",
    before=('{"name": "', '{"type": "function", "name": "'),  # as functions are described to it
    between='", "parameters": ',
    after="}",
    joint="; ",
    closing="",
    unseen="<|python_tag|>",
    single=True,
)
MISTRAL_LIST = replace(
    HERMES, sign="[TOOL_CALLS]", opening="[TOOL_CALLS] [ ", joint=" , ", closing=" ]", id_letters=9
)
MISTRAL = Notation(
    sign="[ARGS]",
    opening="[TOOL_CALLS]",
    before=("",),
    between="[ARGS]",
    after="",
    joint=" [TOOL_CALLS]",
    closing="",
    id_letters=9,
)
GRANITE = replace(  # up to 3.3; later ones have Hermes'
    MISTRAL_LIST, sign="<|tool_call|>", opening="<|tool_call|> [ ", id_letters=None
)
# The first whose sign is there counts: a template with [ARGS] has [TOOL_CALLS], too.
NOTATIONS = HERMES, LLAMA, MISTRAL, MISTRAL_LIST, GRANITE
OTHERS = "<function=", "<arg_key>"  # within <tool_call>, of Qwen3.5 and GLM: arguments as tags


def notation_of(template: str) -> Notation | None:
    """The notation that a chat template teaches; None where it knows no tools, or teaches one that
    is not here."""
    if "tools" not in template or any(sign in template for sign in OTHERS):
        return None
    return next((n for n in NOTATIONS if n.sign in template), None)
