"""Replicas on Ray Serve: every address, and streams that survive the death of a replica."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from going_kit import ASKED, CHAT, TALK, TEXT, bare, words
from small_model import learnable_model

ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = str(ROOT)  # of the replicas
ray = pytest.importorskip("ray", reason="needs the extra [ray]: pip install 'ggraph-runtime[ray]'")
from ray import serve  # noqa: E402
from ray_kit import start_ray  # noqa: E402

from models.run.load import load  # noqa: E402
from models.serve.app import make_app  # noqa: E402
from models.serve.engine import Service  # noqa: E402
from models.serve.going_on import GoingOn  # noqa: E402
from models.serve.inside import Inside  # noqa: E402
from models.serve.ray_app import Options, build  # noqa: E402
from models.serve.settings import Settings  # noqa: E402

PORT = 18077
URL = f"http://127.0.0.1:{PORT}"
WEB = httpx.Client(timeout=120)
LONG = {n: (p, {**b, "stream": True}) for n, (p, b) in ASKED.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learnable_model(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def given(model: Path) -> dict[str, Any]:
    return {
        "model": str(model), "replicas": 2, "threads": 1, "parallel": 8, "cpus": 0.01,
        "silence": 6.0, "health_period": 2.0, "keys": ("secret",),
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster(given: dict[str, Any]) -> Iterator[None]:
    start_ray()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build(Options(**given)))
    WEB.headers["authorization"] = "Bearer secret"
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, Any]:
    """What a server says that nobody kills."""
    m = load(model, threads=1)

    async def run() -> dict[str, Any]:
        inside, found = Inside(make_app(Service(m, Settings(parallel=4), 4096))), {}
        async with inside.life():
            for name, (path, body) in LONG.items():
                reply = GoingOn(inside.ask).reply("POST", path, [], json.dumps(body).encode())
                raw = b"".join([p async for p in reply if isinstance(p, bytes)])
                found[name] = bare(words(raw))
        return found

    found = asyncio.run(run())
    m.close()
    return found


def pids() -> list[int]:
    """Processes of the replicas, once Serve knows of none that is dead."""
    handle = serve.get_deployment_handle("replica", "default")
    for left in reversed(range(60)):
        try:
            return [int(p) for p in handle.broadcast("pid").results(timeout_s=10)]
        except (ray.exceptions.RayError, TimeoutError):
            if not left:
                raise
            time.sleep(0.5)
    raise AssertionError("unreachable")


def said(name: str) -> Any:
    path, body = LONG[name]
    reply = WEB.post(URL + path, json=body)
    assert reply.status_code == 200, reply.text
    return bare(words(reply.content))


def test_every_address_is_there(wanted: dict[str, Any]) -> None:
    assert WEB.get(f"{URL}/health").json()["status"] == "ok"
    assert WEB.get(f"{URL}/v1/models").json()["data"][0]["id"] == "small"
    assert "<title>ggraph</title>" in WEB.get(f"{URL}/").text
    tokens = WEB.post(f"{URL}/tokenize", json={"content": "abc"}).json()["tokens"]
    assert WEB.post(f"{URL}/detokenize", json={"tokens": tokens}).json() == {"content": "abc"}
    assert WEB.post(f"{URL}/v1/embeddings", json={"input": "a"}).json()["data"]
    page = WEB.get(f"{URL}/metrics").text
    assert page.count("ggraph_steps_total{replica=") == 2
    assert WEB.post(f"{URL}{TEXT}", json={"prompt": ""}).json()["error"]["message"]
    assert httpx.get(f"{URL}/v1/models").status_code == 401
    for name in ("chances", "calls or text"):
        path, body = ASKED[name]
        whole = WEB.post(URL + path, json=body).json()
        assert whole["choices"][0]["finish_reason"] and whole["usage"]["completion_tokens"]


def test_streams_are_those_of_one_server(wanted: dict[str, Any]) -> None:
    assert {name: said(name) for name in LONG} == wanted


def test_a_conversation_stays_with_its_replica() -> None:
    before = ""
    for _ in range(6):
        body = {"input": "Go on.", "max_output_tokens": 4, "previous_response_id": before or None}
        reply = WEB.post(f"{URL}/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        before = reply.json()["id"]
    long = {"messages": [{"role": "system", "content": "Be kind. " * 40}, *TALK], "max_tokens": 2}
    reused = [
        WEB.post(f"{URL}{CHAT}", json=long).json()["usage"]["prompt_tokens_details"]
        for _ in range(4)
    ]
    assert all(r["cached_tokens"] > 100 for r in reused[1:])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_survive_their_replica(wanted: dict[str, Any], how: signal.Signals) -> None:
    """Replicas die one after the other while every stream is open."""
    with ThreadPoolExecutor(len(LONG)) as pool:
        jobs = {name: pool.submit(said, name) for name in LONG}
        os.kill(pids()[0], how)
        again = {name: pool.submit(said, name) for name in LONG}
        assert {name: j.result() for name, j in jobs.items()} == wanted
        assert {name: j.result() for name, j in again.items()} == wanted


def test_another_version_comes_without_a_lost_request(
    wanted: dict[str, Any], given: dict[str, Any]
) -> None:
    old = set(pids())
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(said, name) for name in list(LONG) * 6]
        serve.run(build(Options(**{**given, "draft": 2})))
        found = [j.result() for j in jobs]
    assert found == [wanted[name] for name in list(LONG) * 6]
    assert not old & set(pids())
