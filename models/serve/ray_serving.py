"""Commands on Ray: `ggraph serve --ray` until a signal, `ggraph batch --ray` until its end.

Without an address Ray begins here and ends with the command. A cluster at an address goes on, and
Serve on it as long as it has other applications.
"""

import hashlib
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.context import _get_global_client

from ggraph import InputError

from .going_on import GoingOn
from .ray_app import build
from .ray_replica import CONTROLLER, Options, Replicas, bound
from .server import listening

APPLICATION = "ggraph"
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.2  # from one look at an application's state to the next
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
T = TypeVar("T")
LOG = logging.getLogger("ggraph.serve")


def serve_on_ray(
    given: Mapping[str, Any],
    host: str,
    port: int,
    address: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serve what `Options` are given until a signal, which lets open answers end; a second one ends
    those. `ready` is told the address; port 0 takes a free one. InputError where Ray, the model or
    the address cannot be had."""
    options = _options(given, address)
    application = _checked(lambda: build(options))
    if address is None:
        with listening(host, port) as listener:  # Serve's proxy would try it again and again
            port = listener.getsockname()[1]
    once, twice, out = threading.Event(), threading.Event(), sys.stdout

    def stop(*_: Any) -> None:
        (twice if once.is_set() else once).set()

    with _ray(options, address):
        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            http = {"host": host, "port": port}
            serve.start(proxy_location="HeadOnly", http_options=http, controller_options=CONTROLLER)
            with _running(application, APPLICATION, "/", once, twice):
                if not once.is_set():
                    with redirect_stdout(out):
                        ready(_url())
                once.wait()
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


@contextmanager
def replicas_on_ray(
    given: Mapping[str, Any], address: str | None, purpose: Path
) -> Iterator[tuple[GoingOn, int]]:
    """Replicas that nobody else asks, and how many requests they compute together. On a cluster
    whoever was killed, and comes again for the same `purpose`, has the same replicas."""
    if address is not None and address.startswith("ray://"):  # those streams do not go through it
        raise InputError(f"{address}: a job needs HOST:PORT of Ray itself, on one of its machines")
    options = _options(given, address)
    application = _checked(lambda: bound(options))
    name = f"{APPLICATION}-{hashlib.sha256(str(purpose.absolute()).encode()).hexdigest()[:12]}"
    never = threading.Event()
    with _ray(options, address):
        if address is None:
            serve.start(proxy_location="Disabled", controller_options=CONTROLLER)
        with _running(application, name, None, never, never):
            replicas = Replicas(serve.get_app_handle(name), options)
            yield replicas.going_on, options.parallel * options.most


def _options(given: Mapping[str, Any], address: str | None) -> Options:
    """The options, with paths that hold wherever a replica begins. InputError for bad ones."""
    paths: dict[str, Any] = {
        n: Path(given[n]).absolute() for n in ("model", "head", "mmproj") if given.get(n)
    }
    paths["lora"] = [(Path(p).absolute(), factor) for p, factor in given.get("lora", ())]
    if address is None and not paths["model"].exists():  # on a cluster only its machines know
        raise InputError(f"no model at {paths['model']}")
    options = _checked(lambda: Options(**{**given, **paths}))
    assert options.settings, options
    return options


def _checked(made: Callable[[], T]) -> T:
    """What is made of options. InputError where pydantic, ours or Serve's, refuses them."""
    try:
        return made()
    except ValueError as error:
        raise InputError(_line(error)) from None


def _url() -> str:
    """Where Serve listens, which is what was asked for unless it was there before."""
    options = _get_global_client().http_config
    return f"http://{options.host}:{options.port}"


@contextmanager
def _ray(options: Options, address: str | None) -> Iterator[None]:
    """Ray, of this machine or at `address`. What it prints meanwhile goes to standard error.
    InputError where it cannot be had."""
    cpus = max(1, ceil(options.cpus * options.most) + 1)  # one machine is not to refuse replicas
    own: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address is not None:
        _check_there(address)
    try:
        ray.init(**quiet, **(own if address is None else {"address": address}))
    except Exception as error:  # Ray has no class of its own for this
        if address is None:
            raise InputError(f"cannot start Ray here: {_line(error)}") from None
        hint = "(where it asks for a token, set RAY_AUTH_MODE=token)"
        raise InputError(f"cannot join Ray at {address} {hint}: {_line(error)}") from None
    try:
        with redirect_stdout(sys.stderr):
            try:
                yield
            finally:
                if not serve.status().applications:
                    serve.shutdown()
    finally:
        ray.shutdown()


def _check_there(address: str) -> None:
    """InputError where nobody listens: Ray itself would try that for ten minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # not `auto`
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot join Ray at {address}: {error}") from None


@contextmanager
def _running(
    application: serve.Application,
    name: str,
    route: str | None,
    stop: threading.Event,
    hurry: threading.Event,
) -> Iterator[None]:
    """The application while it runs, or `stop` was set before. It ends with its open answers,
    unless `hurry` is set. InputError where it cannot begin."""
    target = serve.RunTarget(application, name, route)
    serve.run_many(
        [target],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
        controller_options=CONTROLLER,
    )
    try:
        told = ""
        while (now := serve.status().applications[name]).status != "RUNNING":
            notes = [d.message for d in now.deployments.values() if d.message]
            if now.status == "DEPLOY_FAILED":
                raise InputError(f"Ray cannot serve this: {_line(' '.join(notes) or now.message)}")
            if notes and notes[0] != told:
                told = notes[0]
                LOG.warning("%s", _line(told))
            if stop.wait(POLL_SECONDS):
                break
        yield
    finally:
        _delete(name, hurry)


def _delete(name: str, hurry: threading.Event) -> None:
    """Take an application away, once its open answers have ended."""

    def delete() -> None:
        while True:
            with suppress(TimeoutError):  # Serve waits for a minute only
                serve.delete(name)
                return

    ending = threading.Thread(target=delete, daemon=True)
    ending.start()
    while ending.is_alive() and not hurry.is_set():
        ending.join(POLL_SECONDS)


def _line(error: object) -> str:
    """On one line; of a long one the end, where a traceback has its cause."""
    line = " ".join(COLOURS.sub("", str(error)).split())
    return line if len(line) <= 500 else f"{line[:100]} .. {line[-400:]}"
