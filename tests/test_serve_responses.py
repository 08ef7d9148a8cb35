"""`/v1/responses` as the `openai` client sees it: events, tools, and what goes on from what."""

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
from serve_kit import FLAG, Server

from ggraph import GgraphError
from models.serve.conversations import Conversations, Kept, messages_of
from models.serve.messages import Message
from models.serve.replies import Whole
from models.serve.responses import Responses, Turn, output_of
from models.serve.schema import ResponsesRequest

TOOL: dict[str, Any] = {"type": "function", "name": "set", "parameters": FLAG, "strict": True}
ASKED: dict[str, Any] = {"model": "m", "max_output_tokens": 12, "temperature": 0}
CALLING: dict[str, Any] = {
    "model": "m", "input": "Set it.", "tools": [TOOL], "tool_choice": "required",
    "max_output_tokens": 100,
}  # fmt: skip


def kinds(events: list[Any]) -> list[str]:
    return [e.type.removeprefix("response.") for e in events]


def test_they_come_whole_and_in_events(server: Server) -> None:
    asked = {**ASKED, "input": "Hi", "instructions": "Be kind."}
    whole = server.client.responses.create(**asked)
    events = list(server.client.responses.create(**asked, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text != ""
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert whole.status == "incomplete" and whole.usage.output_tokens == 12
    found = [k for k in kinds(events) if k != "output_text.delta"]
    assert found == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip


def test_chances_are_those_of_a_chat(server: Server) -> None:
    """Whole and in events, of which each has those of its own tokens."""
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    asked = {"model": "m", "max_output_tokens": 12, "input": "Hi", "temperature": 1.5, **more}
    whole = server.client.responses.create(**asked, extra_body={"seed": 3})
    told = whole.output[0].content[0].logprobs
    chat = server.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, temperature=1.5,
        seed=3, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    assert [t.to_dict() for t in told] == [t.to_dict() for t in chat.choices[0].logprobs.content]
    assert len(told) == 12 and all(len(t.top_logprobs) == 3 for t in told)
    events = list(server.client.responses.create(**asked, stream=True, extra_body={"seed": 3}))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    (done,) = (e for e in events if e.type == "response.output_text.done")
    assert [t.token for e in deltas for t in e.logprobs] == [t.token for t in told]
    assert [t.logprob for t in done.logprobs] == [t.logprob for t in told]
    assert events[-1].response.output[0].content[0].logprobs == told
    plain = server.client.responses.create(**{**asked, "include": None, "top_logprobs": None})
    assert plain.output[0].content[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match=r"say message\.output_text\.logprobs"):
        server.client.responses.create(**{**asked, "include": []})


def test_a_tool_is_called_whole_and_in_events(server: Server) -> None:
    """The same call both ways, but for its id."""
    call = server.client.responses.create(**CALLING, extra_body={"seed": 5}).output[0]
    assert (call.type, call.name, call.status) == ("function_call", "set", "completed")
    jsonschema.validate(json.loads(call.arguments), FLAG)
    events = list(server.client.responses.create(**CALLING, stream=True, extra_body={"seed": 5}))
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    rest = [e for e in events if e not in deltas]
    assert kinds(rest) == [
        "created", "in_progress", "output_item.added", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[3 : 3 + len(deltas)] == deltas and len(deltas) > 3  # between begin and end
    assert "".join(e.delta for e in deltas) == rest[3].arguments == call.arguments
    done = events[-1].response.output[0]
    assert (done.name, done.arguments, done.call_id) == (
        "set",
        call.arguments,
        rest[4].item.call_id,
    )


def test_free_answers_beside_tools_come_whole_and_in_events(server: Server) -> None:
    free = {**CALLING, "tool_choice": "auto", "temperature": 1.0, "max_output_tokens": 40}
    for seed in range(4):
        more = {"seed": seed}
        whole = server.client.responses.create(**free, extra_body=more)
        events = list(server.client.responses.create(**free, stream=True, extra_body=more))
        shown = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert shown == whole.output_text == events[-1].response.output_text
        assert [i.type for i in whole.output] == [i.type for i in events[-1].response.output]


def test_a_response_goes_on_from_an_earlier_one(server: Server) -> None:
    """As if all had been sent again: words, and calls with their results."""
    create = server.client.responses.create
    first = create(**ASKED, input="Hi")
    second = create(**ASKED, input="And then?", previous_response_id=first.id)
    told: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == create(**ASKED, input=told).output_text
    assert second.usage.input_tokens_details.cached_tokens > 0
    call = create(**CALLING).output[0]
    asked = create(**CALLING)
    result = {"type": "function_call_output", "call_id": asked.output[0].call_id, "output": "done"}
    went_on = create(**ASKED, input=[result], previous_response_id=asked.id)
    again: list[Any] = [{"role": "user", "content": "Set it."}, call.to_dict(), result]
    assert call.arguments == asked.output[0].arguments
    assert went_on.output_text == create(**ASKED, input=again).output_text


CODEX: dict[str, Any] = {  # a second turn in the manner of an agent that has tools of all kinds
    "model": "m", "instructions": "You are an agent.", "tool_choice": "auto", "store": False,
    "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "stream": True,
    "text": {"verbosity": "medium"}, "max_output_tokens": 12, "temperature": 0,
    "tools": [
        {**TOOL, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Edit.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "mcp", "tools": [TOOL]},
        {"type": "local_shell"},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "w", "status": "completed",
         "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "function_call", "call_id": "f", "name": "set", "arguments": '{"on": true}'},
        {"type": "function_call_output", "call_id": "f", "output": "done"},
    ],
}  # fmt: skip


def test_an_agent_may_have_tools_that_are_no_functions(server: Server) -> None:
    """Its answer is that to the request without them."""
    plain = {**CODEX, "tools": [TOOL], "input": [*CODEX["input"][:2], *CODEX["input"][-2:]]}
    ends = []
    for body in (CODEX, plain):
        *_, end = server.client.responses.create(**body)
        assert end.type in ("response.completed", "response.incomplete")
        ends.append(end.response)
    assert ends[0].output_text == ends[1].output_text
    assert ends[0].usage.input_tokens == ends[1].usage.input_tokens
    assert [t.name for t in ends[0].tools] == ["set"]
    with pytest.raises(openai.BadRequestError, match="tool_choice names no tool"):
        server.client.responses.create(
            **{**CODEX, "tools": CODEX["tools"][1:], "tool_choice": "required"}
        )


def test_kept_responses_are_had_again_until_they_are_deleted(server: Server) -> None:
    client = server.client
    first = client.responses.create(**ASKED, input="Hi")
    events = list(client.responses.create(**ASKED, input="Hi", stream=True))
    for reply in (first, events[-1].response):
        assert client.responses.retrieve(reply.id).output_text == first.output_text
    client.responses.delete(first.id)
    unkept = client.responses.create(**ASKED, input="Hi", store=False)
    for gone in (first.id, unkept.id, "resp_nowhere"):
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="no response") as refused:
            client.responses.create(**ASKED, input="Hi", previous_response_id=gone)
        named = refused.value.param, refused.value.code
        assert named == ("previous_response_id", "previous_response_not_found")


def kept(text: str) -> Kept:
    return Kept(text.encode(), b"")


def test_what_was_used_longest_ago_goes_first() -> None:
    store = Conversations(most=2, size=10)
    store.keep("a", kept("aaaa"))
    store.keep("b", kept("bbbb"))
    store.find("a")
    store.keep("c", kept("cc"))
    assert store.find("a").response == b"aaaa"
    for gone in ("b", "nobody"):
        with pytest.raises(GgraphError, match="no response"):
            store.find(gone)
    store.drop("c")
    store.keep("d", kept("d" * 7))  # with "a" more than ten bytes
    assert store.find("d")
    with pytest.raises(GgraphError, match="no response"):
        store.find("a")
    store.keep("e", kept("e" * 11))
    with pytest.raises(GgraphError, match="no response"):
        store.find("e")


LONG = "\N{GRINNING FACE}" + "x" * 200_000  # which takes four bytes a letter in memory
LONG_TOOL = {"type": "function", "name": "f", "description": LONG}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": json.dumps([LONG])}
HOLDING: list[dict[str, Any]] = [  # what a request may hold, and a response does then
    {"input": LONG},
    {"input": "a", "instructions": LONG},
    {"input": "a", "tools": [LONG_TOOL], "tool_choice": "none"},
    {"input": "a", "tools": [{**TOOL, "parameters": {"type": "object", LONG: [LONG]}}]},
    {"input": [{"role": "user", "content": "a"}, CALLED]},
    {"input": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    {"input": [{"type": "function_call_output", "call_id": "a", "output": LONG}]},
    {"input": [{"role": "user", "content": "a"}] * 1000},
]


@pytest.mark.parametrize("holding", HOLDING, ids=range(len(HOLDING)))
def test_all_that_is_kept_is_counted(holding: dict[str, Any]) -> None:
    """Measured by what memory many take: no more than the bound of all, whatever they hold."""
    raw = json.dumps({"model": "m", **holding})
    store, bound = Conversations(most=256, size=1 << 20), 3 << 20
    answers: Any = SimpleNamespace(prompt_tokens=1)
    responses = Responses(SimpleNamespace(), store)  # type: ignore[arg-type]  # nothing is generated
    tracemalloc.start()
    try:
        for i in range(20):
            dialect: Any = SimpleNamespace(name=f"{i}", created=1, model="m")
            body = ResponsesRequest.model_validate_json(raw)
            turn = Turn(answers, dialect, body, said=tuple(messages_of(body.input)))
            a = Whole(text="yes", finish="stop", told=3)
            responses._finished(turn, a, output_of(turn, a))
        said = turn.said
        del body, turn, a
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < bound
    last = store.find("resp_19")
    assert json.loads(last.response)["id"] == "resp_19"
    assert last.messages == (*said, Message(role="assistant", content="yes"))


def test_items_become_messages() -> None:
    calls = [
        {"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in ("x", "y")
    ]
    results = [{"type": "function_call_output", "call_id": c, "output": c} for c in ("x", "y")]
    given = [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}, *calls]
    body = ResponsesRequest.model_validate({"input": [*given, *results]})
    found = messages_of(body.input)
    assert [m.role for m in found] == ["user", "assistant", "tool", "tool"]
    assert [c.id for c in found[1].tool_calls or ()] == ["x", "y"]
    assert [m.tool_call_id for m in found[2:]] == ["x", "y"]


def test_calls_side_by_side_may_be_as_many_as_items() -> None:
    calls = [{"type": "function_call", "call_id": str(i), "name": "f"} for i in range(1000)]
    given = [{"role": "assistant", "content": "a"}, *calls, {"role": "user", "content": "b"}]
    found = messages_of(ResponsesRequest.model_validate({"input": given}).input)
    assert [len(m.tool_calls or ()) for m in found] == [1000, 0]
    assert Kept.of({}, found).messages == tuple(found)
