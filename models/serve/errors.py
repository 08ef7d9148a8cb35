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
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


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


def as_reply(error: Refused) -> JSONResponse:
    """The reply in OpenAI's form."""
    kind = KINDS.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "server_error"
    told = body(str(error), kind, error.param, error.code)
    return JSONResponse(told, error.status, headers={**error.headers, REQUEST_ID: request_id()})


def request_id() -> str:
    """A name for a reply."""
    return f"req_{secrets.token_hex(16)}"


def body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
