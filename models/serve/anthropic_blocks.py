"""What a request to `/v1/messages` is made of: turns of blocks, functions, and options."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .fields import (
    MOST_LIST,
    Body,
    Effort,
    LongText,
    OrNull,
    Stop,
    items,
    kind_of,
    of_types,
    only,
)
from .messages import CalledFunction, FunctionName, ImagePart, Message, Part, TextPart, ToolCall
from .schema import PLAIN_TEXT, Limit, Sampling

Name = Annotated[str, Field(max_length=256)]


class ThoughtBlock(Body):
    """What the assistant thought; whether it is signed says nothing here."""

    type: Literal["thinking"]
    thinking: LongText


class UseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ResultBlock(Body):
    """What a called function gave back."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: OrNull[LongText | Annotated[list[Part], items(MOST_LIST)]] = ""


PassedType = Literal[
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result",
]  # fmt: skip


class PassedBlock(Body):
    """What was done with tools of another server's, and thoughts that it alone can read."""

    type: PassedType


_TAGS = {"image": "Image", "thinking": "Thought", "tool_use": "Use", "tool_result": "Result"}
_TAGS |= dict.fromkeys(get_args(PassedType), "Passed")


def _kind_of_block(block: Any) -> str:
    """The form of a block; one that is not known, such as a document, is refused as no text."""
    kind = kind_of(block)
    return _TAGS.get(kind, "Text") if isinstance(kind, str) else "Text"


Block = Annotated[
    Annotated[TextPart, Tag("Text")]
    | Annotated[ImagePart, Tag("Image")]
    | Annotated[ThoughtBlock, Tag("Thought")]
    | Annotated[UseBlock, Tag("Use")]
    | Annotated[ResultBlock, Tag("Result")]
    | Annotated[PassedBlock, Tag("Passed")],
    Discriminator(_kind_of_block),
]


class Turn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: LongText | Annotated[list[Block], items(MOST_LIST)]

    @property
    def blocks(self) -> list[Block]:
        """Its blocks; a text is one."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content


class Schema(Body):
    """The schema of arguments, which are an object."""

    type: Literal["object"]


def _of_an_object(schema: Any) -> Any:
    Schema.model_validate(schema)
    return schema


class ClientTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: LongText | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(_of_an_object)]


class Chosen(Body):
    """Which functions may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: OrNull[bool] = False


class Thinking(Body):
    """Whether the model is to think, where its template can say so."""

    type: Annotated[str, Field(max_length=64)]


class OutputFormat(Body):
    """The form of an answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How hard the model is to think, and what its text looks like."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesRequest(Sampling):
    """POST /v1/messages. Beside Anthropic's fields, those that all requests here have."""

    messages: Annotated[list[Turn], items(MOST_LIST, least=1)]
    system: LongText | Annotated[list[TextPart], items(MOST_LIST)] | None = None
    max_tokens: Limit = None
    stop_sequences: Annotated[list[Stop], items(16)] | None = None
    tools: Annotated[Annotated[list[ClientTool], items(128)] | None, of_types("custom")] = None
    tool_choice: Chosen | None = None
    thinking: Thinking | None = None
    output_config: OrNull[OutputConfig] = OutputConfig()
    stop: Annotated[Any, only([], instead="stop_sequences")] = None
    response_format: Annotated[Any, only(PLAIN_TEXT, instead="output_config.format")] = None
    n: Annotated[Any, only(1)] = None
    container: Annotated[Any, only()] = None
    mcp_servers: Annotated[Any, only([])] = None


def conversation(body: MessagesRequest) -> list[Message]:
    """The messages of a request. Texts side by side are lines, as their blocks stand apart; turns
    of one role in a row are one turn. Made without a check: what they are of was checked."""
    told = body.system if isinstance(body.system, str) else _lines(body.system or ())
    found = [Message.model_construct(role="system", content=told)] if told else []
    for role, blocks in _together(body.messages):
        found += [_answered(blocks)] if role == "assistant" else _asked(role, blocks)
    return found


def _together(turns: Sequence[Turn]) -> Iterator[tuple[str, list[Block]]]:
    for role, in_a_row in groupby(turns, lambda turn: turn.role):
        yield role, [block for turn in in_a_row for block in turn.blocks]


def _lines(blocks: Sequence[Block]) -> str:
    return "\n".join(b.text for b in blocks if isinstance(b, TextPart))


def _answered(blocks: Sequence[Block]) -> Message:
    """A turn of the assistant."""
    thoughts = "\n".join(b.thinking for b in blocks if isinstance(b, ThoughtBlock))
    calls = [
        ToolCall.model_construct(id=b.id, function=_called(b))
        for b in blocks
        if isinstance(b, UseBlock)
    ]
    return Message.model_construct(
        role="assistant", content=_lines(blocks), tool_calls=calls or None,
        reasoning_content=thoughts or None,
    )  # fmt: skip


def _called(b: UseBlock) -> CalledFunction:
    return CalledFunction.model_construct(name=b.name, arguments=json.dumps(b.input))


def _asked(role: str, blocks: Sequence[Block]) -> list[Message]:
    """A turn of somebody else: what functions gave back, and then what is said."""
    results = (b for b in blocks if isinstance(b, ResultBlock))
    found = []
    for r in results:
        given, id = r.content if isinstance(r.content, str) else _shown(r.content), r.tool_use_id
        found.append(Message.model_construct(role="tool", content=given, tool_call_id=id))
    seen = [b for b in blocks if isinstance(b, TextPart | ImagePart)]
    if not found or seen:
        found.append(Message.model_construct(role=role, content=_shown(seen)))
    return found


def _shown(seen: Sequence[Part]) -> str | list[Part]:
    """Texts and images in order, those side by side as lines; one text where there is nothing
    else."""
    if not any(isinstance(b, ImagePart) for b in seen):
        return _lines(seen)
    found = list[Part]()
    for b in seen:
        last = found[-1] if found else None
        if isinstance(b, TextPart) and isinstance(last, TextPart):
            found[-1] = TextPart(type="text", text=f"{last.text}\n{b.text}")
        else:
            found.append(b)
    return found
