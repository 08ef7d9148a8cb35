"""A model's replicas on Ray Serve: what each is given, and how one of them is asked."""

import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..run.fetch import fetch_default
from ..run.load import DEFAULT_CONTEXT, device_names, load_served
from .app import make_app
from .engine import FULL_TEXTS, service_of
from .going_on import GoingOn, Head, Patience
from .inside import Inside
from .ray_router import PrefixRouter
from .routing import BLOCK, Wish, kept_in, wish_of
from .server import DRAIN_SECONDS
from .settings import Settings
from .told import PING_SECONDS

LETTERS = 4  # of a token, about: how much of prompts a replica's cache holds
SUSPECT_SECONDS = 30.0  # for which nobody is sent to a replica that failed
# Who is unhealthy is not waited for: its answers have gone on elsewhere, and it keeps a device.
CONTROLLER = {"runtime_env": {"env_vars": {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}}}


class Options(BaseModel):
    """What `build` is given, by a line or a config file. `cpus` and `gpus` are what Ray reserves
    for a replica; with `most_replicas` their number follows the answers that are open, in the way
    that `autoscaling` says, as of Serve's AutoscalingConfig."""

    model_config = ConfigDict(extra="forbid")

    model: Path | None = None
    head: Path | None = None
    ctx_size: int | None = None
    cache_tokens: int | None = None
    cache_type: str = "f16"
    parallel: int = Settings.parallel
    queued: int = Settings.queued
    draft: int = Settings.draft
    threads: int | None = None
    device: str = "cpu"
    exact: bool = False
    lora: tuple[tuple[Path, float], ...] = ()  # adapters, and what each is multiplied by
    mmproj: Path | None = None
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log_prompts: bool = False
    alias: str = ""
    replicas: int = Field(default=1, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)
    autoscaling: dict[str, Any] = Field(default_factory=dict)
    fronts: int = Field(default=1, ge=1)
    cpus: float = Field(default=1.0, ge=0)
    gpus: float | None = Field(default=None, ge=0)
    slack: int = Field(default=8, ge=0)  # as of `Routes`; measured: docs/log/2026-11-23-scale.md
    silence: float = Field(default=Patience.silence, gt=PING_SECONDS)
    trouble: float = Field(default=Patience.trouble, gt=0)
    health_period: float = Field(default=5.0, gt=0)

    @property
    def settings(self) -> Settings:
        """Of each replica, and of what is in front of them."""
        names = ("parallel", "queued", "draft", "keys", "origins", "log_prompts", "alias")
        return Settings(**{n: getattr(self, n) for n in names})

    @property
    def most(self) -> int:
        """How many replicas there may be."""
        return self.most_replicas or self.replicas

    @property
    def reserved_gpus(self) -> float:
        """GPUs of a replica: as many as it names, unless told. It sees those alone, from cuda0."""
        named = {n for n in device_names(self.device) if n.startswith("cuda")}
        return len(named) if self.gpus is None else self.gpus

    @property
    def scaled(self) -> dict[str, Any]:
        """How many replicas, as Serve has it."""
        if self.most_replicas is None:
            return {"num_replicas": self.replicas}
        bounds = {"min_replicas": self.replicas, "max_replicas": self.most_replicas}
        wanted = {"target_ongoing_requests": self.parallel, **self.autoscaling}
        return {"autoscaling_config": {**bounds, **wanted}}


class Replica:
    """One server, asked without a socket."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]
        o = options
        path = o.model or fetch_default(lambda *_: None)
        m = load_served(
            path, o.parallel, devices=device_names(o.device), cache_type=o.cache_type,
            ctx_size=o.ctx_size, threads=o.threads, exact=o.exact, head=o.head, lora=o.lora,
            mmproj=o.mmproj,
        )  # fmt: skip
        self.service = service_of(m, o.settings, o.cache_tokens)
        self.inside = Inside(
            make_app(self.service), serve.get_replica_context().replica_id.unique_id
        )
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

    async def whole(
        self, method: str, path: str, headers: Sequence[tuple[str, str]]
    ) -> tuple[Head, bytes]:
        """The same as one value, for those who ask every replica."""
        head, *rest = [part async for part in self.inside.ask(method, path, headers, b"")]
        assert isinstance(head, Head), head
        return head, b"".join(part for part in rest if isinstance(part, bytes))

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def check_health(self) -> None:
        """Ray Serve asks this, and starts another replica where it raises or does not answer."""
        if (failure := self.service.worker.failure) is not None:
            raise RuntimeError(f"the engine has failed: {failure}")


class Replicas:
    """Asks one of them, through `PrefixRouter`."""

    def __init__(self, handle: DeploymentHandle, options: Options) -> None:
        self.every, self.silence = handle, options.silence
        self.one = handle.options(method_name="ask", stream=True)
        self.patience = Patience(silence=options.silence, trouble=options.trouble)
        self.suspects: dict[str, float] = {}  # until when

    @property
    def going_on(self) -> GoingOn:
        """Replies that go on where a replica dies or hangs."""
        return GoingOn(self.ask, self.patience)

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
        parts = self.one.remote(method, path, headers, body, wish=wish)
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

    async def whole(
        self, method: str, path: str, headers: Sequence[tuple[str, str]]
    ) -> list[tuple[Head, bytes]]:
        """What each one that is alive replies. TimeoutError where one hangs."""
        asked = self.every.broadcast("whole", method, path, headers)
        found = await asked.results_async(timeout_s=self.silence, return_exceptions=True)
        return [f for f in found if not isinstance(f, BaseException)]


def _wish(path: str, body: bytes, headers: dict[str, str], avoid: set[str]) -> Wish:
    """What the router looks at; little where the body is none that it knows."""
    kept = kept_in(path)
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        return Wish(needs=kept, avoid=frozenset(avoid))
    begun = asked.get("going_on")
    name = f"resp_{begun['id']}" if isinstance(begun, dict) and "id" in begun else ""
    return wish_of(asked, headers.get("x-session-id", ""), name, avoid)


def bound(options: Options) -> serve.Application:
    """The deployment of the replicas."""
    o = options
    tokens = (
        FULL_TEXTS * (o.ctx_size or DEFAULT_CONTEXT) if o.cache_tokens is None else o.cache_tokens
    )
    room = tokens * LETTERS
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"room": room // BLOCK, "slack": o.slack},
    )
    deployed = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": o.cpus, "num_gpus": o.reserved_gpus},
        max_ongoing_requests=o.parallel + o.queued,
        health_check_period_s=o.health_period,
        health_check_timeout_s=o.silence,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        request_router_config=router,
        **o.scaled,
    )(Replica)
    return deployed.bind(o)
