"""`ggraph batch`: one line for each request, whenever the process was killed."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ROOT, ggraph_here
from serve_kit import TALK

from ggraph import InputError
from models.run.load import Loaded, load
from models.serve.app import make_app
from models.serve.engine import Service
from models.serve.going_on import ALONE, GoingOn
from models.serve.inside import Inside
from models.serve.job import Line, Results, read_requests, run
from models.serve.settings import Settings


def requests(path: Path, count: int, tokens: int = 12) -> Path:
    """A job whose requests have seeds: the answers are the same each time."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": tokens}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": tokens, "stream": True}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": tokens}),
        ("/v1/embeddings", {"input": "abc"}),
    ]
    with path.open("w") as file:
        for i in range(count):
            url, body = bodies[i % len(bodies)]
            seeded = body if url == "/v1/embeddings" else {**body, "seed": i}
            line = {"custom_id": f"r{i}", "method": "POST", "url": url, "body": seeded}
            file.write(json.dumps(line) + "\n")
    return path


def answers(path: Path) -> dict[str, tuple[int, str]]:
    """Status and words by request; each is there once."""
    found: dict[str, tuple[int, str]] = {}
    for line in path.read_text().splitlines():
        given = json.loads(line)
        body = given["response"]["body"]
        assert given["custom_id"] not in found and given["error"] is None
        said = body.get("choices") or body.get("output") or body.get("data") or body["error"]
        text = json.dumps([s | {"id": 0} if isinstance(s, dict) else s for s in said])
        found[given["custom_id"]] = (given["response"]["status_code"], text)
    return found


def answer(
    m: Loaded,
    lines: Sequence[Line],
    out: Path,
    enough: int = 1 << 30,
    at_once: int = 4,
    service: Service | None = None,
) -> None:
    """Answer a job; stop in the middle of things after `enough` answers."""

    async def all_of_it() -> None:
        inside = Inside(make_app(service or Service(m, Settings(parallel=4), 2048)))
        async with inside.life():
            with Results.opened(out, lines) as results:
                whole = asyncio.ensure_future(
                    run(lines, results, GoingOn(inside.ask, ALONE), at_once, lambda _: None)
                )
                while not whole.done() and len(results.done) < enough:
                    await asyncio.sleep(0.001)
                whole.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await whole

    asyncio.run(all_of_it())


def test_a_job_goes_on_from_any_byte_of_its_answers(learnable: Path, tmp_path: Path) -> None:
    lines = read_requests(requests(tmp_path / "in.jsonl", 15))
    m = load(learnable, threads=1)
    answer(m, lines, tmp_path / "whole.jsonl")
    raw, whole = (tmp_path / "whole.jsonl").read_bytes(), answers(tmp_path / "whole.jsonl")
    assert {s for s, _ in whole.values()} == {200, 400} and len(whole) == 15
    r = random.Random(1)
    cuts = [0, 1, len(raw) - 1, len(raw), raw.index(b"\n"), raw.index(b"\n") + 1]
    for cut in [*cuts, *(r.randrange(len(raw)) for _ in range(6))]:
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(raw[:cut])
        answer(m, lines, out, enough=r.randrange(16))
        answer(m, lines, out)
        assert answers(out) == whole, cut
    m.close()


def test_an_engine_without_room_is_asked_again_and_one_that_fails_ends_a_job(
    learnable: Path, tmp_path: Path
) -> None:
    lines, out = read_requests(requests(tmp_path / "in", 10)), tmp_path / "out"
    m = load(learnable, threads=1)
    answer(m, lines, out, at_once=8, service=Service(m, Settings(parallel=1, queued=0), 2048))
    assert len(answers(out)) == 10 and {s for s, _ in answers(out).values()} == {200, 400}
    service = Service(m, Settings(parallel=4), 2048)

    def step(*_: object) -> None:
        raise RuntimeError("the device is gone")

    service.worker.batch.step = step  # type: ignore[assignment, method-assign]
    with pytest.raises(InputError, match="the device is gone"):
        answer(m, lines, tmp_path / "none", service=service)
    m.close()


