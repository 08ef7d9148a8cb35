"""Thousands of unsound requests to a server with a tiny model, and a neighbour who must not notice.

    python scripts/fuzz_serve.py --requests 20000

Only 200 and 4xx with one line may come back, and the same question gets the same answer in between.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx
from serve_fuzz import complaint, request
from small_model import learnable_model

# Some of its tokens that stand for nothing fill in the middle
GAPS = {f"tokenizer.ggml.fim_{r}_token_id": i for i, r in enumerate(("pre", "suf", "mid"), 270)}
ASKED = {"prompt": "to be or not", "max_tokens": 16, "temperature": 0}


def main() -> None:
    """Ask, count, complain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--clients", type=int, default=4)
    asked = parser.parse_args()
    begun, seen, wrong = time.perf_counter(), Counter[int](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = learnable_model(Path(folder), GAPS)
        command = [sys.executable, "-m", "models", "serve", "-m", str(path), "--port", "0"]
        command += ["-t", "1"]  # the model is tiny
        process = subprocess.Popen([*command, "--json"], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        web = httpx.Client(timeout=600)
        truth = web.post(f"{url}/v1/completions", json=ASKED).json()["choices"]

        def one(seed: int) -> None:
            place, raw = request(seed)
            reply = web.post(url + place, content=raw)
            seen[reply.status_code] += 1
            if said := complaint(reply.status_code, reply.text):
                wrong.append(f"{seed}: {place} {raw[:300]!r}: {said}")
            if seed % 20 == 0:
                again = web.post(f"{url}/v1/completions", json=ASKED).json()["choices"]
                if again != truth:
                    wrong.append(f"{seed}: the neighbour heard {again}")

        with ThreadPoolExecutor(asked.clients) as pool:
            list(pool.map(one, range(asked.first, asked.first + asked.requests)))
        process.terminate()
        status = process.wait(60)
    for line in wrong[:20]:
        print(line)
    counts = ", ".join(f"{n} of {s}" for s, n in sorted(seen.items()))
    took = f"{time.perf_counter() - begun:.0f} s"
    print(f"{asked.requests} requests ({counts}), {len(wrong)} wrong, status {status} ({took})")
    sys.exit(bool(wrong) or status != 0)


if __name__ == "__main__":
    main()
