"""The server as a process of its own, asked by the `openai` client and by plain HTTP."""

import gzip
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import serve_fuzz
from serve_kit import ENDLESS, TALK, WEB, Server, served, started
from small_model import small_model

from ggraph.decode.draft.tree import Draft
from ggraph.decode.sampler import SamplerConfig
from models.run.generation import Generation
from models.run.load import Loaded, load
from models.serve.engine import Service
from models.serve.grammar import Grammars
from models.serve.schema import CompletionRequest
from models.serve.settings import Settings

WIDE: dict[str, Any] = {"temperature": 2, "top_p": 1, "extra_body": {"top_k": 0, "min_p": 0}}
TINY_HEAD = Path(__file__).parent / "golden" / "tiny" / "eagle3_for_llama_tied"
CODINGS = ("utf-8-sig", "utf-8")


@pytest.fixture(scope="module")
def server(learnable: Path) -> Iterator[Server]:
    with served(learnable, "--parallel", "4", "--queue", "12") as running:
        yield running


@pytest.fixture(scope="module")
def alone(learnable: Path) -> Iterator[Loaded]:
    m = load(learnable, threads=1)
    yield m
    m.close()


def text_alone(m: Loaded, prompt: str, limit: int, **sampling: Any) -> str:
    ids = m.tokenizer.encode(prompt, bos=None)
    config = SamplerConfig(**{"temp": 0.0, **sampling})
    return "".join(Generation(m, ids, config, limit).run(None))


def said(server: Server, prompt: str, limit: int, **more: Any) -> str:
    given = {"model": "any", "prompt": prompt, "max_tokens": limit, "temperature": 0.0, **more}
    return server.client.completions.create(**given).choices[0].text


def test_a_text_is_what_generate_says(server: Server, alone: Loaded) -> None:
    for prompt in ("abc", "to be or not to be", "abcabcabc"):
        assert said(server, prompt, 24) == text_alone(alone, prompt, 24)
    sampled = text_alone(alone, "abc", 24, temp=0.9, top_p=0.8, seed=7)
    assert said(server, "abc", 24, temperature=0.9, top_p=0.8, seed=7) == sampled


@pytest.mark.parametrize("url", ["completions", "chat/completions", "responses"])
def test_a_line_of_a_stream_is_one_for_who_cuts_text_as_python_does(
    server: Server, url: str
) -> None:
    """httpx's `iter_lines` ends lines at U+0085 and U+2028 too, which no event does."""
    ends = "\x85\u2028\u2029"
    bias = {str(byte): 100 for byte in ends.encode()}
    given: dict[str, Any] = {"model": "m", "logit_bias": bias, "seed": 1, "stream": True}
    asked = {
        "completions": {"prompt": "a", "max_tokens": 120},
        "chat/completions": {"messages": TALK, "max_tokens": 120},
        "responses": {"input": "a", "max_output_tokens": 120},
    }[url]
    with WEB.stream("POST", f"{server.url}/v1/{url}", json={**given, **asked}) as reply:
        lines = [line for line in reply.iter_lines() if line and line != "data: [DONE]"]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:6] != "event:"]
    assert set(ends) & set(json.dumps(events, ensure_ascii=False)), "none was said"


def test_many_clients_at_once_hear_what_each_would_alone(server: Server, alone: Loaded) -> None:
    prompts = [f"{'a shared beginning ' * 2}{i}" for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda p: said(server, p, 16), prompts))
    assert found == [text_alone(alone, p, 16) for p in prompts]


