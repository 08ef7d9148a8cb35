"""What conversations are made of: messages, calls of functions, and the functions."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from .fields import MOST_LIST, Body, LongText, OrNull, items, kind_of, only, readable


class TextPart(Body):
    """A part of a message. Only text can be read; a refusal is some."""

    type: Annotated[
        Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(readable)
    ]
    text: Annotated[LongText, Field(validation_alias=AliasChoices("text", "refusal"))]


class CalledFunction(Body):
    """Name and arguments of a call, the arguments as JSON."""

    name: Annotated[str, Field(max_length=256)]
    arguments: OrNull[LongText] = ""


class ToolCall(Body):
    """A call that an assistant made."""

    id: OrNull[Annotated[str, Field(max_length=256)]] = ""
    type: OrNull[Literal["function"]] = "function"
    function: CalledFunction


# vLLM, Groq and OpenRouter call it `reasoning`
Thought = Annotated[
    LongText | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
]


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: LongText | Annotated[list[TextPart], items(MOST_LIST)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], items(MOST_LIST)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Thought = None
    function_call: Annotated[Any, only()] = None  # what was before `tool_calls`

    @property
    def is_text(self) -> bool:
        """Whether it is text, and nothing else."""
        return bool(self.text) and not self.tool_calls

    @property
    def thought(self) -> dict[str, str]:
        """What the assistant said that was not for the user, by the names that templates have for
        it. Some refuse it beside both text and calls."""
        names = ["reasoning_content"] + ["thinking"] * (not self.text or not self.tool_calls)
        return dict.fromkeys(names, self.reasoning_content) if self.reasoning_content else {}

    @property
    def text(self) -> str:
        """All its text."""
        if isinstance(self.content, list):
            return "".join(p.text for p in self.content)
        return self.content or ""


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: LongText | None = None
    parameters: OrNull[dict[str, Any]] = Field(default_factory=dict)


class Tool(Body):
    """A tool: only functions."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name alone."""

    name: Annotated[str, Field(max_length=256)]


class ToolChoice(Body):
    """One function that must be called."""

    type: Literal["function"]
    function: NamedFunction

    @staticmethod
    def of(name: str) -> "ToolChoice":
        """The one of this name."""
        return ToolChoice(type="function", function=NamedFunction(name=name))


class AllowedTools(Body):
    """Those that may be called of the functions that the model is told of."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], items(128, least=1)]


class AllowedChoice(Body):
    """The same as a choice."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _form(given: Any) -> str:
    return "Allowed" if kind_of(given) == "allowed_tools" else "Named"


EITHER = Discriminator(_form)  # of forms that are tagged so
Choice = Annotated[
    Annotated[ToolChoice, Tag("Named")] | Annotated[AllowedChoice, Tag("Allowed")], EITHER
]
