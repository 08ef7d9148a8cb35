"""Clients that stream while replicas are killed and stopped: none may fail, none may differ.

    python scripts/kill_test.py --seconds 180 --every 10 --replicas 3 --clients 20

Needs the extra [ray]. Every third death is a SIGSTOP, after which a replica hangs; the others are
`kill -9`. Each answer (greedy and seeded, with drafts, forms, calls, chances and stop strings; as a
stream and whole) is held against the same request to a server of this process that nobody kills.
With --update all replicas are replaced half-way by such of another version.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = str(ROOT)  # of the replicas
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import httpx
import ray
from going_kit import ASKED, bare, words
from ray import serve
from ray_kit import descendants, start_ray, start_serve
from small_model import learnable_model

from models.run.load import load
from models.serve.app import make_app
from models.serve.engine import Service
from models.serve.going_on import GoingOn, Head
from models.serve.inside import Inside
from models.serve.ray_app import build
from models.serve.ray_replica import Options
from models.serve.settings import Settings

PORT = 18099


def requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """The requests that clients draw from: longer than those of the tests."""
    found = []
    for i, (path, body) in enumerate(ASKED.values()):
        for stream in (True, False):
            key = "max_output_tokens" if "input" in body else "max_tokens"
            longer = {**body, key: max(body[key], 100), "seed": seed + i, "stream": stream}
            found.append((path, longer))
    return found


async def references(model: Path, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What a server says that nobody kills."""
    m = load(model, threads=1)
    inside = Inside(make_app(Service(m, Settings(parallel=4), 4096)))
    found = []
    async with inside.life():
        for path, body in asked:
            head, *rest = [p async for p in GoingOn(inside.ask).reply(
                "POST", path, [("content-type", "application/json")], json.dumps(body).encode()
            )]  # fmt: skip
            assert isinstance(head, Head) and head.status == 200, (body, head, rest)
            found.append(words(b"".join(p for p in rest if isinstance(p, bytes))))
    m.close()
    return found


def replicas() -> list[int]:
    """The processes of the model's replicas."""
    mark = "ray::ServeReplica:default:replica"
    return sorted(p for p, name in descendants(os.getpid()).items() if name.startswith(mark))


class Killer(threading.Thread):
    """Kills or stops one replica every so many seconds."""

    def __init__(self, every: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.every, self.over = every, threading.Event()
        self.done: Counter[str] = Counter()
        self.random = random.Random(seed)

    def run(self) -> None:
        """Until it is over."""
        count = 0
        while not self.over.wait(self.every):
            alive = replicas()
            if not alive:
                self.done["nobody to kill"] += 1
                continue
            count += 1
            how = signal.SIGSTOP if count % 3 == 0 else signal.SIGKILL
            os.kill(self.random.choice(alive), how)
            self.done[how.name] += 1


def client(
    number: int, asked: list[tuple[str, dict[str, Any]]], wanted: list[Any], until: float
) -> Counter[str]:
    """Ask until the time is over; what became of it."""
    found, draw = Counter[str](), random.Random(number)
    with httpx.Client(timeout=300) as web:
        while time.monotonic() < until:
            i = draw.randrange(len(asked))
            path, body = asked[i]
            begun = time.monotonic()
            try:
                reply = web.post(f"http://127.0.0.1:{PORT}{path}", json=body)
                said, status = words(reply.content), reply.status_code
            except httpx.HTTPError as error:
                said, status = f"{type(error).__name__}: {error}", 0
            took = time.monotonic() - begun
            found["requests"] += 1
            found["slowest, ms"] = max(found["slowest, ms"], round(1000 * took))
            if status != 200 or "server_error" in str(said):
                found["failed"] += 1
                print(f"failed: {status} {body} {str(said)[:300]}", flush=True)
            elif bare(said) != bare(wanted[i]):
                found["different"] += 1
                print(f"different: {body}\n  {said}\n  {wanted[i]}", flush=True)
    return found


def main() -> None:
    """Run it; the status says whether anything failed or differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: a tiny model")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--silence", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--update", action="store_true", help="another version half-way")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or learnable_model(Path(folder))
        asked = requests(a.seed)
        wanted = asyncio.run(references(model, asked))
        given = {
            "model": str(model), "replicas": a.replicas, "threads": 1, "parallel": 8, "cpus": 0.01,
            "silence": a.silence, "health_period": 2.0,
        }  # fmt: skip
        start_ray()
        start_serve(PORT)
        serve.run(build(Options(**given)))
        killer = Killer(a.every, a.seed)
        begun, until = time.monotonic(), time.monotonic() + a.seconds
        killer.start()
        with ThreadPoolExecutor(a.clients) as pool:
            jobs = [pool.submit(client, n, asked, wanted, until) for n in range(a.clients)]
            if a.update:
                time.sleep(a.seconds / 2)
                serve.run(build(Options(**{**given, "draft": 4})))
            found = [j.result() for j in jobs]
        killer.over.set()
        seconds = time.monotonic() - begun
        serve.shutdown()
        ray.shutdown()
    total: Counter[str] = sum(found, Counter())
    total["slowest, ms"] = max(f["slowest, ms"] for f in found)
    for name in ("failed", "different"):
        total[name] += 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    facts = {**total, **killer.done, "seconds": round(seconds), "MiB, this process": memory}
    print(json.dumps(facts))
    sys.exit(bool(total["failed"] or total["different"] or not killer.done))


if __name__ == "__main__":
    main()
