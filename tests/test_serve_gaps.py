"""What stands in a gap of a text: `suffix` of `/v1/completions`, and `/infill`."""

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import serve_fuzz
from serve_kit import FLAG, WEB, Server, served
from small_model import byte_alphabet, small_model

from ggraph.text.tokenizer import Tokenizer
from models.serve.gaps import fitted
from models.serve.native import GapStream
from models.serve.native_fields import InfillRequest

OWN = ("<gap a>", "<gap b>", "<gap c>", "<gap d>", "<gap e>")  # which the file's keys name
ROLES = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def vocabulary(marks: tuple[str, ...], bos: bool) -> dict[str, Any]:
    ends, tokens = ["<|im_start|>", "<|im_end|>"], byte_alphabet()
    tokens += [*ends, *marks[::-1], *(f"<|x{i}|>" for i in range(62 - len(marks)))]
    named = dict(zip(ROLES, map(tokens.index, marks), strict=False)) if marks == OWN else {}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 64,
        "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.add_bos_token": bos,
        **{f"tokenizer.ggml.{role}_token_id": i for role, i in named.items()},
    }  # fmt: skip


@pytest.fixture(scope="module", params=[(OWN, False), (DEEPSEEK, True)], ids=["own", "bos"])
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
    server, (pre, suf, mid, *_) = filling
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


PATH = "/infill"
FILES = [
    {"filename": "a.py", "text": "x = 1\n"},
    {"filename": "b/c.py", "text": "y = x\n", "time": 3},
]