def test_drafts_change_nothing_but_the_usage(server: Server) -> None:
    """Of a text that comes to repeat itself, or nothing would be drafted; asked again where drafts
    did not seem to be worth it, since prices are by the clock."""
    texts = set()
    asked: dict[str, Any] = {
        "model": "m", "prompt": "abababab", "max_tokens": 40, "temperature": 0.0,
        "logit_bias": {"97": 10, "98": 10, "99": 10},
    }  # fmt: skip
    for wish, drafts in (
        ({"off": True}, False), ({"most": 16}, True), ({"drafters": ["lookup"]}, True),
        ({"drafters": []}, False),
    ):  # fmt: skip
        for _ in range(40 if drafts else 1):
            reply = server.client.completions.create(**asked, extra_body={"speculative": wish})
            texts.add(reply.choices[0].text)
            told = reply.usage.completion_tokens_details
            if drafted := told.accepted_prediction_tokens + told.rejected_prediction_tokens:
                break
        assert (drafted > 0) == drafts, wish
    assert len(texts) == 1
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_what_a_request_leaves_out_of_its_drafts_is_the_servers_to_say(alone: Loaded) -> None:
    for usual in (0, 3):
        service = Service(alone, Settings(parallel=1, draft=usual), 2048)
        for wish, most in (
            (None, usual), ({}, usual), ({"drafters": ["lookup"]}, usual), ({"most": None}, usual),
            ({"most": 5}, 5), ({"most": 0}, 0), ({"most": 5, "off": True}, 0),
        ):  # fmt: skip
            asked = CompletionRequest.model_validate({"prompt": "a", "speculative": wish})
            drafts = service._drafts(asked.speculative)
            assert getattr(drafts and drafts.policy, "most", 0) == most, wish


def test_a_head_drafts_for_many_and_changes_no_text(
    learnable: Path, alone: Loaded, tmp_path: Path
) -> None:
    """Nor does a smaller model. And where there is no head, one cannot be asked for."""
    more = ("--head", str(TINY_HEAD), "--model-draft", str(small_model(tmp_path / "other.gguf")))
    with served(learnable, "--parallel", "4", *more) as running:
        prompts = [f"to be or not to be {i}" for i in range(6)]
        names = ["head", "tree", "model"] * 2

        def ask(prompt: str, name: str) -> str:
            wish = {"drafters": [name], "most": 4}
            return said(running, prompt, 40, extra_body={"speculative": wish})

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, prompts, names))
        assert found == [text_alone(alone, p, 40) for p in prompts]
        told = WEB.get(f"{running.url}/metrics").text
        assert float(re.findall(r"^ggraph_drafted_total (.*)$", told, re.M)[0]) > 0


def test_a_server_that_comes_back_knows_what_it_had_read(learnable: Path, tmp_path: Path) -> None:
    replies = []
    for _ in range(2):
        with served(learnable, "--disk-cache", str(tmp_path), "--disk-cache-mb", "9") as running:
            asked: dict[str, Any] = {"model": "m", "prompt": "as it was " * 20, "temperature": 0}
            replies.append(running.client.completions.create(**asked))
            told = WEB.get(f"{running.url}/metrics").text
    assert replies[0].choices[0].text == replies[1].choices[0].text
    held = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert re.findall(r"^ggraph_disk_bytes (.*)$", told, re.M) == [str(float(held))]
    assert re.findall(r"^ggraph_disk_(\w+) 0.0$", told, re.M) == [
        "unwritten_total",
        "refused_total",
    ]
    known = [r.usage.prompt_tokens_details.cached_tokens for r in replies]
    assert known == [0, 192]  # three blocks of 64


