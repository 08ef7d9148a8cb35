"""Replicas on Ray Serve: every address, and streams that survive the death of a replica."""

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from going_kit import ASKED, CHAT, ENDLESS, TALK, TEXT, bare, words
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"  # of the replicas
ray = pytest.importorskip("ray", reason="needs the extra [ray]: pip install 'ggraph-runtime[ray]'")
from ray import serve  # noqa: E402
from ray_kit import Fragile, start_ray, start_serve, until  # noqa: E402

from models.run.load import load  # noqa: E402
from models.serve.app import make_app  # noqa: E402
from models.serve.engine import Service  # noqa: E402
from models.serve.going_on import GoingOn  # noqa: E402
from models.serve.inside import Inside  # noqa: E402
from models.serve.ray_app import build  # noqa: E402
from models.serve.ray_replica import Options, Replicas  # noqa: E402
from models.serve.settings import Settings  # noqa: E402

PORT = 18077
URL = f"http://127.0.0.1:{PORT}"
WEB = httpx.Client(timeout=120)
LONG: dict[str, tuple[str, dict[str, Any]]] = {  # streams that take a while
    name: (path, {**body, key: max(body[key], 150), "stream": True})
    for name, (path, body) in ASKED.items()
    for key in ("max_tokens", "max_output_tokens")
    if key in body
}


@pytest.fixture(scope="module")
def given(learnable: Path) -> dict[str, Any]:
    return {
        "model": str(learnable), "replicas": 2, "threads": 1, "parallel": 8, "cpus": 0.01,
        "silence": 6.0, "health_period": 2.0, "keys": ("secret",),
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster(given: dict[str, Any]) -> Iterator[None]:
    start_ray()
    start_serve(PORT)
    serve.run(build(Options(**given)))
    WEB.headers["authorization"] = "Bearer secret"
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def wanted(learnable: Path) -> dict[str, Any]:
    """What a server says that nobody kills."""
    m = load(learnable, threads=1)

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


def pids(application: str = "default") -> list[int]:
    """Processes of the replicas, once Serve knows of none that is dead."""
    handle = serve.get_deployment_handle("replica", application)
    for left in reversed(range(60)):
        try:
            return [int(p) for p in handle.broadcast("pid").results(timeout_s=10)]
        except (ray.exceptions.RayError, TimeoutError):
            if not left:
                raise
            time.sleep(0.5)
    raise AssertionError("unreachable")


@dataclass(eq=False)
class Heard:
    """What a client hears of one stream."""

    name: str
    url: str = URL
    raw: bytes = b""
    done: bool = False

    def listen(self) -> Any:
        """All of it."""
        path, body = LONG[self.name]
        with WEB.stream("POST", self.url + path, json=body) as reply:
            for part in reply.iter_raw():
                self.raw += part
            assert reply.status_code == 200, self.raw
        self.done = True
        return bare(words(self.raw))


def said(name: str) -> Any:
    return Heard(name).listen()


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
    for closed in ("/v1/models", "/metrics"):
        assert httpx.get(f"{URL}{closed}").status_code == 401
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


def measured(name: str, url: str = URL) -> dict[str, float]:
    """A figure of each replica."""
    found = {}
    for family in text_string_to_metric_families(WEB.get(f"{url}/metrics").text):
        for s in family.samples:
            if s.name == name:
                found[s.labels["replica"]] = s.value
    return found


def test_figures_of_all_replicas_are_on_one_page() -> None:
    before = measured("ggraph_new_tokens_total")
    assert len(before) == 2
    body = {"prompt": "abc", "max_tokens": 20, "logit_bias": ENDLESS}
    for i in range(6):
        assert WEB.post(f"{URL}{TEXT}", json={**body, "user": str(i)}).status_code == 200
    after = measured("ggraph_new_tokens_total")
    assert after.keys() == before.keys() and sum(after.values()) == sum(before.values()) + 120


def frozen_in_the_middle(streams: Sequence[Heard]) -> int:
    """Stop a replica while streams are open there; its process. Nothing comes any more then."""
    victim = pids()[0]  # asked before, as that takes long where streams are quick
    while not all(s.raw for s in streams):
        time.sleep(0.001)
    os.kill(victim, signal.SIGSTOP)
    heard = -1
    while heard != (heard := sum(len(s.raw) for s in streams)):
        time.sleep(1)
    assert not all(s.done for s in streams), "they were over too early: make them longer"
    return victim


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_survive_their_replica(wanted: dict[str, Any], how: signal.Signals) -> None:
    """One dies, or hangs, in the middle of streams; others come while it is dead."""
    streams = [Heard(name) for name in LONG]
    with ThreadPoolExecutor(2 * len(LONG)) as pool:
        jobs = {s.name: pool.submit(s.listen) for s in streams}
        victim = frozen_in_the_middle(streams)
        os.kill(victim, how)
        again = {name: pool.submit(said, name) for name in LONG}
        assert {name: j.result() for name, j in jobs.items()} == wanted
        assert {name: j.result() for name, j in again.items()} == wanted
    until(lambda: len(set(pids()) - {victim}) == 2, "Ray starts another one")
    until(lambda: len(measured("ggraph_steps_total")) == 2, "whose figures are told")
    until(lambda: not Path(f"/proc/{victim}").exists(), "a hung one is ended, with what it held")


def test_another_version_comes_without_a_lost_request(
    wanted: dict[str, Any], given: dict[str, Any]
) -> None:
    """Clients ask all the time until no replica of the old version is left."""
    old, over = set(pids()), threading.Event()

    def ask(number: int) -> list[str]:
        asked = []
        for name in itertools.islice(itertools.cycle(LONG), number, None):
            if over.is_set():
                break
            assert said(name) == wanted[name], name
            asked.append(name)
        return asked

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, 3 * n) for n in range(4)]
        try:
            serve.run(build(Options(**{**given, "draft": 2})))
            until(lambda: len(pids()) == 2 and not old & set(pids()), "the new version alone")
        finally:
            over.set()
        found = [name for j in jobs for name in j.result()]
    assert set(found) == set(LONG)


