"""What a client is told when a request cannot be served: a status and one line."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from ggraph import GgraphError

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


def as_reply(error: Refused) -> JSONResponse:
    """The reply in OpenAI's form."""
    kind = KINDS.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "server_error"
    told = body(str(error), kind, error.param, error.code)
    return JSONResponse(told, error.status, headers=error.headers)


def body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def of_validation(error: ValidationError) -> Refused:
    """The first thing that is wrong with a body, on one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(x) for x in first["loc"])
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return Refused(message[:500], param=str(first["loc"][0]) if first["loc"] else None)
