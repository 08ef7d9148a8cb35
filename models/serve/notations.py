"""How models write calls of functions: a notation for each kind of chat template."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ggraph.text.stream import THINK, THOUGHT
from ggraph.text.tokenizer import Tokenizer

from .arguments import JSON, Arguments, Tagged, spaced
from .literals import Literals

_MARKER = re.compile(r"</?\|?[\w\"|]+>|\[[A-Z_]+\]")  # what may be a special token


@dataclass(frozen=True)
class Notation:
    """Calls are `opening`, one or more calls with `joint` between them (one alone without it), and
    `closing`; a space in these, and in `after`, is white space that may be missing. A call is one
    of `before`, its name, `between`, its arguments, `after`. Without an opening calls are the whole
    answer, and the functions' names tell them from text."""

    sign: tuple[str, ...]  # what a chat template contains that teaches it
    opening: str
    before: tuple[str, ...]  # the first is how calls are told
    between: str
    after: str
    joint: str
    closing: str
    arguments: Arguments = JSON
    unseen: str = ""  # a special token that may begin an answer of calls, and is no text
    id_letters: int | None = None  # how many a call's id has, where templates demand that
    single: bool = False  # whether templates take one call a message
    headers: tuple[tuple[str, str], ...] = ()  # what is around a name, where parts have headers
    thoughts: tuple[tuple[str, str], ...] = ()  # what is around parts that may come before all
    said: str = ""  # what is before text

    @property
    def marker(self) -> str:
        """What ends the text before calls; empty without an opening."""
        return self.opening.partition(" ")[0]

    @cached_property
    def first(self) -> re.Pattern[str]:
        """The first call up to its arguments; the group is its name."""
        return re.compile(spaced(self.opening) + self._begun)

    @cached_property
    def later(self) -> re.Pattern[str]:
        """Another one."""
        return re.compile(spaced(self.joint) + self._begun)

    @cached_property
    def ended(self) -> re.Pattern[str]:
        """What is behind a call's arguments."""
        return re.compile(spaced(self.after))

    @property
    def _begun(self) -> str:
        before = "|".join(map(re.escape, self.before))
        return rf"(?:{before})([\w.-]+){re.escape(self.between)}"

    def begun(self, name: str) -> list[str]:
        """A call up to its arguments, in all ways."""
        if self.headers:
            return [f"{before}{name}{behind}" for before, behind in self.headers]
        return [f"{before}{name}{self.between}" for before in self.before]

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls of these names and arguments."""
        opening, after, joint, closing = (
            p.replace(" ", "") for p in (self.opening, self.after, self.joint, self.closing)
        )
        each = (f"{self.begun(n)[0]}{self.arguments.written(a)}{after}" for n, a in calls)
        return opening + joint.join(each) + closing

    def special(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The ids of special tokens in it, and of those around thoughts."""
        pairs = (*self.headers, *self.thoughts, (THINK, THOUGHT))
        around = (self.unseen, self.said, *(text for pair in pairs for text in pair))
        found = {p: tokenizer.id_of(p) for p in _MARKER.findall(" ".join((*self._own, *around)))}
        return {p: i for p, i in found.items() if i is not None and i in tokenizer.special_ids}

    def shown(self, special: Mapping[str, int]) -> frozenset[int]:
        """Those special tokens that belong to the text of calls."""
        return frozenset(special[p] for p in _MARKER.findall(" ".join(self._own)) if p in special)

    @property
    def _own(self) -> tuple[str, ...]:
        """What calls are written with."""
        around = self.opening, *self.before, self.between, self.after, self.joint, self.closing
        return *around, *self.arguments.texts

    def id_of(self, given: str) -> str:
        """A call's id as templates take it; it follows from the one that was given."""
        if self.id_letters is None or len(given) == self.id_letters:
            return given
        return hashlib.sha256(given.encode()).hexdigest()[: self.id_letters]


