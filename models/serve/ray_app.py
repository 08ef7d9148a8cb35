"""The server as an application of Ray Serve: replicas of a model, and who goes on among them.

    serve run ggraph_models.serve.ray_app:build model=model.gguf replicas=3

`Front` takes what Serve's proxy brings, asks a replica, and goes on with another one where that
dies or hangs (`going_on.py`). A replica is the whole server of one machine: whatever address
`app.py` knows, this has.
"""

from collections.abc import AsyncIterator

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .bodies import Bodies
from .errors import Refused, as_reply
from .going_on import Failed, Head
from .metrics import joined
from .ray_replica import Options, Replicas, bound
from .server import DRAIN_SECONDS


class Front:
    """Hands requests to replicas, and goes on where one dies."""

    def __init__(self, replicas: DeploymentHandle, options: Options) -> None:
        self.replicas, self.bodies = Replicas(replicas, options), Bodies(options.settings)
        self.going_on = self.replicas.going_on

    async def __call__(self, request: Request) -> Response:
        """One request of a client."""
        scope = request.scope  # whose path has the route in front where there is one
        path = scope["path"].removeprefix(scope["root_path"])
        if (request.method, path) == ("GET", "/metrics"):
            return await self._metrics(request)
        if request.url.query:
            path = f"{path}?{request.url.query}"
        try:
            body = await self.bodies.read(request)
            parts = self.going_on.reply(request.method, path, request.headers.items(), body)
            head = await anext(parts)
        except Refused as error:
            return as_reply(error, path)
        except Failed as error:
            return as_reply(Refused(f"no replica can answer: {error}", 503), path)
        assert isinstance(head, Head), head
        return StreamingResponse(_bytes(parts), head.status, _headers(head))

    async def _metrics(self, request: Request) -> Response:
        """Every replica's page as one; each of them decides whether this client may have it."""
        try:
            found = await self.replicas.whole("GET", "/metrics", request.headers.items())
        except Exception as error:  # whatever a hung replica looks like
            return as_reply(Refused(f"a replica does not answer: {error}"[:300], 503), "/metrics")
        for head, page in found:
            if head.status != 200:
                return Response(page, head.status, _headers(head))
        if not found:
            return as_reply(Refused("no replica answers", 503), "/metrics")
        pages = {head.replica: page.decode() for head, page in found}
        return Response(joined(pages), media_type=CONTENT_TYPE_LATEST)


def _headers(head: Head) -> dict[str, str]:
    return {k: v for k, v in head.headers if k not in ("content-length", "date")}


async def _bytes(parts: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    async for part in parts:
        if isinstance(part, bytes):
            yield part


def build(args: Options) -> serve.Application:
    """The application, for `serve run` and config files."""
    front = serve.deployment(
        name="front",
        num_replicas=args.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )(Front)
    return front.bind(bound(args), args)
