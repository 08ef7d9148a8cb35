"""Functions that a model may call, what answers say of them, and how clients hear it, whole and in
pieces."""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from serve_kit import FLAG, WORD

from models.serve.calls import Call, Calls, Piece, Reading
from models.serve.generation import Asked, Generation
from models.serve.inbox import Ended, Inbox
from models.serve.messages import Tool
from models.serve.reader import Answers
from models.serve.replies import Dialect, Events, Whole
from models.serve.voice import Chance, Said
from models.serve.worker import Ticket

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ELSEWHERE = {**FLAG, "properties": {"on": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}}


def tool(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


TOOLS = [
    Tool.model_validate(tool(n, s))
    for n, s in (("f", FLAG), ("ff", WORD), ("g", None), ("refers", ELSEWHERE))
]
JSON = '{"on": false}'
FUNCTIONS = {t.function.name: t.function.parameters for t in TOOLS}
SILENT: Any = None  # metrics of answers that nobody measures
SERVICE: Any = SimpleNamespace(settings=SimpleNamespace(ping_seconds=9))


def told(texts: Sequence[str], finish: str, dialect: Dialect, chances: bool) -> Answers:
    """Answers that say these texts, some letters at a time."""
    chance = Chance(97, -1.0) if chances else None
    cut = ([Said(97, t[at : at + 3], chance) for at in range(0, len(t), 3)] for t in texts)
    return heard(list(cut), finish)


def heard(answers: Sequence[Sequence[Said]], finish: str) -> Answers:
    """Answers whose tokens say this."""
    inbox = Inbox(eager=True)
    for index, said in enumerate(answers):
        for what in said:
            inbox.put((index, what))
        t: Any = SimpleNamespace(ended=finish, new=5, reused=0, drafted=0, accepted=0)
        inbox.put((index, Ended(t)))
    return Answers([Ticket(i, inbox) for i in range(len(answers))], inbox, 3)


def both_ways(asked: Callable[[], Asked]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The choices of a whole reply, and the events of the same in pieces."""
    generation = Generation(SERVICE, SILENT)

    async def whole() -> dict[str, Any]:
        return await generation.whole(asked())

    async def events() -> Events:
        async for e in generation.events(asked()):
            yield e

    return asyncio.run(whole())["choices"], data_of(events())


def data_of(events: Events) -> list[dict[str, Any]]:
    async def run() -> bytes:
        return b"".join([e async for e in events])

    lines = asyncio.run(run()).decode().splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(d) for d in found if d != "[DONE]"]


def joined(events: list[dict[str, Any]], index: int) -> tuple[str, list[Any], list[Any], str]:
    """Text, calls, chances and end of a streamed choice."""
    found = [c for e in events for c in e["choices"] if c["index"] == index]
    deltas = [c["delta"] for c in found]
    calls = list[Any]()
    for piece in (c for d in deltas for c in d.get("tool_calls", ())):
        at, more = piece["index"], piece["function"]
        if "id" in piece:  # a call begins, behind the one before
            assert at == len(calls) and piece["type"] == "function" and more["name"]
            calls.append({k: v for k, v in piece.items() if k != "index"})
        else:
            assert at == len(calls) - 1 and set(piece) == {"index", "function"}
            assert set(more) == {"arguments"} and more["arguments"]
            before = calls[-1]["function"]
            calls[-1]["function"] = {**before, "arguments": before["arguments"] + more["arguments"]}
    logprobs = [e for c in found for e in (c.get("logprobs") or {}).get("content", ())]
    text = "".join(d.get("content", "") for d in deltas)
    return text, calls, logprobs, found[-1]["finish_reason"]


def calls_of(reading: Reading, text: str, finish: str = "stop", answer: str = "a") -> list[Call]:
    """The calls of an answer that has ended."""
    calls = Calls(reading, answer)
    calls.read(text, finish)
    return calls.found


def whole_calls(reading: Reading, text: str) -> list[tuple[str, str]]:
    """Names and arguments of the whole calls of an answer that is there, by another way: one after
    another, each read as a whole."""
    at, found = reading.marker(text), list[tuple[str, str]]()
    beginning, notation = reading.notation.first, reading.notation
    while at >= 0 and (begun := beginning.match(text, at)) and begun[1] in reading.functions:
        given = notation.arguments.read(text, begun.end(), reading.functions[begun[1]])
        ended = given and notation.ended.match(text, given[1])
        if given is None or not ended:
            break
        found.append((begun[1], given[0]))
        at, beginning = ended.end(), notation.later
    return found


def heard_in_pieces(
    reading: Reading, text: str, finish: str, cuts: Sequence[int]
) -> tuple[str, list[Call], list[Piece]]:
    """Text and calls of an answer that comes in pieces, and what was told of the calls."""
    a, shown, pieces = Whole(calls=Calls(reading, "a")), "", list[Piece]()
    at = [0, *cuts]
    for start, stop in pairwise(at):
        a.text += text[start:stop]
        a.finish = finish if stop == at[-1] else None  # as the last piece is the end's
        more, news = a.news()
        shown, pieces = shown + more, pieces + news
    return shown, a.called, pieces


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": WORD}}
