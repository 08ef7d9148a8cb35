"""Bodies of requests as they arrive: bounds on each, and on all together."""

import asyncio
from codecs import BOM_UTF8
from dataclasses import dataclass, field

from starlette.requests import Request

from .errors import Refused
from .settings import Settings

PLAIN = "identity"  # the coding of what is not coded


@dataclass(eq=False)
class Bodies:
    """Reads bodies, and knows how much of them is there."""

    settings: Settings
    arriving: int = field(default=0)  # bytes of those that are not whole yet

    async def read(self, request: Request) -> bytes:
        """All of a body, without a mark of its coding, as some programs on Windows write it.
        Refused where it is compressed, too long, too slow, or too much arrives at once."""
        if (coded := request.headers.get("content-encoding", PLAIN)).lower() != PLAIN:
            message = f"content-encoding: {coded[:80]!r} is not read here: send the body as it is"
            raise Refused(message, 415, headers={"accept-encoding": PLAIN})
        limits, parts, size = self.settings, list[bytes](), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    self.arriving += len(part)
                    if size > limits.body_bytes:
                        raise Refused(f"the body has more than {limits.body_bytes} bytes", 413)
                    if self.arriving > limits.bodies_bytes:
                        raise Refused("too much is arriving at once: try again later", 429)
                    parts.append(part)
        except TimeoutError:
            raise Refused("the body did not arrive in time", 408) from None
        finally:
            self.arriving -= size
        return b"".join(parts).removeprefix(BOM_UTF8)