def test_each_byte_of_a_torn_line_is_taken_away(tmp_path: Path) -> None:
    asked = [Line(str(i), "/v1/completions", b"{}") for i in range(3)]
    out = tmp_path / "out"
    with Results.opened(out, asked) as results:
        for line in asked:
            results.add(line, 200, b'{"text": "a\\u2028\\u00e9"}', "req")
    raw = out.read_bytes()
    for cut in range(len(raw) + 1):
        out.write_bytes(raw[:cut])
        with Results.opened(out, asked) as results:
            done = len(results.done)
            assert done == raw[:cut].count(b"\n")
            for line in asked[done:]:
                results.add(line, 200, b'{"text": "b"}', "req")
        names = [json.loads(x)["custom_id"] for x in out.read_bytes().split(b"\n")[:-1]]
        assert names == ["0", "1", "2"]


def test_a_job_that_is_killed_at_random_has_one_line_for_each_request(
    learnable: Path, tmp_path: Path
) -> None:
    asked, out, other = requests(tmp_path / "in", 30, 40), tmp_path / "out", tmp_path / "other"
    command = [sys.executable, "-m", "models", "batch", str(asked)]
    more = ["-m", str(learnable), "--parallel", "3", "-t", "1", "--json"]
    r, killed = random.Random(3), 0
    for _ in range(4):
        before = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen([*command, str(out), *more], cwd=ROOT)
        until = before + r.randrange(1, 6000)
        while process.poll() is None and (not out.exists() or out.stat().st_size < until):
            time.sleep(0.002)
        process.kill()
        killed += process.wait() != 0
    assert killed >= 2
    for path in (out, other):
        done = subprocess.run(
            [*command, str(path), *more], cwd=ROOT, check=True, capture_output=True
        )
        facts = json.loads(done.stdout)
        assert facts["before"] + facts["now"] == 30
    assert answers(out) == answers(other) and len(answers(out)) == 30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "in:1: no JSON"),
        ("[]", "in:1: expected an object"),
        ('{"custom_id": 5}', "in:1: custom_id"),
        (
            '{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
            "in:1: custom_id '.ud800' is no text",
        ),
        ('\n{"custom_id": "a", "method": "POST", "url": "/x", "body": {}}', "in:2: expected POST"),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}',
            "in:1: body: expected an object",
        ),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' * 2,
            "in:2: custom_id 'a' is that of 1",
        ),
    ],
)
def test_what_is_no_job_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(InputError, match=says):
        read_requests(tmp_path / "in")


def test_answers_of_another_job_and_of_two_at_once_are_refused(tmp_path: Path) -> None:
    asked = [Line("a", "/v1/completions", b"{}")]
    out = tmp_path / "out"
    other = "does not end with an answer"  # a file of somebody's that has no line's end
    for text, says in (("text\n", "is no answer"), ("text", other), ('{"id": 1}', other), *(
        (json.dumps({"custom_id": name}) + "\n", "not of this job")
        for name in ("b", [], {}, 1, None, ["a"])
    )):  # fmt: skip
        out.write_text(text)
        with pytest.raises(InputError, match=says), Results.opened(out, asked):
            pass
        assert out.read_text() == text
    out.unlink()
    twice = pytest.raises(InputError, match="another process")
    with Results.opened(out, asked), twice, Results.opened(out, asked):
        pass


def test_answers_go_to_a_file_alone(tmp_path: Path) -> None:
    """Who would read a pipe to find what was answered earlier waits for ever."""
    os.mkfifo(pipe := tmp_path / "pipe")
    for out in (pipe, Path("/dev/null")):
        with pytest.raises(InputError, match=f"cannot write {out}"), Results.opened(out, []):
            pass


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_options_of_replicas_without_ray_are_refused(tmp_path: Path, command: str) -> None:
    files = [str(tmp_path / "in"), str(tmp_path / "out")] if command == "batch" else []
    for name, value in (("replicas", "2"), ("ray-address", "a:1"), ("replica-gpus", "1")):
        status, _, err = ggraph_here(command, *files, f"--{name}", value)
        assert status == 2 and f"--{name} is for --ray" in err, err


def test_an_answer_is_one_line_for_who_cuts_text_as_python_does(tmp_path: Path) -> None:
    """`str.splitlines` ends lines at U+0085, U+2028 and U+2029 as well."""
    said, path = "a\x85b\u2028c\u2029\u00e9", tmp_path / "out.jsonl"
    with Results.opened(path, [Line("1", "/v1/completions", b"{}")]) as results:
        body = json.dumps({"text": said}, ensure_ascii=False).encode()
        results.add(Line("1", "/v1/completions", b"{}"), 200, body, "r")
    (line,) = path.read_text("utf-8").splitlines()
    assert json.loads(line)["response"]["body"] == {"text": said} and "\u00e9" in line
