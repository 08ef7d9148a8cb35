"""What fields of requests do, or why they are refused; what clients look for in refusals."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from serve_kit import Server, ended, started
from small_model import learnable_model

WEB = httpx.Client(timeout=60)
TALK = [{"role": "user", "content": "Say something."}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = learnable_model(tmp_path_factory.mktemp("fields"))
    running = started(path, "-t", "1", "--parallel", "2", "--queue", "2")
    yield running
    assert ended(running) == 0


def refused(server: Server, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a request that is refused."""
    reply = WEB.post(server.url + path, json=body)
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert "\n" not in error["message"]
    return error


def test_vectors_have_as_many_numbers_as_asked_for(server: Server) -> None:
    """The first ones of the whole vector, of length 1 again."""

    def vector(**more: Any) -> np.ndarray:
        reply = WEB.post(f"{server.url}/v1/embeddings", json={"input": "abc", **more})
        return np.array(reply.json()["data"][0]["embedding"])

    whole = vector()
    for count in (1, 5, len(whole)):
        short = vector(dimensions=count)
        first = whole[:count] / np.linalg.norm(whole[:count])
        assert short.shape == (count,) and np.allclose(short, first, atol=1e-6)
    assert np.array_equal(vector(dimensions=len(whole)), whole)
    for count in (0, -1, len(whole) + 1):
        error = refused(server, "/v1/embeddings", {"input": "abc", "dimensions": count})
        assert error["param"] == "dimensions" and "dimensions" in error["message"]
