"""Answers that go on elsewhere are byte for byte what they would have been."""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from going_kit import ASKED as OF_ANY
from going_kit import GAPS, TEXT
from small_model import learnable_model

from models.run.load import Loaded, load
from models.serve import going_on
from models.serve.app import make_app
from models.serve.engine import Service
from models.serve.going_on import Failed, GoingOn, Head, Patience
from models.serve.inside import Inside
from models.serve.settings import Settings

JSON = (("content-type", "application/json"),)
ASKED = {**OF_ANY, **GAPS}
# Some of the model's tokens that stand for nothing fill in the middle
MARKS = {f"tokenizer.ggml.fim_{r}_token_id": i for i, r in enumerate(("pre", "suf", "mid"), 270)}


@dataclass(eq=False)
class Mortal:
    """Asks servers in turn; replies break off after so many events, or in the middle of a byte run.
    `cuts` are events per attempt."""

    servers: Sequence[Inside]
    cuts: list[int] = field(default_factory=list)
    ragged: random.Random | None = None
    asked: int = 0
    hangs: bool = False

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        failed: Sequence[str],
    ) -> AsyncGenerator[Head | bytes, None]:
        inside = self.servers[self.asked % len(self.servers)]
        cut = self.cuts[self.asked] if self.asked < len(self.cuts) else 1 << 30
        self.asked += 1
        async with contextlib.aclosing(inside.ask(method, path, headers, body)) as parts:
            async for part in parts:
                if cut < 0:
                    await self._die()
                cut -= 1
                if isinstance(part, bytes) and cut < 0 and self.ragged is not None:
                    yield part[: self.ragged.randrange(len(part))]
                    await self._die()
                yield part

    async def _die(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        raise ConnectionResetError("killed")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Loaded]]:
    path = learnable_model(tmp_path_factory.mktemp("filling"), MARKS)
    found = [load(path, threads=1) for _ in range(2)]
    yield found
    for m in found:
        m.close()


@contextlib.asynccontextmanager
async def servers(loaded: Sequence[Loaded]) -> AsyncIterator[list[Inside]]:
    """Two servers that differ in all that should not matter."""
    settings = [Settings(parallel=4), Settings(parallel=7, draft=0)]
    found = [
        Inside(make_app(Service(m, s, slots)), str(slots))
        for m, s, slots in zip(loaded, settings, (1024, 1700), strict=True)
    ]
    async with found[0].life(), found[1].life():
        yield found


async def heard(mortal: Mortal, path: str, body: dict[str, Any], **patience: Any) -> list[Any]:
    """Status and bytes of a reply, pings left out."""
    client = GoingOn(mortal.ask, Patience(**{"silence": 900.0, "trouble": 900.0, **patience}))
    parts = [p async for p in client.reply("POST", path, JSON, json.dumps(body).encode())]
    head, *rest = parts
    assert isinstance(head, Head) and not any(isinstance(p, Head) for p in rest)
    return [head.status, *(p for p in rest if p[:1] != b":")]


def comparable(reply: Sequence[Any]) -> dict[int, list[bytes]]:
    """Events by choice, without what says how an answer was computed."""
    lanes: dict[int, list[bytes]] = {}
    for part in reply[1:]:
        text = part.decode()
        if "data: {" in text or text[0] == "{":
            data = json.loads(text.partition("data: ")[2] or text)
            for holder in (data, data.get("response") or {}, data.get("message") or {}):
                usage = holder.get("usage") or {}
                for key in [k for k in usage if k.endswith("_details")]:
                    usage.pop(key)
                if "cache_read_input_tokens" in usage:  # counted beside those of the input
                    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
            for key in ("timings", "tokens_cached"):
                data.pop(key, None)
            lane = data["choices"][0]["index"] if data.get("choices") else data.get("index", -1)
            lanes.setdefault(lane, []).append(json.dumps(data).encode())
        else:
            lanes.setdefault(-1, []).append(part)
    return lanes


@pytest.fixture(autouse=True)
def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on, "_begun", lambda: {"id": "0a" * 12, "created": 1_700_000_000})
    monkeypatch.setattr(going_on, "FIRST_PAUSE", 0.0)


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_goes_on_from_every_position(loaded: list[Loaded], name: str) -> None:
    path, body = ASKED[name]
    body = {**body, "stream": True}

    async def run() -> None:
        async with servers(loaded) as found:
            whole = await heard(Mortal(found[:1]), path, body)
            events = comparable(whole)
            assert whole[0] == 200 and len(whole) > 4
            for cut in range(-1, len(whole)):
                mortal = Mortal(found, [cut])
                reply = await heard(mortal, path, body)
                assert mortal.asked == 2
                assert comparable(reply) == events, cut
                assert len(reply) == len(whole)

    asyncio.run(run())


