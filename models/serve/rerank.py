"""POST /v1/rerank: how well each of some documents answers a query, as a reranker judges.

The form is Jina's and Cohere's, as llama-server and vLLM have it.
"""

import math
from typing import Any

from ggraph.serving.encoder import Read

from .embeddings import read
from .errors import Refused
from .listener import Listener
from .reader import EncoderService, Reader
from .schema import RerankRequest


def pairs_of(service: Reader, asked: RerankRequest) -> list[Read]:
    """What is to be judged. Refused where the model is no reranker, or a pair does not fit."""
    if not isinstance(service, EncoderService) or not service.m.model.scores:
        raise Refused(f"{service.name} is no reranker: it has no scores of pairs of texts")
    service.worker.check_room(len(asked.documents), "documents")
    return service.pairs(asked.query, asked.texts)


async def reranked(listener: Listener, pairs: list[Read], asked: RerankRequest) -> dict[str, Any]:
    """The reply: the best first, with the chance that the logistic function makes of a score."""
    found = await read(listener, pairs, "cls")
    chances = [1 / (1 + math.exp(-max(float(score[0]), -700.0))) for score in found]
    best = sorted(range(len(chances)), key=lambda i: -float(found[i][0]))[: asked.top_n]
    texts = asked.texts if asked.return_documents else ()
    results = [
        {"index": i, "relevance_score": chances[i]}
        | ({"document": {"text": texts[i]}} if texts else {})
        for i in best
    ]
    count = sum(len(p.prompt) for p in pairs)
    return {
        "object": "list",
        "results": results,
        "model": listener.service.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