def test_a_failed_engine_is_replaced(learnable: Path, wanted: dict[str, Any]) -> None:
    """Nobody kills its process: the health check says so."""
    options = Options(model=learnable, threads=1, cpus=0.01, replicas=2)
    name, deployed = "fragile", serve.deployment(
        name="replica", num_replicas=2, health_check_period_s=1,
        ray_actor_options={"num_cpus": 0.01},
    )(Fragile)  # fmt: skip
    handle = serve.run(deployed.bind(options), name=name, route_prefix=None)
    before = set(pids(name))
    failed = handle.fail.remote().result(timeout_s=60)
    client = Replicas(handle, options).going_on

    async def ask(path: str, body: dict[str, Any]) -> Any:
        reply = client.reply("POST", path, [], json.dumps(body).encode())
        return bare(words(b"".join([p async for p in reply if isinstance(p, bytes)])))

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(ask(*asked) for asked in LONG.values()))

    assert dict(zip(LONG, asyncio.run(all_of_them()), strict=True)) == wanted
    until(lambda: len(set(pids(name)) - {failed}) == 2, "another one")
    assert failed in before and failed not in pids(name)
    serve.delete(name)


def test_replicas_follow_the_queue(
    learnable: Path, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """More clients, more replicas; none, and there is one again."""
    soon = {
        "upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 1,
    }  # fmt: skip
    more = {"replicas": 1, "most_replicas": 3, "parallel": 2, "autoscaling": soon}
    name, over = "scaled", threading.Event()
    serve.run(build(Options(**{**given, **more})), name=name, route_prefix=f"/{name}")

    def running() -> int:
        states = serve.status().applications[name].deployments["replica"].replica_states
        return states.get("RUNNING", 0)

    def ask() -> int:
        count = 0
        while not over.is_set():
            assert Heard("seeded", f"{URL}/{name}").listen() == wanted["seeded"]
            count += 1
        return count

    assert running() == 1
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask) for _ in range(8)]
        try:
            until(lambda: running() == 3, "three for eight clients")
            busy = measured("ggraph_new_tokens_total", f"{URL}/{name}")
        finally:
            over.set()
        assert all(j.result() for j in jobs) and len(busy) == 3
    until(lambda: running() == 1, "one for nobody")
    assert Heard("seeded", f"{URL}/{name}").listen() == wanted["seeded"]
    serve.delete(name)
