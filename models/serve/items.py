"""What a response's request is made of: items of its input, functions, and forms of its text."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from .fields import MOST_LIST, Body, Effort, LongText, OrNull, items, kind_of
from .messages import EITHER, Function, Part


class MessageItem(Body):
    """One item of a response's input: a message."""

    type: OrNull[Literal["message"]] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: LongText | Annotated[list[Part], items(MOST_LIST)]


class CallItem(Body):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: Annotated[str, Field(max_length=256)]
    arguments: OrNull[LongText] = ""


class ResultItem(Body):
    """What a called function gave back."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)] | None = None
    output: LongText | Annotated[list[Part], items(MOST_LIST)]


class ReferenceItem(Body):
    """An item of a response that is kept, of its output or of what it has read, by its id."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=256)]


PassedType = Literal[
    "reasoning", "custom_tool_call", "custom_tool_call_output", "web_search_call",
    "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call",
    "shell_call_output", "apply_patch_call", "apply_patch_call_output", "tool_search_call",
    "tool_search_output", "mcp_list_tools", "mcp_call",
]  # fmt: skip


class PassedItem(Body):
    """Thoughts of an earlier response, and what was done with tools that are no functions. They are
    passed over: another model did it, as this server offers none such."""

    type: PassedType


def _kind_of_item(item: Any) -> str:
    """The form of an item, whose type a message need not name; as no field is (`errors.FORM`)."""
    found = "message" if (kind := kind_of(item)) is None else kind
    passed = found in get_args(PassedType)
    return "Passed" if passed else found.title() if isinstance(found, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Function_Call")]
    | Annotated[ResultItem, Tag("Function_Call_Output")]
    | Annotated[ReferenceItem, Tag("Item_Reference")]
    | Annotated[PassedItem, Tag("Passed")],
    Discriminator(
        _kind_of_item,
        custom_error_type="kind",
        custom_error_message="the type of an item: expected message, function_call,"
        " function_call_output, item_reference or reasoning",
    ),
]


class FlatTool(Function):
    """A function as `/v1/responses` is told of it."""

    type: Literal["function"]


class FlatChoice(Body):
    """One function that must be called."""

    type: Literal["function"]
    name: Annotated[str, Field(max_length=256)]


class FlatAllowed(Body):
    """Those that may be called of the functions that the model is told of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], items(128, least=1)]


EitherFlat = Annotated[
    Annotated[FlatChoice, Tag("Named")] | Annotated[FlatAllowed, Tag("Allowed")], EITHER
]


class TextFormat(Body):
    """The form of a response's text."""

    type: OrNull[Literal["text", "json_object", "json_schema"]] = "text"
    name: OrNull[Annotated[str, Field(max_length=256)]] = "answer"
    schema_: Annotated[OrNull[dict[str, Any]], Field(alias="schema")] = Field(default_factory=dict)
    description: LongText | None = None
    strict: bool | None = None


class Reasoning(Body):
    """How much a model is to think, where its template can say so."""

    effort: Effort | None = None


class ResponseText(Body):
    """Options of a response's text."""

    format: OrNull[TextFormat] = TextFormat()