def filled(server: Server, **more: Any) -> Any:
    body = {
        "input_prefix": "def f(a):\n",
        "input_suffix": "\n    return b\n",
        "n_predict": 12,
        **more,
    }
    reply = WEB.post(f"{server.url}{PATH}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(server: Server, *parts: str | int) -> list[int]:
    """Token ids of texts and roles' places among the marks."""
    found: list[int] = []
    for part in parts:
        asked = {"content": part, "parse_special": part in (*OWN, *DEEPSEEK)}
        found += WEB.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    return found


KINDS = {
    "index": int, "content": str, "stop": bool, "model": str, "stop_type": str,
    "stopping_word": str, "tokens_predicted": int, "tokens_evaluated": int, "tokens_cached": int,
    "has_new_line": bool, "truncated": bool, "timings": dict,
}  # fmt: skip
TIMINGS = {"cache_n"} | {
    f"{name}_{of}"
    for name in ("prompt", "predicted")
    for of in ("n", "ms", "per_token_ms", "per_second")
}


def test_an_editor_hears_what_the_best_tokens_say(filling: tuple[Server, tuple[str, ...]]) -> None:
    """As with `suffix`; what stands before the gap in its line is part of what stands before."""
    server, _ = filling
    plain = said(server, prompt="def f(a):\n    b =", suffix="\n    return b\n", temperature=0)
    for more in ({"prompt": "    b ="}, {"input_prefix": "def f(a):\n    b ="}):
        found = filled(server, **more)
        assert found["content"] == plain["choices"][0]["text"]
        assert found["tokens_evaluated"] == plain["usage"]["prompt_tokens"]
        assert found["tokens_predicted"] == plain["usage"]["completion_tokens"]
        assert found["stop"] is True and found["truncated"] is False
        assert {k: type(v) for k, v in found.items()} == KINDS
        numbers = found["timings"].values()
        assert set(found["timings"]) == TIMINGS and all(n >= 0 for n in numbers)
        end = {"stop": "eos", "length": "limit"}[plain["choices"][0]["finish_reason"]]
        assert (found["stop_type"], found["stopping_word"]) == (end, "")


def test_other_files_stand_before_as_in_repositories(
    filling: tuple[Server, tuple[str, ...]],
) -> None:
    server, (pre, suf, mid, *rest) = filling
    if rest:
        repository, file = rest
        names = chain.from_iterable((file, f"{f['filename']}\n{f['text']}") for f in FILES)
        before = [repository, "project\n", *names, file, "file\n"]
    else:
        before = ["".join(f"{f['filename']}\n{f['text']}\n\n" for f in FILES)]
    whole = ids_of(server, *before, pre, "def f(a):\n", suf, "\n    return b\n", mid)
    if pre == DEEPSEEK[0]:
        whole = [256, *whole]
    plain = said(server, prompt=whole, temperature=0)
    found = filled(server, input_extra=FILES)
    assert found["content"] == plain["choices"][0]["text"]
    assert found["tokens_evaluated"] == len(whole)


LLAMA_VIM = [
    "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
    "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
    "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached",
]  # fmt: skip


def test_llama_vim_is_answered(filling: tuple[Server, tuple[str, ...]]) -> None:
    """It sends files ahead with nothing to say, asks for some fields under flat names, and takes
    nothing for an answer but one line of JSON in which a string stands right behind "content":."""
    server, _ = filling
    files = [
        {"filename": f"{i}.py", "text": f"name{i} = {i}\n" * 5, "time": [1, 2]} for i in range(2)
    ]
    ahead = {
        "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": files, "prompt": "",
        "n_predict": 0, "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True,
        "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""], "model": "",
    }  # fmt: skip
    assert WEB.post(f"{server.url}{PATH}", json=ahead).json() == {}
    asked = {
        **ahead, "input_prefix": "def f(a):\n", "input_suffix": "\n", "prompt": "    return ",
        "n_predict": 16, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 30000,
        "response_fields": LLAMA_VIM,
    }  # fmt: skip
    del asked["temperature"]
    reply = WEB.post(f"{server.url}{PATH}", json=asked)
    assert reply.status_code == 200 and "\n" not in reply.text
    assert re.match(r"\s*{", reply.text) and re.search(r'"content"\s*:"', reply.text)
    found = reply.json()
    assert list(found) == LLAMA_VIM
    assert found["tokens_cached"] > sum(len(f["text"]) for f in files)  # a byte is a token here
    whole = filled(server, **{k: v for k, v in asked.items() if k != "response_fields"})
    assert whole["content"] == found["content"]
    assert found["timings/predicted_n"] == whole["timings"]["predicted_n"] > 0
    timings = whole["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == whole["tokens_evaluated"]
    for name in ("prompt", "predicted"):
        count, ms = timings[f"{name}_n"], timings[f"{name}_ms"]
        assert timings[f"{name}_per_second"] == pytest.approx(1000 * count / ms)
        assert timings[f"{name}_per_token_ms"] == pytest.approx(ms / max(1, count))


def test_llama_vscode_has_several_answers(filling: tuple[Server, tuple[str, ...]]) -> None:
    """In a list; the first is that of one who asks for one, the others are drawn."""
    server, _ = filling
    several = filled(server, n_cmpl=3, seed=5, samplers=["top_k", "top_p", "infill"])
    assert [a["index"] for a in several] == [0, 1, 2]
    assert several[0]["content"] == filled(server)["content"]
    assert len({a["content"] for a in several}) == 3
    drawn = [filled(server, seed=5 + i, temperature=0.8)["content"] for i in (1, 2)]
    assert [a["content"] for a in several[1:]] == drawn


@pytest.mark.parametrize("more", [{}, {"stop": ["a", "e", " "]}, {"n": 2, "seed": 1}])
def test_a_stream_says_what_the_reply_says(
    filling: tuple[Server, tuple[str, ...]], more: dict[str, Any]
) -> None:
    server, _ = filling
    whole = filled(server, **more)
    whole = whole if isinstance(whole, list) else [whole]
    asked = {"input_prefix": "def f(a):\n", "input_suffix": "\n    return b\n", "n_predict": 12}
    reply = WEB.post(f"{server.url}{PATH}", json={**asked, **more, "stream": True})
    lines = [line for line in reply.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    for answer in whole:
        own = [t for t in told if t["index"] == answer["index"]]
        assert [t["stop"] for t in own] == [False] * (len(own) - 1) + [True]
        assert "".join(t["content"] for t in own) == answer["content"]
        changing = {"content", "timings", "tokens_cached"}
        last = {k: v for k, v in own[-1].items() if k not in changing}
        assert last == {k: v for k, v in answer.items() if k not in changing}
        if answer["stopping_word"]:
            assert answer["stop_type"] == "word" and answer["stopping_word"] in more["stop"]


def test_a_gap_has_tokens_chances_and_a_form(filling: tuple[Server, tuple[str, ...]]) -> None:
    """As `/completion` has them."""
    server, _ = filling
    asked = {"json_schema": FLAG, "return_tokens": True, "n_probs": 1, "n_predict": 40}
    found = filled(server, **asked)
    assert list(json.loads(found["content"])) == ["on"]
    assert found["tokens"] == ids_of(server, found["content"])
    assert [t["id"] for t in found["completion_probabilities"]] == found["tokens"]


def test_time_ends_an_answer_that_has_a_line(filling: tuple[Server, tuple[str, ...]]) -> None:
    """And no other: half a line is of no use."""
    server, _ = filling
    asked = {"n_predict": 100, "t_max_predict_ms": 1, "ignore_eos": True}
    line, letter = (ids_of(server, text)[0] for text in ("\n", "a"))
    short = filled(server, **asked, logit_bias={str(line): 100})
    assert 0 < short["tokens_predicted"] < 100 and set(short["content"]) == {"\n"}
    assert (short["stop_type"], short["has_new_line"]) == ("limit", True)
    whole = filled(server, **asked, logit_bias={str(letter): 100})
    assert (whole["content"], whole["stop_type"]) == ("a" * 100, "limit")


def test_what_does_not_fit_is_left_out(filling: tuple[Server, tuple[str, ...]]) -> None:
    """A file that is longer than the context is no fault of an editor's."""
    server, _ = filling
    context = server.client.models.list().data[0].to_dict()["meta"]["context_length"]
    long = {"input_prefix": "ab\n" * context, "input_suffix": "cd\n" * context}
    found = filled(server, **long, input_extra=FILES, n_predict=-1, ignore_eos=True)
    assert found["truncated"] is True
    assert context / 2 < found["tokens_evaluated"] <= 3 * context / 4
    assert found["tokens_predicted"] >= context / 4


def test_unsound_requests_are_refused_in_words(filling: tuple[Server, tuple[str, ...]]) -> None:
    """A slice of what `python scripts/fuzz_serve.py` asks."""
    server, _ = filling
    statuses = set()
    for seed in range(120):
        path, raw = serve_fuzz.request(seed, PATH)
        reply = WEB.post(server.url + path, content=raw)
        statuses.add(reply.status_code)
        assert not serve_fuzz.complaint(reply.status_code, reply.text), raw[:300]
    assert statuses == {200, 400}


@pytest.fixture(scope="module", params=[(OWN, False), (DEEPSEEK, True)], ids=["own", "bos"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_gguf(vocabulary(*request.param))


def test_a_prompt_fits_whatever_is_given(tokenizer: Tokenizer) -> None:
    """It leaves room for the answer; the ends that touch the gap stay, and the last files whole."""
    fim, r = tokenizer.vocabulary.fim, random.Random(3)
    pre, suf, mid = (fim[role] for role in ROLES[:3])
    for _ in range(300):
        context, limit = r.choice([64, 256, 1024]), r.choice([-1, 0, 5, 100, 10**9])
        sizes = [r.choice([0, 1, 9, 60, 300, 900]) for _ in range(5)]
        before, behind, *texts = ("".join(r.choices("abcd\n", k=size)) for size in sizes)
        files = [{"filename": f"{i}", "text": f"{i}{text}{i}"} for i, text in enumerate(texts)]
        asked = {"input_prefix": before, "input_suffix": behind, "input_extra": files}
        gap = fitted(
            tokenizer, InfillRequest.model_validate({**asked, "n_predict": limit}), context
        )
        answer = min(context // 4, limit if limit >= 0 else context)
        assert len(gap.ids) + answer <= context and gap.ids[-1] == mid
        one, two = gap.ids.index(pre), gap.ids.index(suf)
        kept, rest = (
            tokenizer.decode(ids) for ids in (gap.ids[one + 1 : two], gap.ids[two + 1 : -1])
        )
        assert before.endswith(kept) and behind.startswith(rest)
        head = tokenizer.decode(gap.ids[:one], special=False)
        there = [f["filename"] for f in files if f"{f['filename']}\n{f['text']}" in head]
        assert there == [f["filename"] for f in files][len(files) - len(there) :]
        whole = (kept, rest, len(there)) == (before, behind, len(files))
        assert gap.cut is not whole
        assert gap.stem == (one if there else -1)
        least = context - answer - 5
        if not whole and len(there) < len(files):
            continue
        if not whole:
            assert len(kept) + len(rest) > least * 3 // 4


def test_a_prompt_that_grows_begins_as_it_did(tokenizer: Tokenizer) -> None:
    """So that all but its end is in the cache: by some letters, and behind files sent ahead."""
    files = [{"filename": f"{i}.py", "text": "ab\n" * 30} for i in range(20)]

    def ids(before: str, behind: str = "", **more: Any) -> list[int]:
        asked = {"input_prefix": before, "input_suffix": behind, "input_extra": files, **more}
        return fitted(tokenizer, InfillRequest.model_validate(asked), 1024).ids

    ahead = ids("", n_predict=0)
    for size in (0, 100, 300):
        assert ids("a" * size, "b" * 20, n_predict=100)[: len(ahead) - 3] == ahead[:-3]
    changes, last = 0, ids("", n_predict=100)
    for size in range(1, 1200, 4):
        now = ids(("abcdefg" * size)[:size], n_predict=100)
        same = next(i for i, (a, b) in enumerate(zip(last, now, strict=False)) if a != b)
        changes += same < len(last) - 3
        last = now
    assert changes < 20


def test_lines_that_are_less_indented_end_the_text() -> None:
    """However it is cut into tokens, and nothing of them is shown before that is known."""
    t, r = Tokenizer.from_gguf(vocabulary(OWN, False)), random.Random(1)
    for _ in range(2000):
        indent, stops = r.randint(0, 3), r.choice([(), ("ab",)])
        text = "".join(r.choices("ab \t\n", weights=[3, 3, 4, 1, 4], k=r.randint(0, 30)))
        wanted, lines = text, text.split("\n")
        for i, line in enumerate(lines[1:], 1):
            if line.strip(" \t") and len(line) - len(line.lstrip(" \t")) < indent:
                wanted = "\n".join(lines[:i])
                break
        wanted = wanted.split("ab")[0] if stops else wanted
        stream = partial(GapStream, indent=indent, seconds=0)(t, stops)
        shown = ""
        for token in t.encode(text):
            shown += stream.push(token)
            assert wanted.startswith(shown)
            if stream.stopped is not None:
                break
        else:
            shown += stream.finish()
        assert shown == wanted, (text, indent)
        assert (stream.stopped is None) == (wanted == text)
