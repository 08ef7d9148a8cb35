"""Images over HTTP: OpenAI's content parts, its newer API's, and Anthropic's blocks."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from image_kit import NAMES, client, made
from small_model import small_model
from starlette.testclient import TestClient
from test_images import png

from ggraph.decode.given import first_given
from models.serve.messages import Message, images_of
from models.serve.notations import HERMES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ONE, OTHER = png(30, 20, shade=9), png(30, 20, shade=200)


@pytest.fixture(scope="module", params=NAMES)
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, Any]]:
    """A server of a model that sees, and its service."""
    root = made(tmp_path_factory.mktemp("images"))
    with client({"path": root / request.param}) as found:
        yield found


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def answer(web: TestClient, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, **more}
    reply = web.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(reply: dict[str, Any]) -> str:
    return reply["choices"][0]["message"]["content"]


def test_all_forms_show_the_same_image(asked: tuple[TestClient, Any]) -> None:
    """And get the answer that Python's door gets, streamed or not."""
    web, service = asked
    assert web.get("/props").json()["modalities"]["vision"] is True
    first = answer(web, user(part(ONE), text("What?")))
    ids = service.m.prompt_ids("What?", images=[ONE])
    assert first["usage"]["prompt_tokens"] == len(ids)
    shown = {"type": "input_image", "image_url": url(ONE)}
    response = web.post(RESPONSES, json={
        "input": user(shown, {"type": "input_text", "text": "What?"}),
        "max_output_tokens": 12, "temperature": 0,
    }).json()  # fmt: skip
    source = {"type": "base64", "media_type": "image/png", "data": url(ONE).split(",")[1]}
    message = web.post(MESSAGES, json={
        "messages": user({"type": "image", "source": source}, text("What?")),
        "max_tokens": 12, "temperature": 0,
    }).json()  # fmt: skip
    assert response["output"][0]["content"][0]["text"] == said(first)
    assert message["content"][0]["text"] == said(first)
    streamed = web.post(CHAT, json={
        "messages": user(part(ONE), text("What?")), "max_tokens": 12, "temperature": 0,
        "stream": True,
    }).text  # fmt: skip
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(d["choices"][0]["delta"].get("content") or "" for d in deltas) == said(first)


def test_another_image_is_another_question(asked: tuple[TestClient, Any]) -> None:
    """And the same one is not read again, in a later turn either: its rows are in the cache."""
    web, service = asked
    one, other = (answer(web, user(part(i), text("What?"))) for i in (ONE, OTHER))
    assert said(one) != said(other)
    read, reused = service.m.eye.read, service.batch.counters.reused
    turns = [*user(part(ONE), text("What?")), {"role": "assistant", "content": said(one)}]
    answer(web, [*turns, *user(text("And?"))])
    assert service.m.eye.read == read
    known = service.m.prompt_ids("What?", images=[ONE])
    least = 0 if service.m.model.recurrent else first_given(known) + 8
    assert service.batch.counters.reused - reused >= least
    both = answer(web, user(text("a"), part(ONE), text("b"), part(OTHER)))
    swapped = answer(web, user(text("a"), part(OTHER), text("b"), part(ONE)))
    assert said(both) != said(swapped)


def test_drafts_and_neighbours_change_nothing(asked: tuple[TestClient, Any]) -> None:
    web, _ = asked
    question = user(part(ONE), text("What?"))
    alone = said(answer(web, question, max_tokens=40))
    for how in ({"most": 8, "drafters": ["suffix"]}, {"most": 4, "drafters": ["lookup"]}):
        assert said(answer(web, question, max_tokens=40, speculative=how)) == alone
    several = answer(web, question, max_tokens=40, n=3)
    assert [c["message"]["content"] for c in several["choices"]] == [alone] * 3


def test_a_smaller_model_that_sees_nothing_may_draft(asked: tuple[TestClient, Any]) -> None:
    """It reads an image's rows as the last of its tokens: guesses differ, answers do not."""
    web, service = asked
    if service.m.model.recurrent:
        pytest.skip("such a model drafts for one text at a time")
    question = user(part(ONE), text("What?"))
    alone = said(answer(web, question, max_tokens=40))
    path = Path(service.m.model.checkpoint.path)
    with client({"path": path}, smaller=path, draft=4) as (other, _):
        reply = answer(other, question, max_tokens=40, speculative={"drafters": ["model"]})
    details = reply["usage"]["completion_tokens_details"]
    assert said(reply) == alone
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0


