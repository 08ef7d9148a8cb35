"""The addresses that every server has, and all of one whose model is an encoder."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match

from ggraph import GgraphError, __version__

from . import embeddings, rerank, schema
from .bodies import Bodies
from .errors import REQUEST_ID, Refused, as_reply, ending, of_validation, request_id
from .listener import Listener
from .metrics import Metrics
from .native_fields import NativeEmbedding
from .reader import Reader

LOG = logging.getLogger("ggraph.serve")
SHORT_BODY = 1 << 14  # bytes that are read as fields at once: 8 MB of small ones take seconds
CLOSED = 499  # what is logged where the client went away
B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class CommonApi:
    """The handlers of one server."""

    service: Reader
    listener: Listener = field(init=False)
    metrics: Metrics = field(init=False)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.service.settings)
        self.metrics = Metrics(self.service.worker.batch)
        self.listener = Listener(self.service, self.metrics)

    @property
    def posts(self) -> dict[str, Handler]:
        """Handlers of POST, by their addresses."""
        return {
            "/v1/embeddings": self.embeddings,
            "/embeddings": self.embedding,
            "/embedding": self.embedding,
            "/v1/rerank": self.rerank,
            "/rerank": self.rerank,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }

    @property
    def gets(self) -> dict[str, Handler]:
        """Of GET."""
        return {
            "/v1/models": self.models,
            "/v1/models/{id:path}": self.model,
            "/props": self.props,
            "/health": self.health,
            "/metrics": self.show_metrics,
            "/": self.page,
        }

    @property
    def deletes(self) -> dict[str, Handler]:
        """Of DELETE."""
        return {}

    @property
    def html(self) -> Path:
        """The page at /."""
        return Path(__file__).with_name("page.html")

    @property
    def facts(self) -> dict[str, Any]:
        """What is told of the model beside what every one has."""
        return {}

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = await self._read(request, schema.EmbeddingsRequest)
        return JSONResponse(await self._embedded(request, asked))

    async def embedding(self, request: Request) -> Response:
        """POST /embedding: the same in llama-server's form."""
        found = await self._embedded(request, await self._read(request, NativeEmbedding))
        told = [{"index": d["index"], "embedding": [d["embedding"]]} for d in found["data"]]
        return JSONResponse(told)

    async def _embedded(self, request: Request, asked: schema.EmbeddingsRequest) -> dict[str, Any]:
        pooling = await run_in_threadpool(embeddings.pooling_for, self.service, asked)
        prompts = await run_in_threadpool(embeddings.prompts_of, self.service, asked)
        work = embeddings.embeddings(self.listener, prompts, pooling, asked)
        found: dict[str, Any] = await while_there(request, work)
        return found

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        asked = await self._read(request, schema.RerankRequest)
        pairs = await run_in_threadpool(rerank.pairs_of, self.service, asked)
        work = rerank.reranked(self.listener, pairs, asked)
        return JSONResponse(await while_there(request, work))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked = await self._read(request, schema.TokenizeRequest)
        self.service.check_letters(len(asked.content), "content")
        special = asked.parse_special
        encode = partial(self.service.m.tokenizer.encode, asked.content, special=special)
        ids = await run_in_threadpool(encode, bos=None if asked.add_special else False)
        if not asked.with_pieces:
            return JSONResponse({"tokens": ids})
        told = await run_in_threadpool(lambda: list(map(self._piece, ids)))
        return JSONResponse({"tokens": told})

    def _piece(self, token: int) -> dict[str, Any]:
        """A token with its text, or its bytes where they are half a letter."""
        raw = self.service.m.tokenizer.token_bytes(token)
        try:
            return {"id": token, "piece": raw.decode()}
        except UnicodeDecodeError:
            return {"id": token, "piece": list(raw)}

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = await self._read(request, schema.DetokenizeRequest)
        decode = partial(self.service.m.tokenizer.decode, asked.tokens)
        return JSONResponse({"content": await run_in_threadpool(decode)})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        one = self._model()
        ends = {"first_id": one["id"], "last_id": one["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [one], **ends})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        one, id = self._model(), request.path_params["id"]
        if id != one["id"]:
            message = f"no model {id[:200]!r} here, but {one['id']!r}"
            raise Refused(message, 404, "model", code="model_not_found")
        return JSONResponse(one)

    def _model(self) -> dict[str, Any]:
        """The one that is served, as of when the server began; its names are OpenAI's, and
        Anthropic's."""
        s, made = self.service, datetime.fromtimestamp(self.service.begun, UTC).isoformat()
        facts = {"context_length": s.context, "vocab_size": s.m.model.vocab_size, **self.facts}
        one = {"id": s.name, "object": "model", "created": s.begun, "owned_by": "ggraph"}
        more = {"type": "model", "display_name": s.name, "created_at": made}
        return {**one, **more, "meta": facts}

    async def props(self, request: Request) -> Response:
        """GET /props."""
        return JSONResponse(self.told_of)

    @property
    def told_of(self) -> dict[str, Any]:
        """What is known of the server, in llama-server's names."""
        s = self.service
        return {
            "model_alias": s.name,
            "model_path": Path(s.m.model.checkpoint.path).name,  # where it is, is nobody's matter
            "total_slots": s.settings.parallel,
            "default_generation_settings": {"n_ctx": s.context},
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ggraph {__version__}",
        }

    async def health(self, request: Request) -> Response:
        """GET /health: 200 where answers can be had."""
        worker = self.service.worker
        if worker.failure is not None:
            raise Refused(f"the engine has failed: {worker.failure}", 503)
        return JSONResponse({"status": "ok", "open": worker.open, "plans_to_make": worker.cold})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """GET /."""
        return HTMLResponse(self.html.read_text(encoding="utf-8"))

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body. Refused where it is too long, too slow, or not what it should be."""
        raw = await self.bodies.read(request)
        if self.service.settings.log_prompts:
            LOG.info("%s %s", request.url.path, raw.decode("utf-8", "replace"))
        read = partial(checked, lambda: kind.model_validate_json(raw))
        return read() if len(raw) <= SHORT_BODY else await run_in_threadpool(read)


class EncoderApi(CommonApi):
    """The handlers of a server whose model only reads."""

    @property
    def posts(self) -> dict[str, Handler]:
        """Handlers of POST; who asks for text is told why there is none."""
        return {**super().posts, **dict.fromkeys(TEXTS, self.no_text)}

    @property
    def html(self) -> Path:
        """The page at /."""
        return Path(__file__).with_name("encoder.html")

    @property
    def facts(self) -> dict[str, Any]:
        """How long vectors are, if it makes any."""
        m = self.service.m.model
        return {} if m.scores else {"vector_width": m.vector_width}

    async def no_text(self, request: Request) -> Response:
        """POST to an address that answers with text."""
        made = "scores (/v1/rerank)" if self.service.m.model.scores else "vectors (/v1/embeddings)"
        raise Refused(f"{self.service.name} is an encoder: it makes {made} of texts, and no text")


TEXTS = (
    "/v1/chat/completions", "/v1/completions", "/completion", "/infill", "/apply-template",
    "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip


def checked(read: Callable[[], B]) -> B:
    """What a client has sent. Refused where it is not what it should be."""
    try:
        return read()
    except ValidationError as error:
        raise of_validation(error) from None


class Gone(Exception):
    """The client went away."""


async def while_there(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is given up where nobody waits for it any more."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for t in (task, leaving):
            t.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def answering(metrics: Metrics, path: str, handler: Handler) -> Handler:
    """The handler; whatever goes wrong in it becomes one line with a status, and is counted."""

    async def run(request: Request) -> Response:
        try:
            reply = await handler(request)
        except Refused as error:
            reply = as_reply(error, path)
        except GgraphError as error:
            reply = as_reply(Refused(str(error)), path)
        except (Gone, ClientDisconnect):
            reply = Response(status_code=CLOSED)
        except asyncio.CancelledError:  # the process ends, or nobody hears this
            return as_reply(ending(), path)
        reply.headers.setdefault(REQUEST_ID, request_id())
        metrics.requests.labels(path, str(reply.status_code)).inc()
        return reply

    return run


def _hint(request: Request) -> str:
    """Which address may be meant, by a client that was given another base than it wants."""
    given, routes = request.url.path, request.app.routes
    where = "/" + given.strip("/")
    for meant in (f"/v1{where}", where.removeprefix("/v1"), where):
        scope = {**request.scope, "path": meant}
        if meant != given and any(r.matches(scope)[0] is not Match.NONE for r in routes):
            return f" (is {meant[:200]} meant?)"
    return ""


async def unknown(request: Request, error: Exception) -> Response:
    """What no handler took."""
    status, where = getattr(error, "status_code", 500), request.url.path[:200]
    if status != 405:
        said = f"no such address: {where}{_hint(request)}" if status == 404 else "the server failed"
        reply = as_reply(Refused(said, status), where)
        if status >= 500:
            id = reply.headers[REQUEST_ID]
            LOG.error("%s failed, %s", request.url.path, id, exc_info=error)
        return reply
    routes = (r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
    allowed = ", ".join(sorted(m for r in routes for m in r.methods))
    said = f"{where} answers {allowed}, not {request.method}"
    return as_reply(Refused(said, status, headers={"allow": allowed}), where)
