"""What a client is told when a request cannot be served: a status and one line."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

from ggraph import GgraphError

FORM = re.compile(r"^[A-Z]|[\[-]")  # ToolChoice, list[..], constrained-str
REQUEST_ID = "x-request-id"  # the header by which a client can name a reply
ENDS = "the server ends"
MESSAGES = "/v1/messages"  # how addresses begin whose replies have Anthropic's form
TOO_LONG = "context_length_exceeded"  # by which clients know to send less
TOO_LONG_THERE = "prompt is too long: "  # by which those of Anthropic's form do
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
OTHER_KINDS = {404: "not_found_error", 413: "request_too_large"}  # of Anthropic's form


class Refused(GgraphError):
    """A request that is not served. `param` names the field that is wrong, `code` what clients look
    for."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.status, self.param, self.headers = status, param, dict(headers or {})
        self.code = code


def ending(said: str = ENDS) -> Refused:
    """What they are told who wait as the server ends: another one may soon be there."""
    return Refused(said, 503, headers={"retry-after": "1"})


def as_reply(error: Refused, path: str) -> JSONResponse:
    """The reply to a request of an address."""
    told, headers = body(error, path), {**error.headers, REQUEST_ID: request_id()}
    return JSONResponse(told, error.status, headers=headers)


def request_id() -> str:
    """A name for a reply."""
    return f"req_{secrets.token_hex(16)}"


def body(error: Refused, path: str) -> dict[str, Any]:
    """The JSON of an error, in OpenAI's form, or in Anthropic's where an address is of that."""
    kind = KINDS.get(error.status, "invalid_request_error")
    if not path.startswith(MESSAGES):
        kind = "server_error" if error.status >= 500 else kind
        told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        return {"error": told}
    kind = "api_error" if error.status >= 500 else OTHER_KINDS.get(error.status, kind)
    found = TOO_LONG_THERE if error.code == TOO_LONG else ""
    return {"type": "error", "error": {"type": kind, "message": f"{found}{error}"}}


def of_validation(error: ValidationError) -> Refused:
    """What is wrong with a body's first wrong field, on one line. Where a field may have several
    forms, each says why it is not the one: the one that was meant has the deepest fault."""
    all_wrong = error.errors(include_url=False, include_input=False, include_context=False)
    field = all_wrong[0]["loc"][:1]
    wrong = [(_place(e["loc"]), e) for e in all_wrong if e["loc"][:1] == field]
    place, first = max(wrong, key=lambda w: (not _other_form(w[1]), len(w[0])))
    said = [str(first["msg"])]
    if _other_form(first):
        said = list(dict.fromkeys(str(e["msg"]) for at, e in wrong if at == place))
    where = ".".join(map(str, place))
    message = " or ".join([said[0], *(s.removeprefix("Input should be ") for s in said[1:])])
    message = f"{where}: {message}" if where else message
    return Refused(message[:500], param=str(field[0]) if field else None)


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Where in a body that is, without the names of forms that pydantic puts in between."""
    return [x for x in loc if not (isinstance(x, str) and FORM.search(x))]


def _other_form(wrong: ErrorDetails) -> bool:
    """Whether there is something of quite another form."""
    return wrong["type"].endswith(("_type", "_parsing"))