HERMES = Notation(  # Qwen's, too; a model whose template teaches none is told of it
    sign=("<tool_call>",),
    opening="<tool_call> ",
    before=('{"name": "',),
    between='", "arguments": ',
    after="}",
    joint=" </tool_call> <tool_call> ",
    closing=" </tool_call>",
)
LLAMA = Notation(
    sign=('{"name": function name, "parameters": ',),
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
    HERMES,
    sign=("[TOOL_CALLS]",),
    opening="[TOOL_CALLS] [ ",
    joint=" , ",
    closing=" ]",
    id_letters=9,
)
MISTRAL = Notation(
    sign=("[ARGS]",),
    opening="[TOOL_CALLS]",
    before=("",),
    between="[ARGS]",
    after="",
    joint=" [TOOL_CALLS]",
    closing="",
    id_letters=9,
)
GRANITE = replace(  # up to 3.3; later ones have Hermes'
    MISTRAL_LIST, sign=("<|tool_call|>",), opening="<|tool_call|> [ ", id_letters=None
)
TAGS = replace(  # of Qwen3-Coder and Qwen3.5
    HERMES, sign=("<tool_call>", "<parameter="), before=("<function=",), between=">\n",
    arguments=Tagged("<parameter=", ">\n", "\n</parameter>\n"), after="</function>",
)  # fmt: skip
GLM = replace(  # of GLM-4.5 and later
    HERMES, sign=("<tool_call>", "<arg_key>"), opening="<tool_call>", before=("",), between="",
    arguments=Tagged(" <arg_key>", "</arg_key> <arg_value>", "</arg_value>"),
    after=" </tool_call>", joint=" <tool_call>", closing="",
)  # fmt: skip
LFM2 = Notation(
    sign=("List of tools: ",), opening="<|tool_call_start|> [ ", before=("",), between="(",
    arguments=Literals(
        ("'", '"'), assign="=", colon=": ", joint=", ", named=True, escaped=True,
        words={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
    ),
    after=")", joint=" , ", closing=" ] <|tool_call_end|>",
)  # fmt: skip
GEMMA = Notation(  # Gemma 4's
    sign=("<|tool_call>call:",), opening="<|tool_call>", before=("call:",), between="{",
    arguments=Literals(
        ('<|"|>',), assign=":", colon=":", joint=",", named=False, escaped=False, ordered=True,
        words={"true": ("true",), "false": ("false",), "null": ("null", "None")},
    ),
    after="}", joint="<tool_call|> <|tool_call>", closing="<tool_call|>",
    thoughts=(("<|channel>thought\n", "<channel|>"),),
)  # fmt: skip
_NEXT = "<|end|><|start|>assistant"
HARMONY = Notation(  # gpt-oss's, as stream.py shows what is written with one of the `headers`
    sign=("<|channel|>commentary",), opening="<|channel|>commentary to=functions.", before=("",),
    between="<|message|>", after="", joint="", closing="", single=True,
    headers=tuple(
        way
        for form in ("<|constrain|>json", " <|constrain|>json", " json", "")
        for way in (
            ("<|channel|>commentary to=functions.", f"{form}<|message|>"),
            (" to=functions.", f"<|channel|>commentary{form}<|message|>"),
        )
    ),
    thoughts=(
        ("<|channel|>analysis<|message|>", _NEXT), ("<|channel|>commentary<|message|>", _NEXT),
    ),
    said="<|channel|>final<|message|>",
)  # fmt: skip
# The first all of whose signs are there counts: a template with [ARGS] has [TOOL_CALLS], too.
NOTATIONS = (
    HARMONY, GEMMA, TAGS, GLM, HERMES, LLAMA, MISTRAL, MISTRAL_LIST, GRANITE, LFM2
)  # fmt: skip
OTHERS = "<function=", "<invoke ", "<tool_calls>"  # beside <tool_call>, which are not here


@lru_cache  # which a server asks of one template, for every request
def notation_of(template: str) -> Notation | None:
    """The notation that a chat template teaches; None where it knows no tools, or teaches one that
    is not here."""
    if "tools" not in template:
        return None
    found = next((n for n in NOTATIONS if all(s in template for s in n.sign)), None)
    return None if found is HERMES and any(sign in template for sign in OTHERS) else found