def test_a_chat_streams_what_it_says_whole(server: Server) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": TALK, "max_tokens": 12, "seed": 3}
    whole = server.client.chat.completions.create(**asked)
    parts = list(
        server.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == whole.choices[0].message.content
    assert all("usage" in p.model_fields_set and p.usage is None for p in parts[:-1])
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "length"


def test_choices_have_seeds_of_their_own(server: Server) -> None:
    reply = server.client.chat.completions.create(
        model="m", messages=TALK, n=3, max_tokens=16, seed=1, **WIDE
    )
    texts = [c.message.content for c in reply.choices]
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    second = server.client.chat.completions.create(
        model="m", messages=TALK, max_tokens=16, seed=2, **WIDE
    )
    assert second.choices[0].message.content == texts[1]


def test_a_seed_below_zero_is_one_like_any_but_for_minus_one(server: Server) -> None:
    found = [
        {said(server, "abc", 24, seed=seed, logit_bias=ENDLESS, **WIDE) for _ in range(3)}
        for seed in (-2, -(2**63), -1)
    ]
    assert [len(texts) for texts in found] == [1, 1, 3]
    assert found[0] != found[1]


def test_stop_strings_end_a_text_before_them(server: Server) -> None:
    whole = said(server, "abc", 24)
    stop = whole[6:8]
    reply = server.client.completions.create(
        model="m", prompt="abc", max_tokens=24, temperature=0, stop=[stop]
    )
    assert reply.choices[0].text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_chances_are_those_of_the_model(server: Server) -> None:
    reply = server.client.chat.completions.create(
        model="m", messages=TALK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 5
    for entry in content:
        best = [t.logprob for t in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and len(best) == 3
        assert entry.logprob == best[0] and sum(np.exp(best)) <= 1
    plain = server.client.completions.create(model="m", prompt="ab", max_tokens=2, logprobs=2)
    assert [len(t) for t in plain.choices[0].logprobs.top_logprobs] == [2, 2]


def test_bias_and_penalties_reach_the_sampler(server: Server, alone: Loaded) -> None:
    forced = said(server, "abc", 4, logit_bias={"97": 100})
    assert forced == "aaaa" or forced == "\x80" * 4 or len(set(forced)) == 1
    penal = text_alone(alone, "aaaa", 12, frequency_penalty=1.5, presence_penalty=0.5)
    assert said(server, "aaaa", 12, frequency_penalty=1.5, presence_penalty=0.5) == penal


def test_a_text_goes_on_behind_an_end_token_where_that_is_asked_for(
    server: Server, alone: Loaded
) -> None:
    bias = {str(next(iter(alone.tokenizer.eos_ids))): 100}
    for ignored, finish, count in ((False, "stop", 1), (True, "length", 5)):
        reply = server.client.completions.create(
            model="any", prompt="abc", max_tokens=5, temperature=0, logit_bias=bias,
            extra_body={"ignore_eos": ignored},
        )  # fmt: skip
        assert reply.choices[0].finish_reason == finish
        assert reply.usage is not None and reply.usage.completion_tokens == count


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("wish", [{"off": True}, {"most": 8}])
def test_an_answer_follows_a_schema_with_drafts_and_without(
    server: Server, wish: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    texts = []
    for seed in range(3):
        reply = server.client.chat.completions.create(
            model="m", messages=TALK, max_tokens=200, temperature=0.8, seed=seed,
            response_format=form, extra_body={"speculative": wish},
        )  # fmt: skip
        assert reply.choices[0].finish_reason == "stop"
        texts.append(reply.choices[0].message.content)
        jsonschema.validate(json.loads(texts[-1]), SCHEMA)
    assert texts == FORMED.setdefault("texts", texts)


def test_of_a_tree_stays_what_the_grammar_permits(alone: Loaded) -> None:
    """Random trees, most of whose tokens may come next; the oracle follows each way by its mask."""
    vocabulary, r = alone.model.vocab_size, random.Random(1)
    grammars, seen = Grammars(alone.tokenizer, vocabulary), Counter[str]()
    for _ in range(30):
        draft, sound = Draft(), set[int]()
        for node in range(8):
            parent = r.choice([-1, *range(node)])
            token = r.randrange(vocabulary)
            if parent < 0 or parent in sound:
                form = grammars.json_schema(FLAG)
                for above in draft.path(parent):
                    form.accept(draft.tokens[above])
                may = np.isfinite(form.allow(np.zeros(vocabulary, np.float32)))
                token = int(r.choice(np.flatnonzero(may))) if r.random() < 0.8 else token
                sound |= {node} if may[token] else set()
            draft = Draft((*draft.tokens, token), (*draft.parents, parent))
        permitted = grammars.json_schema(FLAG).permitted(draft)
        assert permitted == draft.pruned(sound), (draft, sound)
        seen["cut"] += len(draft) - len(sound)
        seen["kept"] += len(sound)
        seen["branched"] += not permitted.is_chain
    assert min(seen.values()) > 10, seen


FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
FLAG["additionalProperties"] = False
FORMED: dict[str, list[str]] = {}  # what the first of the two said


def test_a_demanded_tool_is_called(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": FLAG}}
    asked: dict[str, Any] = {
        "model": "m", "messages": TALK, "tools": [tool], "tool_choice": "required",
        "max_tokens": 100, "seed": 5,
    }  # fmt: skip
    choice = server.client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0].function
    assert call.name == "f"
    jsonschema.validate(json.loads(call.arguments), FLAG)
    parts = list(server.client.chat.completions.create(**asked, stream=True))
    streamed = [c for p in parts for c in p.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in streamed][:2] == [(0, "f"), (0, None)]
    assert "".join(c.function.arguments for c in streamed) == call.arguments
    assert {p.choices[0].delta.content for p in parts} == {None}  # "" is a text to some clients
    words = server.client.chat.completions.create(model="m", messages=TALK, stream=True)
    assert next(iter(words)).choices[0].delta.content == ""
    history = [
        *TALK,
        {"role": "assistant", "tool_calls": [c.model_dump() for c in choice.message.tool_calls]},
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "done"},
    ]
    free = {**asked, "messages": history, "tool_choice": "auto", "max_tokens": 20}
    assert server.client.chat.completions.create(**free).choices[0].message is not None


def test_embeddings_have_length_one_whoever_else_asks(server: Server) -> None:
    texts = ["abc", "abcd", "something else"]
    reply = server.client.embeddings.create(model="m", input=texts)
    vectors = np.array([d.embedding for d in reply.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    alone = server.client.embeddings.create(model="m", input="abcd", encoding_format="float")
    assert np.array_equal(np.float32(alone.data[0].embedding), np.float32(vectors[1]))


def test_the_small_addresses(server: Server) -> None:
    get, post = (
        (lambda p: WEB.get(server.url + p)),
        (lambda p, b: WEB.post(server.url + p, json=b)),
    )
    assert server.client.models.list().data[0].id == "small"
    said(server, "a", 1)  # so that there is something to be counted
    assert get("/health").json()["status"] == "ok"
    assert 'ggraph_requests_total{path="/v1/completions",status="200"}' in get("/metrics").text
    assert "<title>ggraph</title>" in get("/").text
    tokens = post("/tokenize", {"content": "abc"}).json()["tokens"]
    assert post("/detokenize", {"tokens": tokens}).json() == {"content": "abc"}
    pieces = post("/tokenize", {"content": "aé", "with_pieces": True}).json()["tokens"]
    ids = post("/tokenize", {"content": "aé"}).json()["tokens"]
    assert [p["id"] for p in pieces] == ids
    assert [p["piece"] for p in pieces] == ["a", [0xC3], [0xA9]]  # a letter's halves as bytes


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/responses/x", "DELETE, GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_another_method_is_told_which_are_answered(
    server: Server, method: str, path: str, allowed: str
) -> None:
    """As HTTP wants it, and in words for who typed an address into a browser."""
    reply = WEB.request(method, server.url + path)
    assert reply.status_code == 405 and reply.headers["allow"] == allowed
    assert reply.json()["error"]["message"] == f"{path} answers {allowed}, not {method}"


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none"}}}
BEYOND = ", which exceeds the available context size of 512 (`ggraph serve -c` sets"
TWICE = [{"type": "function", "function": {"name": "f"}}] * 2
BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("/v1/completions", {"prompt": "a" * 5000}, 400, BEYOND),
    ("/v1/completions", {"prompt": "a" * 99999}, 400, BEYOND),
    ("/v1/completions", {"prompt": [1, 999]}, 400, "token id 999"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -2}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias: token 'x'"),
    ("/v1/completions", {"prompt": "a", "n": 60}, 400, "60 answers asked for"),
    ("/v1/completions", {"prompt": "a", "speculative": {"most": 65}}, 400, "speculative.most"),
    ("/v1/completions", {"prompt": "a", "speculative": {"drafters": ["head"]}}, 400, "no head"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": TALK, "temperature": 3}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": TALK, "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": TALK, "response_format": NO_SCHEMA}, 400, "schema"),
    ("/v1/chat/completions", {"messages": TALK, "tools": TWICE}, 400, "tools: 'f' is there twice"),
    ("/v1/embeddings", {"input": []}, 400, "the prompt is empty"),
    ("/v1/embeddings", {"input": 5}, 400, "input"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 404, "input"),
    ("/v1/responses", {"input": [{"type": "reasoning"}]}, 400, "expected a message"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function"}]}, 400, "tools.0"),
    ("/v1/responses", {"input": "a", "tools": [{"type": 5}]}, 400, "tools.0"),
    ("/v1/responses", {"input": "a", "previous_response_id": "x"}, 404, "no response 'x'"),
    ("/detokenize", {"tokens": [99999]}, 400, "token id 99999"),
    ("/nowhere", {}, 404, "no such address: /nowhere"),
    ("/chat/completions", {}, 404, "/chat/completions (is /v1/chat/completions meant?)"),
    ("/v1/v1/messages", {}, 404, "/v1/v1/messages (is /v1/messages meant?)"),
    ("//v1/responses", {}, 404, "//v1/responses (is /v1/responses meant?)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "says"), BAD, ids=[str(i) for i in range(len(BAD))]
)
def test_what_cannot_be_served_is_refused_in_one_line(
    server: Server, path: str, body: Any, status: int, says: str
) -> None:
    reply = WEB.post(server.url + path, json=body)
    message = reply.json()["error"]["message"]
    assert (reply.status_code, says in message, "\n" in message) == (status, True, False), message


def test_bodies_that_are_no_json_are_refused(server: Server) -> None:
    for raw in (b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000):
        reply = WEB.post(f"{server.url}/v1/completions", content=raw)
        assert reply.status_code == 400, raw[:20]
    big = WEB.post(f"{server.url}/tokenize", content=b" " * ((1 << 23) + 1))
    assert big.status_code == 413
    other = {"origin": "http://elsewhere.example"}
    assert WEB.post(f"{server.url}/tokenize", json={}, headers=other).status_code == 403


def test_a_mark_of_its_coding_is_no_part_of_a_body(server: Server) -> None:
    """Some programs on Windows begin UTF-8 so."""
    body = json.dumps({"content": "ä"}, ensure_ascii=False)
    asked = (WEB.post(f"{server.url}/tokenize", content=body.encode(c)) for c in CODINGS)
    marked, plain = (a.json() for a in asked)
    assert marked == plain != {"tokens": []}


def test_bodies_that_are_compressed_are_refused_by_name(server: Server) -> None:
    """What unpacks to a thousand times its size is not unpacked to find out."""
    url, body = f"{server.url}/tokenize", json.dumps({"content": "a"}).encode()
    for kind in ("gzip", "br", "zstd, gzip"):
        headers = {"content-encoding": kind}
        reply = WEB.post(url, content=gzip.compress(body), headers=headers)
        assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "identity")
        assert kind in reply.json()["error"]["message"]
    reply = WEB.post(url, content=body, headers={"content-encoding": "Identity"})
    assert reply.status_code == 200


def test_every_reply_has_a_name(server: Server) -> None:
    """By which clients tell of it, errors and streams among them."""
    made = server.client.responses.create(model="m", input="a", max_output_tokens=1)
    asked = {"prompt": "a", "max_tokens": 1, "stream": True}
    replies = [
        WEB.get(f"{server.url}/health"), WEB.get(f"{server.url}/nowhere"),
        WEB.get(f"{server.url}/v1/completions"), WEB.post(f"{server.url}/v1/completions"),
        WEB.post(f"{server.url}/v1/completions", json=asked),
        WEB.get(f"{server.url}/v1/models", headers={"origin": "https://example.org"}),
    ]  # fmt: skip
    assert [r.status_code for r in replies] == [200, 404, 405, 400, 200, 403]
    names = [made._request_id or "", *(r.headers["x-request-id"] for r in replies)]
    assert all(re.fullmatch("req_[0-9a-f]{32}", n) for n in names) and len(set(names)) == 7


def test_no_request_upsets_the_server_or_its_neighbour(server: Server) -> None:
    """A slice of what `python scripts/fuzz_serve.py` asks."""
    before, seen = said(server, "to be or not", 12), set[int]()
    for seed in range(120):
        path, raw = serve_fuzz.request(seed)
        reply = WEB.post(server.url + path, content=raw)
        seen.add(reply.status_code)
        assert not serve_fuzz.complaint(reply.status_code, reply.text), (path, raw[:300])
    assert said(server, "to be or not", 12) == before and {200, 400} <= seen


def test_a_connection_lasts_longer_than_clients_keep_it(server: Server) -> None:
    """Else a request may be on its way while the server hangs up, and is lost."""
    kept = httpx.Limits().keepalive_expiry  # as the `openai` client has it
    assert kept is not None
    seen: list[Any] = []
    with httpx.Client(limits=httpx.Limits(keepalive_expiry=60)) as web:
        for pause in (0.0, kept + 1):
            time.sleep(pause)
            reply = web.get(f"{server.url}/health")
            seen.append(reply.extensions["network_stream"].get_extra_info("client_addr"))
    assert seen[0] == seen[1]


def test_a_full_queue_says_when_to_come_again(server: Server) -> None:
    slow = {"prompt": "abc", "max_tokens": 400, "n": 16, "logit_bias": ENDLESS}
    with WEB.stream("POST", f"{server.url}/v1/completions", json={**slow, "stream": True}):
        reply = WEB.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
    until = time.monotonic() + 20
    while WEB.get(f"{server.url}/health").json()["open"] and time.monotonic() < until:
        time.sleep(0.05)
    assert said(server, "abc", 4)  # who left no longer takes room


def test_keys_are_asked_for(learnable: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    with served(learnable, "--api-key-file", str(tmp_path / "keys")) as running:
        with pytest.raises(openai.AuthenticationError):
            running.client.models.list()
        running.key = "second"
        assert running.client.models.list().data
        for header in ({"x-api-key": "first"}, {"authorization": "bearer first"}):
            assert WEB.get(f"{running.url}/v1/models", headers=header).status_code == 200
            wrong = {name: f"{key}x" for name, key in header.items()}
            assert WEB.get(f"{running.url}/v1/models", headers=wrong).status_code == 401
        assert WEB.get(f"{running.url}/health").status_code == 200
        assert WEB.get(f"{running.url}/metrics").status_code == 401


def test_a_server_may_call_its_model_otherwise(learnable: Path) -> None:
    """Wherever it names it."""
    with served(learnable, "--alias", "acme/Tiny 1") as running:
        client = running.client
        (listed,) = client.models.list().data
        assert listed.id == client.models.retrieve("acme/Tiny 1").id == "acme/Tiny 1"
        asked: dict[str, Any] = {"model": listed.id, "max_tokens": 1}
        hi: Any = [{"role": "user", "content": "Hi"}]
        named = [
            client.completions.create(prompt="a", **asked),
            *client.completions.create(prompt="a", stream=True, **asked),
            client.chat.completions.create(messages=hi, **asked),
            *client.chat.completions.create(messages=hi, stream=True, **asked),
            client.responses.create(model=listed.id, input="a", max_output_tokens=1),
            client.embeddings.create(model=listed.id, input="a"),
        ]
        assert {reply.model for reply in named} == {listed.id}


def test_the_first_signal_lets_answers_end(learnable: Path) -> None:
    running = started(learnable)
    stream = running.client.completions.create(
        model="m", prompt="abc", max_tokens=120, stream=True, logit_bias=ENDLESS
    )
    first = next(iter(stream))
    running.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert first.choices[0].finish_reason is None
    assert rest[-1].choices[0].finish_reason == "length"
    assert running.process.wait(30) == 0
