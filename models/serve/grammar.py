"""Answers of a given form: llguidance says which tokens may come next."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ggraph import Array
from ggraph.decode.draft.tree import Draft
from ggraph.text.tokenizer import Tokenizer

from .errors import Refused
from .schema import ResponseFormat

MOST_SCHEMA = 1 << 16  # bytes of a schema
ANY_OBJECT = {"type": "object"}
ADVICE = 'no grammar here holds that: leave it out, or say "strict": false to have the rest held'
# Of a schema's keys, those that hold schemas by names of somebody's own, and those that hold none
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("const", "enum", "default", "examples"))
# One way to space JSON: a model that is free to may go on with spaces for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What llguidance says of a schema within a grammar, where in that this is, and the lines around it
_WITHIN = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)\n *\d+ \| .*", re.DOTALL)
# A mask costs some milliseconds, a grammar up to some hundreds: what needs more is refused.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class _Words:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        v = tokenizer.vocabulary
        self.eos_token_id = v.eos_id if v.eos_id is not None else min(tokenizer.eos_ids)
        self.bos_token_id = v.bos_id
        self.special_token_ids = sorted(v.control)
        self.tokens = [
            b"\xff" + v.tokens[i].encode() if i in v.control else v.pieces[i]
            for i in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False)


class Grammars:
    """Makes forms for one vocabulary; what takes time is done once, and `GrammarForm.fresh` gives
    each answer its own."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self._width = width  # of logits
        ends = sorted(tokenizer.eos_ids)
        words = TokenizerWrapper(_Words(tokenizer))
        self._tokenizer = LLTokenizer(words, n_vocab=width, eos_token=ends)

    def json_schema(self, schema: dict[str, Any], *, lenient: bool = False) -> "GrammarForm":
        """JSON that a schema describes, where `lenient` as far as a grammar can hold that. Refused
        for one that is none, takes too much, or says what no grammar can hold."""
        try:
            return self._json(schema, lenient)
        except Refused as error:
            with suppress(Refused):
                if not lenient and self._json(schema, True):
                    error = Refused(f"{error}: {ADVICE}", param=error.param)
            raise error from None

    def _json(self, schema: dict[str, Any], lenient: bool) -> "GrammarForm":
        text = dumped(schema, lenient=lenient)
        try:
            grammar = LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise Refused(f"schema: {error}", param="response_format") from None
        return self._form(grammar, "response_format")

    def lark(self, grammar: str, param: str) -> "GrammarForm":
        """What a grammar in Lark's notation describes. Refused as a schema is."""
        return self._form(LLMatcher.grammar_from_lark(grammar), param)

    def _form(self, grammar: str, param: str) -> "GrammarForm":
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            said = _WITHIN.sub(r"\1", matcher.get_error())
            raise Refused(f"schema: {said}"[:300], param=param)
        return GrammarForm(matcher, self._width)


@dataclass(eq=False)
class GrammarForm:
    """A form that an answer is following."""

    matcher: LLMatcher
    width: int

    def fresh(self) -> "GrammarForm":
        """One of its own, which is where this one is."""
        return GrammarForm(self.matcher.deep_copy(), self.width)

    def allow(self, logits: Array) -> Array:
        """The logits of tokens that may come next, -inf elsewhere. Refused where the grammar
        became too dear to follow."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(mask, bitorder="little", count=self.width).view(bool)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> bool:
        """Go on with a token; whether nothing but an end may follow. Refused as by `allow`."""
        self.matcher.consume_token(token)
        self._check()
        return bool(self.matcher.is_stopped())

    def _check(self) -> None:
        if self.matcher.is_error():
            raise Refused(f"schema: {self.matcher.get_error()}"[:300])

    def permitted(self, draft: Draft) -> Draft:
        """The draft without what the grammar forbids: of each way down, all up to there."""
        if draft.is_chain:
            return draft.first(self.matcher.validate_tokens(list(draft.tokens)))
        kept, inner = set[int](), set(draft.parents)
        for leaf in (n for n in range(len(draft)) if n not in inner):
            path = draft.path(leaf)
            kept.update(path[: self.matcher.validate_tokens([draft.tokens[n] for n in path])])
        return draft.pruned(kept)


def schema_of(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """The schema of an answer's text; None where any text will do. Refused where it is missing."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return wanted.schema_ or ANY_OBJECT
    if wanted.json_schema is not None:
        return wanted.json_schema.schema_
    if wanted.schema_ is None:
        raise Refused("response_format.json_schema: Field required", param="response_format")
    return wanted.schema_


def dumped(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """A schema with its spacing, as text; a `lenient` one is followed as far as that can be.
    Refused where it is too long, or nested too deep."""
    try:
        told = _asking(schema) if "uniqueItems" in str(schema) else schema
        text = json.dumps({**told, "x-guidance": {**SPACING, "lenient": lenient}})
    except (ValueError, RecursionError) as error:
        raise Refused(f"schema: {error}", param="response_format") from None
    if len(text) > MOST_SCHEMA:
        raise Refused(f"schema: expected at most {MOST_SCHEMA} bytes, got {len(text)}")
    return text


def _asking(schema: Any) -> Any:
    """A schema without `uniqueItems` where that is false: it asks for nothing, and llguidance
    refuses it."""
    if isinstance(schema, list):
        return [_asking(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: v for k, v in schema.items() if k != "uniqueItems" or v is not False}
    for key, value in found.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: _asking(part) for name, part in value.items()}
        elif key not in VALUES:
            found[key] = _asking(value)
    return found
