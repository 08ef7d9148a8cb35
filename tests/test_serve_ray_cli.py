"""Commands on Ray, each as the process that a user starts: `ggraph serve --ray`, `ggraph batch
--ray` and Ray's own `serve run`, on a Ray of their own and on a cluster that is there."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from going_kit import ENDLESS, TEXT, words
from test_serve_job import answers, requests

ROOT = Path(__file__).parent.parent
pytest.importorskip("ray", reason="needs the extra [ray]: pip install 'ggraph-runtime[ray]'")
from ray_kit import descendants, until  # noqa: E402

ENV = {
    **os.environ, "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
}  # fmt: skip
BIN = Path(sys.executable).parent
LONG = {"prompt": "abc", "max_tokens": 400, "stream": True, "seed": 1, "logit_bias": ENDLESS}


def port() -> int:
    """One that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def started(*command: str | Path, out: Any = None) -> Iterator[subprocess.Popen[str]]:
    """A process, which is killed where it does not end."""
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=ENV, text=True, stdout=out or subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[int, int, subprocess.Popen[str]]]:
    """A head of Ray on this machine: its port, that for clients, and its process."""
    own, clients = port(), port()
    head = (
        BIN / "ray", "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
        "--port", own, "--ray-client-server-port", clients, "--num-cpus", "4",
        "--include-dashboard", "false", "--disable-usage-stats",
    )  # fmt: skip
    with started(*map(str, head)) as process:
        assert process.stdout is not None
        assert any("runtime started" in line for line in process.stdout)
        yield own, clients, process
        process.terminate()
        process.wait()


def ggraph(*arguments: str | Path) -> tuple[str | Path, ...]:
    return (sys.executable, "-m", "models", *arguments)


def on_ray(model: Path, *more: str | Path) -> tuple[str | Path, ...]:
    small = ("-m", model, "-t", "1", "--parallel", "4", "--replica-cpus", "0.1", "--json")
    return ("--ray", *small, *more)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line on standard output."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def leave_in_the_middle(process: subprocess.Popen[str], url: str) -> Any:
    """What a stream says during which the server was told to end."""
    raw = b""
    with httpx.stream("POST", url + TEXT, json=LONG, timeout=600) as reply:
        for part in reply.iter_raw():
            if not raw:
                process.terminate()
            raw += part
    return words(raw)


def check_ended(said: Any, process: subprocess.Popen[str]) -> None:
    """The stream is whole; the command has ended well, and said nothing else."""
    assert said[-1] == "[DONE]" and said[-2]["choices"][0]["finish_reason"] == "length"
    assert process.wait(600) == 0
    assert process.stdout is not None and process.stdout.read() == ""


def test_serve_begins_a_ray_that_ends_with_it(learnable: Path, cluster: Any) -> None:
    """Also where a cluster runs on the machine."""
    asked = ggraph("serve", *on_ray(learnable, "--replicas", "2", "--port", "0"))
    with started(*asked) as process:
        url = told(process)["url"]
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ok"
        below = descendants(process.pid)
        assert sum("ray::ServeReplica:ggraph:replica" in name for name in below.values()) == 2
        check_ended(leave_in_the_middle(process, url), process)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "all have ended")


@pytest.mark.parametrize("kind", ["", "ray://"])
def test_serve_joins_a_cluster_and_leaves_it(learnable: Path, cluster: Any, kind: str) -> None:
    own, clients, head = cluster
    address = f"ray://127.0.0.1:{clients}" if kind else f"127.0.0.1:{own}"
    with started(
        *ggraph("serve", *on_ray(learnable, "--ray-address", address, "--port", str(port())))
    ) as process:
        url = told(process)["url"]
        names = descendants(head.pid).values()
        assert sum("ray::ServeReplica:ggraph:replica" in name for name in names) == 1
        assert not any("ServeReplica" in name for name in descendants(process.pid).values())
        check_ended(leave_in_the_middle(process, url), process)
    assert head.poll() is None
    until(
        lambda: not any("ray::Serve" in name for name in descendants(head.pid).values()),
        "nothing is left there",
    )


