"""A Ray of this machine, for tests and scripts."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import ray
from ray import serve

from models.serve.ray_replica import CONTROLLER, Replica

ATTEMPTS = 5
PATIENCE = 600.0  # seconds, on a machine as busy as any


def start_ray() -> None:
    """Begin one. Its raylet gives helper processes half a minute, which a busy machine exceeds."""
    for left in reversed(range(ATTEMPTS)):
        try:
            ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
            return
        except Exception:  # Ray has no class of its own for this
            with contextlib.suppress(Exception):
                ray.shutdown()
            if not left:
                raise


def start_serve(port: int) -> None:
    """Begin Serve, as `ggraph serve --ray` does."""
    http = {"host": "127.0.0.1", "port": port}
    serve.start(proxy_location="HeadOnly", http_options=http, controller_options=CONTROLLER)


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that Ray does in its own time."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def descendants(root: int) -> dict[int, str]:
    """Processes below `root`, by what they are called."""
    parents, names = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
                names[int(entry.name)] = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {}
    for pid in parents:
        at = pid
        while at in parents and at != root:
            at = parents[at]
        if at == root and pid != root:
            found[pid] = names[pid]
    return found


class Fragile(Replica):
    """A replica whose engine can be made to fail, as where a device is gone."""

    def fail(self) -> int:
        """Fail in the next step; its process."""

        def step() -> None:
            raise RuntimeError("the device is gone")

        self.service.worker.batch.step = step  # type: ignore[assignment, method-assign]
        return self.pid()
