"""`/completion`, `/apply-template`, `/embedding` and `/props`, for who comes from llama-server.

It is asked the same where it is installed (the extra [bench]).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serve_fuzz
from embedding_kit import encoder_folder
from serve_kit import FLAG, TALK, WEB, Server, events, served
from small_model import small_model

PATH = "/completion"
ASKED: dict[str, Any] = {"prompt": "abc", "n_predict": 12, "seed": 3}
WIDE = {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0}
NEAR = 0.01  # of logarithms of chances, by rounding
SYSTEM = [{"role": "system", "content": "Be short."}, *TALK]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    reply = WEB.post(url + path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(server: Server, **more: Any) -> Any:
    return post(server.url, PATH, {**ASKED, **more})


def refused(server: Server, body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    reply = WEB.post(server.url + path, json=body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc", [98], "c"], "a<|im_start|>b"])
@pytest.mark.parametrize("more", [{}, {**WIDE, "seed": 5}, {"stop": ["a", "e", " "], **WIDE}])
def test_it_says_what_completions_say(server: Server, prompt: Any, more: dict[str, Any]) -> None:
    """Of each prompt alone, with the tokens and chances that are told there."""
    found = said(server, prompt=prompt, n_probs=3, return_tokens=True, **more)
    found = found if isinstance(found, list) else [found]
    prompts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    assert [a["index"] for a in found] == list(range(len(prompts)))
    for answer, one in zip(found, prompts, strict=True):
        asked = {"prompt": one, "max_tokens": 12, "seed": 3, "logprobs": 3, "parse_special": True}
        plain = post(server.url, "/v1/completions", {**asked, **more})
        (choice,), used = plain["choices"], plain["usage"]
        assert answer["content"] == choice["text"]
        assert answer["tokens_evaluated"] == used["prompt_tokens"]
        assert answer["tokens_predicted"] == used["completion_tokens"]
        stopped = "word" if answer["stopping_word"] else "eos"
        end = stopped if choice["finish_reason"] == "stop" else "limit"
        assert (answer["stop"], answer["stop_type"]) == (True, end)
        told = answer["completion_probabilities"]
        assert [t["token"] for t in told] == choice["logprobs"]["tokens"]
        assert [t["logprob"] for t in told] == choice["logprobs"]["token_logprobs"]
        assert [len(t["top_logprobs"]) for t in told] == [3] * len(told)
        assert [t["id"] for t in told] == answer["tokens"]
        text = post(server.url, "/detokenize", {"tokens": answer["tokens"]})["content"]
        assert text.startswith(answer["content"]) or "\ufffd" in text or "<|" in text


@pytest.mark.parametrize("more", [{}, {"prompt": ["ab", "c"], "n_cmpl": 2}, {"n_probs": 2, **WIDE}])
def test_a_stream_says_what_the_reply_says(server: Server, more: dict[str, Any]) -> None:
    whole = said(server, **more, return_tokens=True)
    whole = whole if isinstance(whole, list) else [whole]
    reply = WEB.post(server.url + PATH, json={**ASKED, **more, "stream": True})
    told = [data for _, data in events(reply.text)]
    assert "[DONE]" not in reply.text
    for answer in whole:
        *own, last = [t for t in told if t["index"] == answer["index"]]
        assert [t["stop"] for t in own] == [False] * len(own) and last["stop"] is True
        assert "".join(t["content"] for t in own) == answer["content"]
        for name in ("tokens", "completion_probabilities"):
            assert [x for t in own for x in t.get(name, ())] == answer.get(name, [])
        for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "model", "truncated"):
            assert last[name] == answer[name]


def test_several_answers_are_drawn_with_seeds_of_their_own(server: Server) -> None:
    several = said(server, n_cmpl=3, seed=5, **WIDE)
    alone = [said(server, seed=5 + i, **WIDE)["content"] for i in range(3)]
    assert [a["content"] for a in several] == alone and len(set(alone)) == 3


def test_a_form_and_biases_have_the_names_of_llama_server(server: Server) -> None:
    """As a list of pairs, too, and `false` where a token is never to be said."""
    for more in ({"json_schema": FLAG}, {"json_schema": FLAG, "grammar": ""}):
        assert list(json.loads(said(server, **more, n_predict=30)["content"])) == ["on"]
    (best,) = said(server, n_predict=1, return_tokens=True, temperature=0)["tokens"]
    for never in ([[best, False]], [[str(best), False]], {str(best): False}, {str(best): -100}):
        (other,) = said(server, n_predict=1, return_tokens=True, temperature=0, logit_bias=never)[
            "tokens"
        ]
        assert other != best
    found = said(server, logit_bias=[[97, 100]], ignore_eos=True)
    assert found["content"] == "a" * ASKED["n_predict"]


def test_an_answer_ends_where_lines_are_less_indented(server: Server) -> None:
    line, letter = ([[i, 100]] for i in (10, 97))
    assert said(server, n_indent=1, logit_bias=letter, ignore_eos=True)["tokens_predicted"] == 12
    short = said(server, logit_bias=line, t_max_predict_ms=1, n_predict=100, ignore_eos=True)
    assert 0 < short["tokens_predicted"] < 100 and short["has_new_line"] is True


def test_fields_are_chosen(server: Server) -> None:
    found = said(server, response_fields=["content", "timings/prompt_n", "none"])
    assert list(found) == ["content", "timings/prompt_n"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": {"prompt_string": "a"}},
         "prompt: Input should be a valid string or a valid array"),
        ({"prompt": []}, "the prompt is empty"),
        ({"mirostat": 2}, "mirostat: this server cannot do that: leave it out, or say 0"),
        ({"dry_multiplier": 0.8},
         "dry_multiplier: this server cannot do that: leave it out, or say 0"),
        ({"typical_p": 0.5}, "typical_p: this server cannot do that: leave it out, or say 1"),
        ({"grammar": 'root ::= "a"'},
         "grammar: this server cannot do that: leave it out, and say json_schema"),
        ({"logit_bias": [["ab", 1]]}, "logit_bias: token 'ab', expected 0 to 319"),
        ({"logit_bias": [[97, 1, 2]]}, "logit_bias: Input should be an object"),
        ({"n_probs": 21}, "n_probs: Input should be less than or equal to 20"),
        ({"n_cmpl": 17}, "17 answers asked for, at most 16 may be"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(server: Server, body: dict[str, Any], says: str) -> None:
    error = refused(server, {**ASKED, **body})
    assert error["message"] == says
    assert error["param"] in (next(iter(body)), "n")


def test_defaults_of_what_is_not_here_are_let_through(server: Server) -> None:
    """Programs send all that they have a field for."""
    defaults = {
        "mirostat": 0, "typical_p": 1.0, "dynatemp_range": 0.0, "dry_multiplier": 0.0,
        "xtc_probability": 0.0, "post_sampling_probs": False, "lora": [], "grammar": "",
        "samplers": ["top_k"], "cache_prompt": True, "id_slot": -1, "n_keep": 0, "logit_bias": [],
        "json_schema": None, "stop": [], "t_max_predict_ms": 0,
    }  # fmt: skip
    assert said(server, **defaults)["content"] == said(server)["content"]


def test_what_is_too_long_is_refused_before_it_is_read(server: Server) -> None:
    for path, body in (
        (PATH, {"prompt": "a" * 40_000}),
        (PATH, {"prompt": [97] * 600}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a" * 40_000}]}),
    ):
        error = refused(server, body, path)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == next(iter(body))


TOOL = {"type": "function", "function": {"name": "f", "parameters": FLAG}}


@pytest.mark.parametrize(
    "more",
    [{}, {"messages": SYSTEM}, {"tools": [TOOL]}, {"add_generation_prompt": False,
     "continue_final_message": True, "messages": [*TALK, {"role": "assistant", "content": "ab"}]}],
    ids=["plain", "system", "tools", "goes on"],
)  # fmt: skip
def test_a_templated_prompt_is_that_of_the_conversation(
    server: Server, more: dict[str, Any]
) -> None:
    """Asked for as text, it is answered as the conversation is."""
    asked = {"messages": TALK, **more}
    prompt = post(server.url, "/apply-template", asked)["prompt"]
    text = said(server, prompt=prompt)
    limits = {"max_tokens": 12, "seed": 3, "tool_choice": "auto"}
    chat = post(server.url, "/v1/chat/completions", {**asked, **limits})
    assert text["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    if "tools" not in more:
        assert text["content"] == chat["choices"][0]["message"]["content"]


def test_markers_count_whoever_wrote_them(server: Server) -> None:
    """In text there is no telling; who wants those of users to be text says so, or has a chat."""
    asked = {"messages": [{"role": "user", "content": "a<|im_end|>b"}]}
    prompt = post(server.url, "/apply-template", asked)["prompt"]
    assert prompt.count("<|im_end|>") == 2
    text = said(server, prompt="a<|im_end|>b")["tokens_evaluated"]
    plain = said(server, prompt="a<|im_end|>b", parse_special=False)["tokens_evaluated"]
    assert (text, plain) == (3, 12)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def test_a_picture_is_no_text(server: Server) -> None:
    error = refused(
        server, {"messages": [{"role": "user", "content": [PICTURE]}]}, "/apply-template"
    )
    assert error["message"] == "messages: an image is no text: ask /v1/chat/completions"
    assert error["param"] == "messages"


BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def beginning(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    """A model whose prompts begin with a token, which its template writes, too."""
    changes: dict[str, Any] = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": BOS}
    if request.param == "sentencepiece":
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
        pieces += [chr(i) for i in range(33, 93)]
        changes |= {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None,
            "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": None,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 61],
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(61)],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }  # fmt: skip
    path = small_model(tmp_path_factory.mktemp("beginning") / "m.gguf", changes)
    with served(path, "--parallel", "2") as running:
        yield running


def test_what_prompts_begin_with_is_there_once(beginning: Server) -> None:
    """Whether a template wrote it or nobody did."""
    prompt = post(beginning.url, "/apply-template", {"messages": TALK})["prompt"]
    bos = WEB.get(f"{beginning.url}/props").json()["bos_token"]
    assert bos and prompt.startswith(f"{bos}[user]")
    text = said(beginning, prompt=prompt)
    chat = post(
        beginning.url, "/v1/chat/completions", {"messages": TALK, "max_tokens": 12, "seed": 3}
    )
    assert text["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    assert text["content"] == chat["choices"][0]["message"]["content"]
    plain = said(beginning, prompt="AB")
    assert plain["tokens_evaluated"] == said(beginning, prompt=f"{bos}AB")["tokens_evaluated"]


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_vectors_are_those_of_the_other_form(server: Server, path: str) -> None:
    """In lists of one."""
    for given in ("ab", [97, 98], ["ab", "c"], [[97, 98], [99]]):
        plain = post(server.url, "/v1/embeddings", {"input": given})["data"]
        wanted = [{"index": d["index"], "embedding": [d["embedding"]]} for d in plain]
        for name in ("content", "input"):
            assert post(server.url, path, {name: given, "embd_normalize": 2}) == wanted
    error = refused(server, {"content": "ab", "embd_normalize": -1}, path)
    assert error["message"] == "embd_normalize: this server cannot do that: leave it out, or say 2"
    assert refused(server, {"content": [[]] * 300}, path)["param"] == "content"
    assert refused(server, {}, path)["param"] == "content"


def test_properties_tell_what_is_known(server: Server) -> None:
    found = WEB.get(f"{server.url}/props").json()
    listed = server.client.models.list().data[0].to_dict()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == listed["meta"]["context_length"]
    assert (found["model_alias"], found["total_slots"]) == (listed["id"], 16)
    assert found["model_path"] == server.path.name
    assert found["modalities"] == {"vision": False, "audio": False}
    assert (found["bos_token"], found["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "m.content" in found["chat_template"]
    assert (
        said(server, **settings["params"] | {"n_predict": 12})["content"]
        == (said(server)["content"])
    )


def test_an_encoder_tells_what_it_is(tmp_path: Path) -> None:
    encoder_folder("bert", tmp_path / "bert")
    with served(tmp_path / "bert") as running:
        found = WEB.get(f"{running.url}/props").json()
        assert set(found["default_generation_settings"]) == {"n_ctx"}
        for path in (PATH, "/apply-template"):
            assert "is an encoder" in refused(running, {"prompt": "a"}, path)["message"]


@pytest.mark.parametrize("path", [PATH, "/apply-template"])
def test_unsound_requests_are_refused_in_words(server: Server, path: str) -> None:
    """A slice of what `python scripts/fuzz_serve.py` asks."""
    statuses = set()
    for seed in range(120):
        _, raw = serve_fuzz.request(seed, path)
        reply = WEB.post(server.url + path, content=raw)
        statuses.add(reply.status_code)
        assert not serve_fuzz.complaint(reply.status_code, reply.text), raw[:300]
    assert statuses == {200, 400}


def peer_params(learnable: Path) -> Any:
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(learnable), 512, 2
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return params


@pytest.fixture(scope="module")
def peer(learnable: Path) -> Iterator[str]:
    """The address of llama-server with the same model."""
    running = pytest.importorskip("xllamacpp").Server(peer_params(learnable))
    yield running.listening_address
    del running


SAME = (
    "index", "content", "tokens", "stop", "tokens_predicted", "tokens_evaluated", "truncated",
    "has_new_line", "stop_type", "stopping_word",
)  # fmt: skip
# It tells of no letter that has begun, and of no chances in one
LETTERS = {str(i): -100 for i in range(128, 320)}
END = 257


@pytest.mark.parametrize("more", [
    {}, {"prompt": ["abc", [100, 101], "b"]}, {"stop": ["c", "d", "e", "A"]},
    {"prompt": "a<|im_end|>b"}, {"ignore_eos": True},
    {"logit_bias": [[97, False], [98, 5], *([int(i), False] for i in LETTERS)]},
    {"logit_bias": [[10, 100]]}, {"logit_bias": {str(END): 100}},
])  # fmt: skip
def test_llama_server_says_the_same(server: Server, peer: str, more: dict[str, Any]) -> None:
    """But for the end token, which is none of ours that are told."""
    sampling = {"temperature": 0, "n_probs": 2, "return_tokens": True, "logit_bias": LETTERS}
    asked = {**ASKED, **sampling, **more}
    ours, theirs = (as_list(post(u, PATH, asked)) for u in (server.url, peer))
    for mine, other in zip(ours, theirs, strict=True):
        other["tokens"] = [t for t in other["tokens"] if t != END]
        assert {k: mine[k] for k in SAME} == {k: other[k] for k in SAME}
        assert set(mine) <= {*other, "completion_probabilities"}
        assert set(mine["timings"]) == set(other["timings"])
        chances = other.get("completion_probabilities", [])
        for a, b in zip(mine["completion_probabilities"], chances, strict=False):
            assert set(a) == set(b) and a["id"] == b["id"]
            assert [t["id"] for t in a["top_logprobs"]] == [t["id"] for t in b["top_logprobs"]]
            assert np.isclose(a["logprob"], b["logprob"], atol=NEAR)
    streams = [WEB.post(u + PATH, json={**asked, "stream": True}).text for u in (server.url, peer)]
    told = [[data for _, data in events(text) if data] for text in streams]
    for index in range(len(ours)):
        one, two = ([e for e in t if e["index"] == index] for t in told)
        assert "".join(e["content"] for e in one) == "".join(e["content"] for e in two)
        ids = [[t for e in events for t in e.get("tokens", ())] for events in (one, two)]
        assert ids[0] == [t for t in ids[1] if t != END]
        assert all(set(a) <= set(b) for a, b in zip(one[-1:], two[-1:], strict=True))


def as_list(answers: Any) -> list[Any]:
    return answers if isinstance(answers, list) else [answers]


def test_llama_server_writes_the_same_prompt(server: Server, peer: str) -> None:
    for messages in (TALK, SYSTEM, [*SYSTEM, {"role": "assistant", "content": "a"}, *TALK]):
        asked = {"messages": messages}
        assert post(server.url, "/apply-template", asked) == post(peer, "/apply-template", asked)


def test_llama_server_makes_the_same_vectors(server: Server, learnable: Path) -> None:
    """Pooled as ours are where a model's files say nothing, one text at a time: of two in a step it
    gives the first another vector than alone."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = peer_params(learnable)
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    running = xllamacpp.Server(params)
    for path in ("/embedding", "/embeddings"):
        for asked in ({"content": ["abc"]}, {"content": "d"}, {"input": [97, 98]}):
            ours, theirs = (post(u, path, asked) for u in (server.url, running.listening_address))
            for mine, other in zip(ours, theirs, strict=True):
                assert set(mine) == set(other) and mine["index"] == other["index"]
                assert np.allclose(mine["embedding"], other["embedding"], atol=1e-4)


def test_llama_server_has_the_same_properties(server: Server, peer: str) -> None:
    """By name, and where both count alike by value."""
    ours, theirs = (WEB.get(f"{u}/props").json() for u in (server.url, peer))
    for mine, other in (
        (ours, theirs),
        *((d["default_generation_settings"], e["default_generation_settings"])
          for d, e in [(ours, theirs)]),
    ):  # fmt: skip
        assert set(mine) <= set(other)
    mine, other = (p["default_generation_settings"]["params"] for p in (ours, theirs))
    assert set(mine) <= set(other)
    assert mine == pytest.approx({k: other[k] for k in mine})
    assert (ours["bos_token"], ours["eos_token"]) == (theirs["bos_token"], theirs["eos_token"])
