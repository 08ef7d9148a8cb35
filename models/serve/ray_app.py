"""The server as an application of Ray Serve: replicas of a model, and who goes on among them.

    serve run ggraph_models.serve.ray_app:build model=model.gguf replicas=3

`Front` takes what Serve's proxy brings, asks a replica through `PrefixRouter`, and goes on with
another one where that dies or hangs (`going_on.py`). A replica is the whole server of one machine:
whatever address `app.py` knows, this has.
"""

import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..run.fetch import fetch_default
from ..run.load import load
from .app import make_app
from .bodies import Bodies
from .engine import FULL_TEXTS, Service
from .errors import Refused, as_reply
from .going_on import Failed, GoingOn, Head, Patience
from .inside import Inside
from .metrics import joined
from .ray_router import PrefixRouter
from .routing import BLOCK, Wish, wish_of
from .settings import Settings

KEPT = "/v1/responses/"  # what follows is the name of one that is kept
LETTERS_PER_TOKEN = 4  # about; how much of a prompt a replica's cache holds
SUSPECT_SECONDS = 30.0  # for which nobody is sent to a replica that failed
DRAIN_SECONDS = 600.0  # for open answers of a replica that is to end


class Options(BaseModel):
    """What `build` is given, by a line or a config file. `cpus` and `gpus` are what Ray reserves
    for a replica; with `most_replicas` their number follows the answers that are open."""

    model_config = ConfigDict(extra="forbid")

    model: Path | None = None
    head: Path | None = None
    ctx_size: int | None = None
    cache_tokens: int | None = None
    cache_type: str = "f16"
    parallel: int = 16
    queued: int = 256
    draft: int = 8
    threads: int | None = None
    device: str = "cpu"
    exact: bool = False
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log_prompts: bool = False
    replicas: int = Field(default=1, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)
    fronts: int = Field(default=1, ge=1)
    cpus: float = Field(default=1.0, ge=0)
    gpus: float | None = Field(default=None, ge=0)
    slack: int = Field(default=8, ge=0)  # as of `Routes`
    silence: float = Field(default=10.0, gt=2)
    trouble: float = Field(default=120.0, gt=0)
    health_period: float = Field(default=5.0, gt=0)

    @property
    def settings(self) -> Settings:
        """Of each replica, and of what is in front of them."""
        names = ("parallel", "queued", "draft", "keys", "origins", "log_prompts")
        return Settings(**{n: getattr(self, n) for n in names})


class Replica:
    """One server, asked without a socket."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]
        o = options
        path = o.model or fetch_default(lambda *_: None)
        devices = [n.strip() for n in o.device.split(",")]
        m = load(
            path, devices=devices, cache_type=o.cache_type, ctx_size=o.ctx_size,
            threads=o.threads, exact=o.exact, head=o.head,
        )  # fmt: skip
        self.service = Service(m, o.settings, o.cache_tokens)
        app = make_app(self.service)
        self.inside = Inside(app, serve.get_replica_context().replica_id.unique_id)
        self.registry = app.state.metrics.registry
        self.life = self.inside.life()
        await self.life.__aenter__()

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        wish: Wish | None = None,
    ) -> AsyncIterator[Head | bytes]:
        """A head, then bytes; `wish` is for the router."""
        async for part in self.inside.ask(method, path, headers, body):
            yield part

    def metrics(self) -> tuple[str, str]:
        """Its name, and its metrics in Prometheus' form."""
        return self.inside.name, generate_latest(self.registry).decode()

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def check_health(self) -> None:
        """Ray Serve asks this, and starts another replica where it raises or does not answer."""
        if (failure := self.service.worker.failure) is not None:
            raise RuntimeError(f"the engine has failed: {failure}")