def test_the_stream_is_the_one_that_a_plain_client_gets(loaded: list[Loaded]) -> None:
    """But for where it is cut: one that goes on elsewhere has an event for each token."""

    async def run() -> None:
        async with servers(loaded) as found:
            for path, body in ASKED.values():
                raw = json.dumps({**body, "stream": True}).encode()
                asked = found[0].ask("POST", path, JSON, raw)
                text = b"".join([p async for p in asked if isinstance(p, bytes)])
                plain = [200, *(e + b"\n\n" for e in text.split(b"\n\n")[:-1])]
                reply = await heard(Mortal(found[:1]), path, {**body, "stream": True})
                assert in_a_row(stripped(plain)) == in_a_row(stripped(reply))

    asyncio.run(run())


def stripped(reply: Sequence[Any]) -> list[Any]:
    """What of a reply does not depend on its name and its date."""
    found = []
    for lane, events in sorted(comparable([200, *reply[1:]]).items()):
        for e in events:
            if e.startswith(b"{"):
                data = json.loads(e)
                for key in (
                    "id",
                    "created",
                    "item_id",
                    "response",
                    "item",
                    "message",
                    "content_block",
                ):
                    data.pop(key, None)
                for c in data.get("choices", ()):
                    for call in c.get("delta", {}).get("tool_calls", ()):
                        call.pop("id", None)  # where it begins
                e = json.dumps(data).encode()
            found.append((lane, e))
    return found


def in_a_row(events: Sequence[Any]) -> list[Any]:
    """Events of text that follow one another as one, and those of arguments; numbers, which tell
    them apart, left out."""
    found: list[Any] = []
    for lane, e in events:
        data = json.loads(e) if e.startswith(b"{") else {"whole": e}
        data.pop("sequence_number", None)
        choice = (data.get("choices") or [{}])[0]
        holder, key = choice.get("delta") or choice, "content" if "delta" in choice else "text"
        for piece in holder.get("tool_calls", ()):
            if piece.pop("type", ""):
                found.append([lane, "a call", piece["function"].pop("name")])
            holder, key = piece["function"], "arguments"
        if data.get("type") == "content_block_delta" and "text" in data["delta"]:
            holder, key = data["delta"], "text"
        if data.get("type") == "content_block_delta" and "partial_json" in data["delta"]:
            holder, key = data["delta"], "partial_json"
        if str(data.get("type")).endswith(("output_text.delta", "arguments.delta")):
            holder, key = data, "delta"
        if data.get("stop") is False:  # of a gap
            holder, key = data, "content"
        text = holder.pop(key, "") if data.get("type") or choice.get("logprobs") is None else ""
        if text and found and found[-1][:2] == [lane, data]:
            found[-1][2] += text
        else:
            found.append([lane, data, text])
    return found


def test_a_stream_survives_many_deaths_in_the_middle_of_bytes(loaded: list[Loaded]) -> None:
    async def run() -> None:
        async with servers(loaded) as found:
            for name in ("seeded", "a form", "choices", "responses"):
                path, body = ASKED[name]
                body = {**body, "stream": True}
                events = comparable(await heard(Mortal(found[:1]), path, body))
                for seed in range(6):
                    r = random.Random(seed)
                    mortal = Mortal(found, [r.randrange(8) for _ in range(5)], r)
                    assert comparable(await heard(mortal, path, body)) == events
                    assert mortal.asked > 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["seeded", "chat with chances", "a demanded call", "responses", "a gap of lines"]
)
def test_a_whole_reply_goes_on_too(loaded: list[Loaded], name: str) -> None:
    path, body = ASKED[name]

    async def run() -> None:
        async with servers(loaded) as found:
            whole = comparable(await heard(Mortal(found[:1]), path, body))
            for cut in (-1, 0, 1, 2):
                mortal = Mortal(found, [cut, cut])
                assert comparable(await heard(mortal, path, body)) == whole
                assert mortal.asked > 1

    asyncio.run(run())


def test_a_hung_replica_is_left(loaded: list[Loaded]) -> None:
    path, body = ASKED["seeded"]
    body = {**body, "stream": True}

    async def run() -> None:
        async with servers(loaded) as found:
            whole = await heard(Mortal(found[:1]), path, body)
            mortal = Mortal(found, [7], hangs=True)
            assert await heard(mortal, path, body, silence=0.5) == whole

    asyncio.run(run())