def test_penalties_and_forms_hold_behind_images(asked: tuple[TestClient, Any]) -> None:
    """The image's tokens count as text; a grammar never sees them."""
    web, _ = asked
    question = user(part(ONE), text("What?"))
    answer(web, question, repeat_penalty=1.5, presence_penalty=0.5)
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    reply = said(answer(web, question, response_format=form, max_tokens=40))
    assert isinstance(json.loads(reply)["on"], bool)


def test_responses_go_on_with_images(asked: tuple[TestClient, Any]) -> None:
    """A kept response keeps its images, and shows them to who asks."""
    web, _ = asked
    shown = {"type": "input_image", "image_url": url(ONE)}
    how = {"max_output_tokens": 8, "temperature": 0}
    first = web.post(RESPONSES, json={"input": user(shown), **how}).json()
    listed = web.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert listed[0]["content"][0] == shown
    went_on = web.post(RESPONSES, json={
        "input": "And?", "previous_response_id": first["id"], **how,
    }).json()  # fmt: skip
    turns = [*user(part(ONE)), {"role": "assistant",
                                "content": first["output"][0]["content"][0]["text"]}]  # fmt: skip
    whole = answer(web, [*turns, *user(text("And?"))], max_tokens=8)
    assert went_on["output"][0]["content"][0]["text"] == said(whole)
    assert went_on["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]


def test_tokens_are_counted_without_reading_an_image(asked: tuple[TestClient, Any]) -> None:
    web, service = asked
    new, read = png(31, 17, shade=55), service.m.eye.read
    source = {"type": "base64", "media_type": "image/png", "data": url(new).split(",")[1]}
    body = {"messages": user({"type": "image", "source": source}, text("What?"))}
    count = web.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"]
    assert service.m.eye.read == read
    assert count == len(service.m.prompt_ids("What?", images=[new]))
    assert service.m.eye.read > read


def test_blocks_side_by_side_are_lines(asked: tuple[TestClient, Any]) -> None:
    """Anthropic's, where an image is between them, too."""
    web, _ = asked
    source = {"type": "base64", "media_type": "image/png", "data": url(ONE).split(",")[1]}
    image = {"type": "image", "source": source}
    how = {"max_tokens": 8, "temperature": 0}
    apart = web.post(MESSAGES, json={
        "messages": user(text("a"), text("b"), image, text("c"), text("d")), **how,
    }).json()  # fmt: skip
    whole = answer(web, user(text("a\nb"), part(ONE), text("c\nd")), max_tokens=8)
    assert apart["content"][0]["text"] == said(whole)
    used = apart["usage"]
    read = used["input_tokens"] + used["cache_read_input_tokens"]
    assert read == whole["usage"]["prompt_tokens"]


def test_functions_give_images_back(asked: tuple[TestClient, Any]) -> None:
    """In all forms; models whose templates know no tools are shown them as the user's, in one turn
    with what is said then."""
    web, _ = asked
    function = {"name": "look", "arguments": "{}"}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": [text("seen:"), part(ONE)]}
    asks = [*user(text("Look.")), called, result]
    told = answer(web, asks, max_tokens=8)
    source = {"type": "base64", "media_type": "image/png", "data": url(ONE).split(",")[1]}
    block = {"type": "tool_result", "tool_use_id": "c",
             "content": [text("seen:"), {"type": "image", "source": source}]}  # fmt: skip
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [*user(text("Look.")), {"role": "assistant", "content": [use]}]
    how = {"temperature": 0, "max_tokens": 8}
    message = web.post(MESSAGES, json={"messages": [*turns, *user(block)], **how}).json()
    assert message["content"][0]["text"] == said(told)
    shown = {"type": "input_image", "image_url": url(ONE)}
    output = [{"type": "input_text", "text": "seen:"}, shown]
    given = [*user(text("Look.")), {"type": "function_call", "call_id": "c", **function},
             {"type": "function_call_output", "call_id": "c", "output": output}]  # fmt: skip
    response = web.post(RESPONSES, json={"input": given, "temperature": 0, "max_output_tokens": 8})
    assert response.json()["output"][0]["content"][0]["text"] == said(told)
    listed = web.get(f"{RESPONSES}/{response.json()['id']}/input_items?order=asc").json()["data"]
    assert listed[2]["output"] == [shown, {"type": "input_text", "text": "seen:"}]
    again = [*turns, *user(block, text("What?"))]
    behind = web.post(MESSAGES, json={"messages": again, **how}).json()
    wanted = answer(web, [*asks, *user(text("What?"))], max_tokens=8)
    assert behind["content"][0]["text"] == said(wanted)
    written = HERMES.written([("look", {})])
    plain = answer(web, [
        *user(text("Look.")), {"role": "assistant", "content": written},
        *user(text("<tool_response>seen:"), part(ONE), text("</tool_response>\nWhat?")),
    ], max_tokens=8)  # fmt: skip
    assert said(plain) == said(wanted)
    assert plain["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]


ELSEWHERE = "expected a data: URL with the image itself: this server fetches no addresses"
WRONG: list[tuple[str, Any, str]] = [
    (CHAT, user({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}), ELSEWHERE),
    (CHAT, user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), ELSEWHERE),
    (MESSAGES, user({"type": "image", "source": {"type": "url", "url": "https://a.example/"}}),
     ELSEWHERE),
    (CHAT, user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
     "an image's data: URL: expected base64"),
    (CHAT, user({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}),
     "an image's data: URL: expected base64"),
    (CHAT, user(part(b"no image")), "no image (PNG, JPEG, WEBP, GIF, BMP): cannot identify"),
    (CHAT, user({"type": "image_url"}), "image_url: Input should be"),
    (CHAT, user({"type": "image_url", "image_url": {}}), "url: Field required"),
    (MESSAGES, user({"type": "image", "source": {"type": "file", "file_id": "f"}}), ELSEWHERE),
    (CHAT, [{"role": "system", "content": [part(ONE)]}, *user(text("a"))],
     "an image in a message of the system: expected the user's or a tool's"),
    (CHAT, [*user(text("a")), {"role": "assistant", "content": [part(ONE)]}, *user(text("a"))],
     "an image in a message of the assistant: expected the user's or a tool's"),
    (CHAT, user(*[part(ONE)] * 100), "tokens, but the context holds 512 (-c sets another)"),
    (CHAT, user({"type": "input_audio", "input_audio": {}}),
     "this model reads text and images, expected 'text'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "messages", "match"), WRONG)
def test_what_cannot_be_shown_is_refused(
    path: str, messages: Any, match: str, asked: tuple[TestClient, Any]
) -> None:
    web, service = asked
    read = service.m.eye.read
    reply = web.post(path, json={"messages": messages, "max_tokens": 4})
    assert reply.status_code == 400 and match in reply.json()["error"]["message"], reply.text
    assert service.m.eye.read == read


def test_a_model_that_reads_text_only_says_so(tmp_path: Path) -> None:
    small = small_model(tmp_path / "small.gguf")
    with client({"path": small}) as (web, _):
        reply = web.post(CHAT, json={"messages": user(part(ONE), text("What?"))})
    assert reply.status_code == 400
    assert "reads text only: it has no tower for images" in reply.json()["error"]["message"]


def test_messages_with_images_go_through_json() -> None:
    """As kept ones do."""
    m = Message(role="user", content=[part(ONE), text("a")])
    again = Message.model_validate_json(m.model_dump_json())
    assert images_of([again]) == [ONE] and again.shown == [{"type": "image"}, text("a")]


def test_the_openai_client_shows_images(asked: tuple[TestClient, Any]) -> None:
    web, _ = asked
    own = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=web)
    reply = own.chat.completions.create(
        model="m", messages=user(part(ONE), text("What?")), max_tokens=12, temperature=0
    )
    assert reply.choices[0].message.content == said(answer(web, user(part(ONE), text("What?"))))
