"""Who may ask: keys, and pages of which sites."""

import hashlib
import hmac
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Refused, as_reply

HEAD_BYTES = 1 << 15  # of a request's line and headers
OPEN = ("/", "/health")  # they tell nothing


def _digest(text: str, coded: str = "utf-8") -> bytes:
    return hashlib.sha256(text.encode(coded, "surrogateescape")).digest()


class Guard:
    """Lets requests through whose headers are short, that bring a key where keys are asked for, and
    that no page of another site has sent: a browser would send it to this machine for whoever asks.
    `origins` are sites that were named."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], origins: Sequence[str]) -> None:
        self.app, self.origins = app, set(origins)
        self._keys = [_digest(k) for k in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refused = self._refused(scope) if scope["type"] == "http" else None
        if refused is None:
            await self.app(scope, receive, send)
        else:
            await as_reply(refused, scope["path"])(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        if _head_bytes(scope) > HEAD_BYTES:
            return Refused(f"the headers have more than {HEAD_BYTES} bytes", 431)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and not self._known(origin, headers.get("host", ""), scope):
            return Refused(f"pages of {origin[:200]} may not ask (see --cors-origin)", 403)
        if not self._keys or scope["path"] in OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        bearer = key.strip(" \t") if kind.lower() == "bearer" else ""
        # Headers are read as Latin-1, whatever a client has coded its key in
        given = _digest(bearer or headers.get("x-api-key", ""), "latin-1")
        if sum(hmac.compare_digest(given, k) for k in self._keys):  # all of them, whichever it is
            return None
        challenge = {"www-authenticate": "Bearer"}
        return Refused("a valid API key is needed", 401, headers=challenge)

    def _known(self, origin: str, host: str, scope: Scope) -> bool:
        """Whether a page comes from this server, or from a site that was named."""
        if "*" in self.origins or origin in self.origins:
            return True
        try:
            page = urlsplit(origin)
        except ValueError:
            return False
        own = page.netloc == host != ""
        return own and (_is_plain(page.hostname or "") or not _is_near(scope))


def _head_bytes(scope: Scope) -> int:
    """Of a head that came whole, which the protocol does not count."""
    line = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _is_plain(name: str) -> bool:
    """Whether nobody can have a host's name lead elsewhere than it says."""
    return name == "localhost" or _address(name) is not None


def _is_near(scope: Scope) -> bool:
    """Whether a request came in where only this machine asks, or nobody knows where. A page there
    under a name of its own may be any site's, whose owner has had the name lead to this machine
    once the page was loaded."""
    address = _address((scope.get("server") or ("",))[0])
    return address is None or address.is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(name)
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found