def test_what_no_model_answers_is_asked_again(loaded: list[Loaded]) -> None:
    async def run() -> None:
        async with servers(loaded) as found:
            for cut in (0, 1):
                mortal = Mortal(found, [cut])
                reply = await heard(mortal, "/tokenize", {"content": "abc"})
                assert reply[0] == 200 and json.loads(b"".join(reply[1:]))["tokens"]

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_no_text_is_read_or_made_in_the_loop_s_thread(
    loaded: list[Loaded], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which others wait for: a million ids take a good part of a second."""
    tokenizer, threads = loaded[0].tokenizer, list[threading.Thread]()
    for name in ("encode", "decode"):
        monkeypatch.setattr(
            tokenizer, name, lambda *_, **__: threads.append(threading.current_thread())
        )

    async def run() -> None:
        async with servers(loaded) as found:
            reply = await heard(Mortal(found[:1]), path, {"content": "ab", "tokens": [97]})
            assert reply[0] == 200 and threads and threading.current_thread() not in threads

    asyncio.run(run())


def test_what_was_refused_is_refused(loaded: list[Loaded]) -> None:
    async def run() -> None:
        async with servers(loaded) as found:
            for stream in (False, True):
                for wrong in (
                    {"prompt": ""},
                    {"prompt": "a", "n": 60},
                    {"prompt": "a", "top_p": 9},
                ):
                    mortal = Mortal(found)
                    reply = await heard(mortal, TEXT, {**wrong, "stream": stream})
                    assert reply[0] == 400 and mortal.asked == 1, reply

    asyncio.run(run())


@pytest.mark.parametrize("stream", [1, "true"])
def test_whether_there_is_a_stream_is_said_in_one_way(loaded: list[Loaded], stream: Any) -> None:
    """What one of client and server took for a stream, and the other not, would break off."""

    async def run() -> None:
        async with servers(loaded) as found:
            reply = await heard(Mortal(found), TEXT, {"prompt": "a", "stream": stream})
            assert reply[0] == 400 and b"stream: Input should be a valid boolean" in reply[1]

    asyncio.run(run())


def test_nobody_can_put_words_into_a_models_mouth(loaded: list[Loaded]) -> None:
    """Tokens that the model would not say end the answer, and none of them is shown."""
    lanes = [{"lane": 0, "events": 2, "tokens": [97, 98, 99]}]
    begun = {"id": "ab", "created": 1, "lanes": lanes}
    body = {"prompt": "abc", "temperature": 0, "stream": True, "going_on": begun}

    async def run() -> None:
        async with servers(loaded) as found:
            said = b""
            with pytest.raises(Exception, match="was said before, but this model says"):
                async for part in found[0].ask("POST", TEXT, JSON, json.dumps(body).encode()):
                    said += part if isinstance(part, bytes) else b""
            assert b"data" not in said
            lanes[0]["tokens"] = [99999]
            raw = json.dumps(body).encode()
            first = await anext(found[0].ask("POST", TEXT, JSON, raw))
            assert isinstance(first, Head) and first.status == 400

    asyncio.run(run())


def test_a_request_that_nobody_can_serve_fails_in_the_end(loaded: list[Loaded]) -> None:
    path, body = ASKED["seeded"]

    async def run() -> None:
        async with servers(loaded) as found:
            with pytest.raises(Failed, match="killed"):
                await heard(Mortal(found, [-1] * 999), path, body, trouble=0.2)
            late = Mortal(found, [5] + [-1] * 999)
            reply = await heard(late, path, {**body, "stream": True}, trouble=0.2)
            assert b"no replica can go on" in reply[-1]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_is_no_trouble(
    loaded: list[Loaded], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the time without progress, not how long an answer has taken."""
    path, body = ASKED["seeded"]
    body, begun = {**body, "stream": stream}, time.monotonic()
    now = [begun]
    monkeypatch.setattr(
        going_on, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e9)
    )

    class Slow(Mortal):
        async def ask(self, *asked: Any) -> AsyncGenerator[Head | bytes, None]:
            async for part in super().ask(*asked):
                yield part
                now[0] += 100.0

    async def run() -> None:
        async with servers(loaded) as found:
            whole = await heard(Mortal(found[:1]), path, body)
            mortal = Slow(found, [1])
            reply = await heard(mortal, path, body, trouble=120.0)
            assert mortal.asked == 2 and now[0] > begun + 120.0
            assert comparable(reply) == comparable(whole)

    asyncio.run(run())


@pytest.mark.parametrize("path", [TEXT, "/v1/embeddings"])
def test_a_replica_that_has_failed_is_no_answer(loaded: list[Loaded], path: str) -> None:
    """One without room may say so to the client after a while; a failed one may not."""

    class Refusing(Mortal):
        status = 503

        async def ask(self, *asked: Any) -> AsyncGenerator[Head | bytes, None]:
            if self.asked < 5:
                self.asked += 1
                yield Head(self.status, (), "failed")
                yield b"{}"
                return
            assert asked[-1] == ["failed"] * 5
            async for part in super().ask(*asked):
                yield part

    async def run() -> None:
        async with servers(loaded) as found:
            body = {"prompt": "abc", "max_tokens": 4} if path == TEXT else {"input": "a"}
            assert (await heard(Refusing(found), path, body))[0] == 200
            busy = Refusing(found)
            busy.status = 429
            assert (await heard(busy, TEXT, {"prompt": "abc"}))[0] == 429 and busy.asked == 3

    asyncio.run(run())
