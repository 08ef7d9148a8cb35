"""Which address does what. Handlers read, check and answer; what takes time runs elsewhere."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route

from ggraph import GgraphError

from . import embeddings, schema
from .anthropic import Messages
from .anthropic_blocks import MessagesRequest
from .bodies import Bodies
from .conversations import Conversations, items_of, page_of
from .engine import Service
from .errors import REQUEST_ID, Refused, as_reply, ending, of_validation, request_id
from .generation import Asked, Generation
from .guard import Guard
from .infill import Infill
from .metrics import Metrics
from .protocol import WIRE
from .replies import Events
from .responses import Responses
from .wire import Wire

PAGE = Path(__file__).with_name("page.html")
LOG = logging.getLogger("ggraph.serve")
CLOSED = 499  # what is logged where the client went away
A = TypeVar("A", bound=Asked)
B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class Api:
    """The handlers of one server."""

    service: Service
    generation: Generation = field(init=False)
    metrics: Metrics = field(init=False)
    kept: Responses = field(init=False)
    anthropic: Messages = field(init=False)
    gaps: Infill = field(init=False)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.service.settings)
        self.metrics = Metrics(self.service.worker.batch)
        self.generation = Generation(self.service, self.metrics)
        self.anthropic = Messages(self.generation)
        self.gaps = Infill(self.generation)
        s = self.service.settings
        self.kept = Responses(self.generation, Conversations(s.kept, s.kept_bytes))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = await self._begun(request, schema.ChatRequest, self.generation.chat)
        return await _reply(request, asked, self.generation.events, self.generation.whole)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, schema.CompletionRequest)
        if body.is_short:  # a thread's beginning would take longer
            begin = self.generation.completion(body)
        else:
            begin = await run_in_threadpool(self.generation.completion, body)
        return await _reply(request, begin(), self.generation.events, self.generation.whole)

    async def infill(self, request: Request) -> Response:
        """POST /infill."""
        asked = await self._begun(request, schema.InfillRequest, self.gaps.prepared)
        return await _reply(request, asked, self.gaps.events, self.gaps.whole)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        turn = await self._begun(request, schema.ResponsesRequest, self.kept.prepared)
        return await _reply(request, turn, self.kept.events, self.kept.whole)

    async def response(self, request: Request) -> Response:
        """GET /v1/responses/{id}: one that is kept. Its events are not, and a client that wants
        them would take a reply without any for an empty stream."""
        if request.query_params.get("stream") == "true":
            message = "stream: there are no events of a response not made in the background"
            raise Refused(message, param="stream")
        found = self.kept.conversations.find(request.path_params["id"])
        return Response(found.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: what one that is kept has read."""
        id = request.path_params["id"]
        kept = self.kept.conversations.find(id)
        asked = _checked(lambda: schema.InputItemsQuery.model_validate(dict(request.query_params)))
        read = await run_in_threadpool(lambda: items_of(id, kept.messages[:-1]))
        return JSONResponse(page_of(read, asked))

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        body = await self._read(request, schema.InputTokensRequest)
        count = await run_in_threadpool(self.kept.count, body)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def cancel_response(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: what is kept is over. A client that hangs up ends its own
        answer, and there are no answers in the background."""
        self.kept.conversations.find(request.path_params["id"])
        raise Refused("a response that is not made in the background cannot be cancelled")

    async def drop_response(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        id = request.path_params["id"]
        self.kept.conversations.drop(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        asked = await self._begun(request, MessagesRequest, self.anthropic.prepared)
        return await _reply(request, asked, self.anthropic.events, self.anthropic.whole)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await self._read(request, MessagesRequest)
        return JSONResponse({"input_tokens": await run_in_threadpool(self.anthropic.count, body)})

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = await self._read(request, schema.EmbeddingsRequest)
        pooling = await run_in_threadpool(embeddings.pooling_for, self.service, asked)
        prompts = await run_in_threadpool(embeddings.prompts_of, self.service, asked)
        work = embeddings.embeddings(self.generation, prompts, pooling, asked)
        return JSONResponse(await _while_there(request, work))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked = await self._read(request, schema.TokenizeRequest)
        self.service.check_letters(len(asked.content), "content")
        special = asked.parse_special
        encode = partial(self.service.m.tokenizer.encode, asked.content, special=special)
        bos = None if asked.add_special else False
        return JSONResponse({"tokens": await run_in_threadpool(encode, bos=bos)})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = await self._read(request, schema.DetokenizeRequest)
        return JSONResponse({"content": self.service.m.tokenizer.decode(asked.tokens)})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        one, id = self._model(), request.path_params["id"]
        if id != one["id"]:
            message = f"no model {id[:200]!r} here, but {one['id']!r}"
            raise Refused(message, 404, "model", code="model_not_found")
        return JSONResponse(one)

    def _model(self) -> dict[str, Any]:
        """The one that is served, as of when the server began."""
        s = self.service
        facts = {"context_length": s.context, "vocab_size": s.m.model.vocab_size}
        one = {"id": s.name, "object": "model", "created": s.begun, "owned_by": "ggraph"}
        return {**one, "meta": facts}

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
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def _begun(
        self, request: Request, kind: type[B], prepared: Callable[[B], Callable[[], A]]
    ) -> A:
        """A request that is being answered, which was `prepared` in a thread."""
        body = await self._read(request, kind)
        return (await run_in_threadpool(prepared, body))()

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body. Refused where it is too long, too slow, or not what it should be."""
        raw = await self.bodies.read(request)
        if self.service.settings.log_prompts:
            LOG.info("%s %s", request.url.path, raw.decode("utf-8", "replace"))
        return _checked(lambda: kind.model_validate_json(raw))


def _checked(read: Callable[[], B]) -> B:
    """What a client has sent. Refused where it is not what it should be."""
    try:
        return read()
    except ValidationError as error:
        raise of_validation(error) from None


class Gone(Exception):
    """The client went away."""


async def _while_there(request: Request, work: Awaitable[Any]) -> Any:
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


async def _reply(
    request: Request,
    asked: A,
    events: Callable[[A, Wire | None], Events],
    whole: Callable[[A], Coroutine[Any, Any, Any]],
) -> Response:
    """The answers in the form of an address, as they come or whole."""
    journal = asked.answers.journal
    if asked.body.stream:
        told = events(asked, _wire(request))
        return _events(told if journal is None else journal.streamed(told))
    if journal is not None:
        return _events(journal.whole(whole(asked), request.url.path))
    return JSONResponse(await _while_there(request, whole(asked)))


def _wire(request: Request) -> Wire | None:
    """Where the body of the reply goes, if it goes there in chunks."""
    scope = request.scope
    return scope.get("state", {}).get(WIRE) if scope["http_version"] == "1.1" else None


def _events(events: Events) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _answering(metrics: Metrics, path: str, handler: Handler) -> Handler:
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


async def _unknown(request: Request, error: Exception) -> Response:
    """What no handler took."""
    status, where = getattr(error, "status_code", 500), request.url.path[:200]
    if status != 405:
        said = f"no such address: {where}" if status == 404 else "the server failed"
        reply = as_reply(Refused(said, status), where)
        if status >= 500:
            id = reply.headers[REQUEST_ID]
            LOG.error("%s failed, %s", request.url.path, id, exc_info=error)
        return reply
    routes = (r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
    allowed = ", ".join(sorted(m for r in routes for m in r.methods))
    said = f"{where} answers {allowed}, not {request.method}"
    return as_reply(Refused(said, status, headers={"allow": allowed}), where)


def make_app(service: Service, near: Sequence[str] = ()) -> Starlette:
    """The application. Its life is that of the worker's thread. `near` are other names of the site
    that it is, whose pages may ask as its own do."""
    api = Api(service)
    posts = {
        "/v1/chat/completions": api.chat,
        "/v1/completions": api.completions,
        "/infill": api.infill,
        "/v1/responses": api.responses,
        "/v1/responses/input_tokens": api.input_tokens,
        "/v1/responses/{id}/cancel": api.cancel_response,
        "/v1/messages": api.messages,
        "/v1/messages/count_tokens": api.count_tokens,
        "/v1/embeddings": api.embeddings,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
    }
    gets = {
        "/v1/models": api.models,
        "/v1/models/{id:path}": api.model,
        "/v1/responses/{id}": api.response,
        "/v1/responses/{id}/input_items": api.input_items,
        "/health": api.health,
        "/metrics": api.show_metrics,
        "/": api.page,
    }
    deletes = {"/v1/responses/{id}": api.drop_response}
    routes = [
        Route(path, _answering(api.metrics, path, handler), methods=[method])
        for method, table in (("POST", posts), ("GET", gets), ("DELETE", deletes))
        for path, handler in table.items()
    ]

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await run_in_threadpool(service.stop)

    settings = service.settings
    origins = [*settings.origins, *near]
    middleware = [Middleware(Guard, keys=settings.keys, origins=origins)]
    if origins:
        every = ["*"]
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every,
            expose_headers=[REQUEST_ID],
        )  # fmt: skip
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {404: _unknown, 405: _unknown, 500: _unknown}
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=life, exception_handlers=handlers
    )
    app.state.metrics = api.metrics  # for whoever runs it without a socket
    return app