def test_serve_run_takes_a_config_file_and_a_line(
    learnable: Path, cluster: Any, tmp_path: Path
) -> None:
    """Two models behind one proxy, each at a route of its own."""
    own, at = cluster[0], port()
    config = tmp_path / "config.yaml"
    small = {"model": str(learnable), "threads": 1, "cpus": 0.1}
    application = {
        "name": "one", "route_prefix": "/one", "import_path": "ggraph_models.serve.ray_app:build",
        "args": {**small, "replicas": 2, "keys": ["secret"]},
    }  # fmt: skip
    whole = {"http_options": {"host": "127.0.0.1", "port": at}, "applications": [application]}
    config.write_text(json.dumps(whole))  # JSON is YAML
    run = (BIN / "serve", "run", "--address", f"127.0.0.1:{own}")
    line = [f"{k}={v}" for k, v in small.items()]
    with (
        started(*run, config, out=subprocess.DEVNULL) as first,
        httpx.Client(base_url=f"http://127.0.0.1:{at}", timeout=60) as web,
    ):

        def there(route: str) -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return web.get(f"{route}/health").status_code == 200
            return False

        until(lambda: there("/one"), "the config's application")
        build = ("--name", "two", "--route-prefix", "/two", "ggraph_models.serve.ray_app:build")
        with started(*run, *build, *line, out=subprocess.DEVNULL) as second:
            until(lambda: there("/two"), "the line's application")
            bearer = {"authorization": "Bearer secret"}
            assert web.post(f"/one{TEXT}", json=LONG).status_code == 401
            found = [
                words(web.post(f"/{route}{TEXT}", json=LONG, headers=bearer).content)
                for route in ("one", "two")
            ]
            texts = [[c["choices"][0]["text"] for c in said[:-1]] for said in found]
            assert texts[0] == texts[1] and len(texts[0]) > 2
            second.send_signal(signal.SIGINT)
            second.wait(600)
        first.send_signal(signal.SIGINT)
        first.wait(600)


def replicas(process: subprocess.Popen[str]) -> list[int]:
    names = descendants(process.pid).items()
    return [p for p, name in names if "ray::ServeReplica:ggraph-" in name and ":replica" in name]


def grown(path: Path, size: int, process: subprocess.Popen[str]) -> None:
    """Wait until a file has so many bytes, or who writes it has ended."""
    until(
        lambda: process.poll() is not None or (path.exists() and path.stat().st_size >= size),
        "answers",
    )


def test_a_job_has_one_line_for_each_request_whoever_is_killed(
    learnable: Path, cluster: Any, tmp_path: Path
) -> None:
    """Replicas and the command itself are killed, on a cluster and on a Ray of its own."""
    asked, out, other = requests(tmp_path / "in", 120, 60), tmp_path / "out", tmp_path / "other"
    alone = ggraph("batch", asked, other, "-m", learnable, "-t", "1", "--parallel", "3", "--json")
    subprocess.run(alone, cwd=ROOT, env=ENV, check=True, stdout=subprocess.DEVNULL)
    whole, r = other.stat().st_size, random.Random(5)
    address = ("--ray-address", f"127.0.0.1:{cluster[0]}")
    places: list[tuple[str, ...]] = [address, address, (), ()]
    for i, place in enumerate(places):
        command = ggraph("batch", asked, out, *on_ray(learnable, "--replicas", "2", *place))
        with started(*command) as process:
            root = cluster[2] if place else process
            grown(out, (out.stat().st_size if out.exists() else 0) + 1, process)
            for victim in replicas(root)[:1]:
                os.kill(victim, signal.SIGKILL)
            if i < 3:  # the last one goes on to the end
                grown(out, round(whole * (i + r.random()) / 4), process)
                below = () if place else tuple(descendants(process.pid))
                process.kill()
                until(lambda: not any(Path(f"/proc/{p}").exists() for p in below), "its Ray ends")  # noqa: B023
                continue
            facts = told(process)
            assert process.wait(600) == 0 and facts["before"] + facts["now"] == 120
    assert answers(out) == answers(other) and len(answers(out)) == 120


def refusal(*arguments: str | Path) -> str:
    done = subprocess.run(ggraph(*arguments), cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout, done
    return done.stderr


def test_what_cannot_be_had_is_said_in_a_line(learnable: Path, tmp_path: Path) -> None:
    asked = requests(tmp_path / "in", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{busy}" in refusal(
            "serve", *on_ray(learnable, "--port", busy)
        )
    assert "no model at" in refusal("serve", *on_ray(tmp_path / "none"))
    assert "--parallel 99" in refusal("serve", *on_ray(learnable, "--parallel", "99"))
    few = ("--replicas", "3", "--most-replicas", "2")
    assert "max_replicas" in refusal("serve", *on_ray(learnable, *few))
    assert "names no device" in refusal("serve", *on_ray(learnable, "--device", ","))
    assert "needs HOST:PORT" in refusal(
        "batch", asked, tmp_path / "out", *on_ray(learnable, "--ray-address", "ray://127.0.0.1:1")
    )
    assert "cannot join Ray at 127.0.0.1:1" in refusal(
        "serve", *on_ray(learnable, "--ray-address", "127.0.0.1:1")
    )
    far = refusal("serve", *on_ray(learnable, "--port", "0", "--ctx-size", "99999999"))
    assert "Ray cannot serve this" in far and "context of 99999999 tokens" in far