class Front:
    """Hands requests to replicas, and goes on where one dies."""

    def __init__(self, replicas: DeploymentHandle, options: Options) -> None:
        self.every = replicas
        self.replicas = replicas.options(method_name="ask", stream=True)
        self.bodies, self.silence = Bodies(options.settings), options.silence
        patience = Patience(silence=options.silence, trouble=options.trouble)
        self.going_on = GoingOn(self.ask, patience)
        self.suspects: dict[str, float] = {}  # until when

    async def __call__(self, request: Request) -> Response:
        """One request of a client."""
        path = request.url.path
        if (request.method, path) == ("GET", "/metrics"):
            return await self._metrics()
        if request.url.query:
            path = f"{path}?{request.url.query}"
        try:
            body = await self.bodies.read(request)
            parts = self.going_on.reply(request.method, path, request.headers.items(), body)
            head = await anext(parts)
        except Refused as error:
            return as_reply(error)
        except Failed as error:
            return as_reply(Refused(f"no replica can answer: {error}", 503))
        assert isinstance(head, Head), head
        headers = {k: v for k, v in head.headers if k not in ("content-length", "date")}
        return StreamingResponse(_bytes(parts), head.status, headers)

    async def _metrics(self) -> Response:
        try:
            found = await self.every.broadcast("metrics").results_async(timeout_s=self.silence)
        except Exception as error:  # whatever a dying replica looks like
            return as_reply(Refused(f"a replica does not answer: {error}"[:300], 503))
        return Response(joined(dict(found)), media_type=CONTENT_TYPE_LATEST)

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        failed: Sequence[str],
    ) -> AsyncGenerator[Head | bytes, None]:
        """A replica's reply. One that breaks off, or says nothing for long, is avoided a while."""
        now = time.monotonic()
        self.suspects = {r: until for r, until in self.suspects.items() if until > now}
        wish = _wish(path, body, dict(headers), {*failed, *self.suspects})
        parts = self.replicas.remote(method, path, headers, body, wish=wish)
        last, whole = now, False
        try:
            async for part in parts:
                last = time.monotonic()
                yield part
            whole = True
        except GeneratorExit:
            whole = time.monotonic() - last < 0.9 * self.silence  # the client has left
            raise
        finally:
            if not whole:
                parts.cancel()
                if wish.tried:
                    self.suspects[wish.tried[-1]] = time.monotonic() + SUSPECT_SECONDS


async def _bytes(parts: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    async for part in parts:
        if isinstance(part, bytes):
            yield part


def _wish(path: str, body: bytes, headers: dict[str, str], avoid: set[str]) -> Wish:
    """What the router looks at; little where the body is none that it knows."""
    kept = path.removeprefix(KEPT) if path.startswith(KEPT) else ""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        return Wish(needs=kept, avoid=frozenset(avoid))
    begun = asked.get("going_on")
    name = f"resp_{begun['id']}" if isinstance(begun, dict) and "id" in begun else ""
    return wish_of(asked, headers.get("x-session-id", ""), name, avoid)


def build(args: Options) -> serve.Application:
    """The application, for `serve run` and config files."""
    o = args
    tokens = FULL_TEXTS * (o.ctx_size or 4096) if o.cache_tokens is None else o.cache_tokens
    room = tokens * LETTERS_PER_TOKEN
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"room": room // BLOCK, "slack": o.slack},
    )
    gpus = o.gpus if o.gpus is not None else float("cuda" in o.device)
    scaled: dict[str, Any] = {"num_replicas": o.replicas}
    if o.most_replicas is not None:
        scaled = {
            "autoscaling_config": {
                "min_replicas": o.replicas,
                "max_replicas": o.most_replicas,
                "target_ongoing_requests": o.parallel,
            }
        }
    replica = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": o.cpus, "num_gpus": gpus},
        max_ongoing_requests=o.parallel + o.queued,
        health_check_period_s=o.health_period,
        health_check_timeout_s=o.silence,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        request_router_config=router,
        **scaled,
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=o.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )(Front)
    return front.bind(replica.bind(o), o)
