"""POST /v1/embeddings: the last layer's states, pooled as the model's makers do or as asked for."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from ggraph import Array, ModelError
from ggraph.serving.text import Request

from ..pooling import Pooling
from .errors import Refused
from .inbox import Ended
from .listener import Listener
from .reader import Reader
from .schema import EmbeddingsRequest, each


def prompts_of(service: Reader, asked: EmbeddingsRequest) -> list[list[int]]:
    """Token ids of every text. Refused where a vector cannot have as many numbers as asked for."""
    width = service.m.model.vector_width
    if (asked.dimensions or 0) > width:
        raise Refused(
            f"dimensions: expected 1 to {width}, got {asked.dimensions}", param="dimensions"
        )
    texts = each(asked.input)
    service.worker.check_room(len(texts), "input")
    special = asked.parse_special
    return [service.text_ids(t, "input", special=special, complete=True) for t in texts]


def pooling_for(service: Reader, asked: EmbeddingsRequest) -> Pooling:
    """As asked for, or else the model's. Refused where its files say what is not made here."""
    if service.m.model.scores:
        raise Refused(f"{service.name} is a reranker, and makes no vectors: ask /v1/rerank")
    try:
        return asked.pooling or service.pooling
    except ModelError as error:
        message = f"{error}; `pooling` in the request chooses another"
        raise Refused(message, param="pooling") from None


async def embeddings(
    listener: Listener, prompts: list[list[int]], pooling: Pooling, asked: EmbeddingsRequest
) -> dict[str, Any]:
    """The reply: one vector of length 1 for each text."""
    found = await read(listener, [listener.service.reading(p, pooling) for p in prompts], pooling)
    even = [_even(vector, asked.dimensions) for vector in found]
    data = [
        {"object": "embedding", "index": i, "embedding": _coded(vector, asked)}
        for i, vector in enumerate(even)
    ]
    count = sum(map(len, prompts))
    return {
        "object": "list",
        "data": data,
        "model": listener.service.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


async def read(listener: Listener, requests: Sequence[Request], pooling: Pooling) -> list[Array]:
    """What reading each has made: see `Reader.vector`. States go when the text is read."""
    found: dict[int, Array] = {}
    async for heard in listener.heard(listener.service.read(requests)):
        for index, what in heard:
            if isinstance(what, Ended):
                if what.error is not None or what.text is None:
                    told = what.error or "the text was not read"
                    raise listener.service.worker.refusal(told)
                found[index] = listener.service.vector(what.text, pooling)
                what.text.features.clear()
    return [found[i] for i in range(len(requests))]


def _even(vector: Array, dimensions: int | None) -> Array:
    """f32 [V] or the first of these, of length 1."""
    vector = vector[:dimensions]
    even: Array = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return even.astype(np.float32)


def _coded(vector: Array, asked: EmbeddingsRequest) -> str | list[float]:
    if asked.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(x) for x in vector]
