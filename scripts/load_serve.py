"""A server under many clients: some leave, some read slowly, and all hear what is right.

    python scripts/load_serve.py --minutes 10 --clients 64
    python scripts/load_serve.py --minutes 1 --clients 8 --model SmolLM2-135M-Instruct.Q4_1.gguf

Every text that comes to its end is held against the same request alone, before anybody else asked.
Memory is what the process has resident, after the first tenth of the time and at the end.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx
from small_model import learnable_model
from startup import resident

KINDS = 24  # different requests


def body(kind: int) -> dict[str, object]:
    """A request; a third of them share a long beginning."""
    r = random.Random(kind)
    stem = "what all of these begin with, at some length. " if kind % 3 == 0 else ""
    prompt = stem + "".join(r.choice("abc ") for _ in range(r.randint(3, 60)))
    temperature = r.choice([0, 0.8])
    return {
        "prompt": prompt, "max_tokens": r.randint(8, 80), "temperature": temperature, "seed": kind,
        "stream": True, "priority": kind % 2,
    }  # fmt: skip


class Client:
    """Asks over and over until the time is up."""

    def __init__(self, url: str, truth: dict[int, str], until: float, seed: int) -> None:
        self.url, self.truth, self.until = url, truth, until
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """As a thread does."""
        with httpx.Client(timeout=600) as web:
            while time.monotonic() < self.until:
                try:
                    self.seen[self._once(web)] += 1
                except httpx.TransportError as error:
                    self.seen[f"wrong: {error}"] += 1

    def _once(self, web: httpx.Client) -> str:
        kind, mood = self.random.randrange(KINDS), self.random.random()
        text, most = "", self.random.randint(1, 6) if mood < 0.15 else 1 << 30
        with web.stream("POST", f"{self.url}/v1/completions", json=body(kind)) as reply:
            if reply.status_code == 429:
                time.sleep(0.2)
                return "refused"
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    most -= 1
                if most <= 0:
                    return "left"
                if mood > 0.9:
                    time.sleep(0.02)
        return "right" if text == self.truth[kind] else f"wrong: {kind}, {text!r}"


def alone(url: str, kind: int) -> str:
    """What a request is answered when nobody else asks."""
    asked = {**body(kind), "stream": False}
    reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
    return str(reply.json()["choices"][0]["text"])


def main() -> None:
    """Start, ask, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: a tiny model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.model or learnable_model(Path(folder))
        command = [sys.executable, "-m", "models", "serve", "-m", str(path), "--port", "0"]
        command += ["--json", "--cache-tokens", "1024", "-c", "512", "--queue", "48"]
        command += ["-t", "1"] if asked.model is None else []
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        truth = {kind: alone(url, kind) for kind in range(KINDS)}
        begun, seconds = time.monotonic(), 60 * asked.minutes
        clients = [Client(url, truth, begun + seconds, i) for i in range(asked.clients)]
        threads = [threading.Thread(target=c.run) for c in clients]
        for t in threads:
            t.start()
        time.sleep(seconds / 10)
        early = resident(process.pid)["resident"] / 1e6
        for t in threads:
            t.join()
        late = resident(process.pid)["resident"] / 1e6
        metrics = httpx.get(f"{url}/metrics").text
        process.terminate()
        status = process.wait(60)
    seen = sum((c.seen for c in clients), Counter[str]())
    told = ("ggraph_preempted_total", "ggraph_evicted_total", "ggraph_reused_total")
    for line in metrics.splitlines():
        if line.startswith(told):
            print(line)
    print(f"{dict(seen)}; resident {early:.0f} MB, {late:.0f} MB at the end; status {status}")
    wrong = [k for k in seen if k.startswith("wrong")]
    sys.exit(bool(wrong) or status != 0 or late > 1.1 * early)


if __name__ == "__main__":
    main()
