"""What stands in a gap of a text: `suffix` of `/v1/completions`."""

from collections.abc import Iterator
from typing import Any

import pytest
from serve_kit import WEB, Server, served
from small_model import byte_alphabet, small_model

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def vocabulary(marks: tuple[str, ...], bos: bool) -> dict[str, Any]:
    ends = ["<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.tokens": [
            *byte_alphabet(), *ends, *marks[::-1], *(f"<|x{i}|>" for i in range(59)),
        ],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 64,
        "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.add_bos_token": bos,
    }  # fmt: skip


@pytest.fixture(scope="module", params=[(QWEN, False), (DEEPSEEK, True)], ids=["plain", "bos"])
def filling(
    request: pytest.FixtureRequest, tmp_path_factory: Any
) -> Iterator[tuple[Server, tuple[str, ...]]]:
    path = small_model(tmp_path_factory.mktemp("gaps") / "m.gguf", vocabulary(*request.param))
    with served(path, "--parallel", "2") as running:
        yield running, request.param[0]


def said(server: Server, **more: Any) -> dict[str, Any]:
    body = {"max_tokens": 12, "seed": 3, **more}
    reply = WEB.post(f"{server.url}/v1/completions", json=body)
    found: dict[str, Any] = reply.json()
    assert reply.status_code == 200, found
    return found


def test_a_gap_is_asked_for_as_its_model_was_taught(
    filling: tuple[Server, tuple[str, ...]],
) -> None:
    """As who writes the marks by hand has it; what a user typed is none of them."""
    server, (pre, suf, mid) = filling
    for before, behind in (("def f(a):\n", "\n    return b"), ("", "b"), (f"a{mid}", f"{pre}b")):
        found = said(server, prompt=before, suffix=behind)
        asked = {"content": before}, {"content": behind}
        ids = [WEB.post(f"{server.url}/tokenize", json=a).json()["tokens"] for a in asked]
        marks = [
            WEB.post(f"{server.url}/tokenize", json={"content": m, "parse_special": True}).json()
            for m in (pre, suf, mid)
        ]
        one, two, three = (m["tokens"] for m in marks)
        assert len(one) == len(two) == len(three) == 1
        head = [256] if pre == DEEPSEEK[0] else []
        whole = [*head, *one, *ids[0], *two, *ids[1], *three]
        plain = said(server, prompt=whole)
        assert found["choices"][0]["text"] == plain["choices"][0]["text"]
        assert found["usage"]["prompt_tokens"] == len(whole) == plain["usage"]["prompt_tokens"]


def test_prompts_of_a_list_have_the_same_suffix(filling: tuple[Server, tuple[str, ...]]) -> None:
    server, _ = filling
    both = said(server, prompt=["ab", "c"], suffix="d")["choices"]
    alone = [said(server, prompt=p, suffix="d")["choices"][0]["text"] for p in ("ab", [99])]
    assert [c["text"] for c in both] == alone


def test_without_one_it_is_a_completion(filling: tuple[Server, tuple[str, ...]]) -> None:
    server, _ = filling
    texts = [said(server, prompt="ab", **m)["choices"][0]["text"] for m in ({}, {"suffix": ""})]
    assert texts[0] == texts[1] != said(server, prompt="ab", suffix="c")["choices"][0]["text"]


def test_a_model_without_such_tokens_refuses(server: Server) -> None:
    body = {"prompt": "ab", "suffix": "c"}
    reply = WEB.post(f"{server.url}/v1/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "suffix")
    assert error["message"] == "suffix: this model has no tokens for filling in"
