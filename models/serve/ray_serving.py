"""`ggraph serve --ray`: the application on Ray, until a signal."""

import signal
import threading
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray import serve

from ggraph import InputError

from .ray_app import Options, build

APPLICATION = "ggraph"


def serve_on_ray(
    given: Mapping[str, Any],
    host: str,
    port: int,
    address: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serve what `Options` are given until a signal. Without an `address` Ray begins here and ends
    with it; a cluster at `address` goes on without the application. InputError where Ray cannot be
    had."""
    paths = {n: given[n] and Path(given[n]).absolute() for n in ("model", "head")}
    options = Options(**{**given, **paths})
    own: dict[str, Any] = {"num_cpus": _cpus(options), "include_dashboard": False}
    joined: dict[str, Any] = {"address": address}
    try:
        ray.init(log_to_driver=False, **(own if address is None else joined))
    except Exception as error:  # Ray has no class of its own for this
        line = " ".join(str(error).split())[:300]
        raise InputError(
            f"cannot start or join Ray at {address or 'this machine'}: {line}"
        ) from None
    ended = threading.Event()
    before = {s: signal.signal(s, lambda *_: ended.set()) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        serve.run(build(options), name=APPLICATION)
        ready(f"http://{host}:{port}")
        ended.wait()
        serve.delete(APPLICATION)
        if address is None:
            serve.shutdown()
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        ray.shutdown()


def _cpus(options: Options) -> int:
    """What an embedded Ray may hand out: a cluster of one machine is not to refuse replicas."""
    return max(1, ceil(options.cpus * (options.most_replicas or options.replicas)) + 1)
