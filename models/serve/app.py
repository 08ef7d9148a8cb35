"""Which address does what. Handlers read, check and answer; what takes time runs elsewhere."""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ggraph.decode.sampler import SamplerConfig

from . import schema
from .anthropic import Messages
from .anthropic_blocks import MessagesRequest
from .common import B, CommonApi, EncoderApi, Handler, answering, checked, unknown, while_there
from .conversations import Conversations, items_of, page_of
from .engine import SAMPLING, Service
from .errors import REQUEST_ID, Refused
from .generation import Asked, Generation
from .guard import Guard
from .infill import Infill
from .native import Native
from .native_fields import InfillRequest, NativeCompletion
from .protocol import WIRE
from .reader import Reader
from .replies import Events
from .responses import Responses
from .wire import Wire

A = TypeVar("A", bound=Asked)


@dataclass(eq=False)
class Api(CommonApi):
    """The handlers of a server whose model answers."""

    service: Service
    listener: Generation = field(init=False)
    kept: Responses = field(init=False)
    anthropic: Messages = field(init=False)
    native: Native = field(init=False)
    gaps: Infill = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.listener = Generation(self.service, self.metrics)
        self.anthropic = Messages(self.listener)
        self.native, self.gaps = Native(self.listener), Infill(self.listener)
        s = self.service.settings
        self.kept = Responses(self.listener, Conversations(s.kept, s.kept_bytes))

    @property
    def posts(self) -> dict[str, Handler]:
        """Handlers of POST, by their addresses."""
        return {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/completion": self.completion,
            "/infill": self.infill,
            "/apply-template": self.apply_template,
            "/v1/responses": self.responses,
            "/v1/responses/input_tokens": self.input_tokens,
            "/v1/responses/{id}/cancel": self.cancel_response,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            **super().posts,
        }

    @property
    def gets(self) -> dict[str, Handler]:
        """Of GET."""
        return {
            **super().gets,
            "/v1/responses/{id}": self.response,
            "/v1/responses/{id}/input_items": self.input_items,
        }

    @property
    def deletes(self) -> dict[str, Handler]:
        """Of DELETE."""
        return {"/v1/responses/{id}": self.drop_response}

    @property
    def told_of(self) -> dict[str, Any]:
        """What is known of the server and of how it samples by default."""
        s, t, found = self.service, self.service.m.tokenizer, super().told_of
        default = SamplerConfig()
        drawn = {name: getattr(default, ours) for name, ours in SAMPLING.items() if name != "seed"}
        found["default_generation_settings"]["params"] = {"n_predict": -1, **drawn}
        found["modalities"]["vision"] = s.sees
        ends = {"bos_token": t.bos_text, "eos_token": t.eos_text}
        return {**found, "chat_template": t.chat_template or "", **ends}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = await self._begun(request, schema.ChatRequest, self.listener.chat)
        return await _reply(request, asked, self.listener.events, self.listener.whole)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, schema.CompletionRequest)
        if body.is_short:  # a thread's beginning would take longer
            begin = self.listener.completion(body)
        else:
            begin = await run_in_threadpool(self.listener.completion, body)
        return await _reply(request, begin(), self.listener.events, self.listener.whole)

    async def completion(self, request: Request) -> Response:
        """POST /completion."""
        asked = await self._begun(request, NativeCompletion, self.native.completion)
        return await _reply(request, asked, self.native.events, self.native.whole)

    async def apply_template(self, request: Request) -> Response:
        """POST /apply-template."""
        body = await self._read(request, schema.ChatRequest)
        return JSONResponse({"prompt": await run_in_threadpool(self.listener.templated, body)})

    async def infill(self, request: Request) -> Response:
        """POST /infill."""
        asked = await self._begun(request, InfillRequest, self.gaps.prepared)
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
        asked = checked(lambda: schema.InputItemsQuery.model_validate(dict(request.query_params)))
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

    async def _begun(
        self, request: Request, kind: type[B], prepared: Callable[[B], Callable[[], A]]
    ) -> A:
        """A request that is being answered, which was `prepared` in a thread."""
        body = await self._read(request, kind)
        return (await run_in_threadpool(prepared, body))()


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
    return JSONResponse(await while_there(request, whole(asked)))


def _wire(request: Request) -> Wire | None:
    """Where the body of the reply goes, if it goes there in chunks."""
    scope = request.scope
    return scope.get("state", {}).get(WIRE) if scope["http_version"] == "1.1" else None


def _events(events: Events) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def make_app(service: Reader, near: Sequence[str] = ()) -> Starlette:
    """The application. Its life is that of the worker's thread. `near` are other names of the site
    that it is, whose pages may ask as its own do."""
    api = Api(service) if isinstance(service, Service) else EncoderApi(service)
    routes = [
        Route(path, answering(api.metrics, path, handler), methods=[method])
        for method, table in (("POST", api.posts), ("GET", api.gets), ("DELETE", api.deletes))
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
    handlers: dict[Any, Any] = {404: unknown, 405: unknown, 500: unknown}
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=life, exception_handlers=handlers
    )
    app.state.metrics = api.metrics  # for whoever runs it without a socket
    return app
