"""What conversations are made of: messages, calls of functions, and the functions."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .errors import Refused
from .fields import MOST_IMAGE, MOST_LIST, Body, LongText, OrNull, items, kind_of, only, readable


class TextPart(Body):
    """A part of a message that is text; a refusal is some."""

    type: Annotated[
        Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(readable)
    ]
    text: Annotated[LongText, Field(validation_alias=AliasChoices("text", "refusal"))]


def _here(url: str) -> str:
    """Refuses an address: a server that fetches what strangers name works for them."""
    if not url.startswith("data:"):
        said = "expected a data: URL with the image itself: this server fetches no addresses"
        raise PydanticCustomError("elsewhere", said)
    return url


class ImageUrl(Body):
    """An image itself, as a URL."""

    url: Annotated[str, Field(max_length=MOST_IMAGE), AfterValidator(_here)]


class ImagePart(Body):
    """A part of a message that is an image, in OpenAI's form, in that of its newer API (a bare URL)
    or in Anthropic's (a source)."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        url, source = given.get("image_url"), given.get("source")
        if isinstance(source, dict):
            url = source.get("url", "")
            if source.get("type") == "base64":
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url} if isinstance(url, str) else url}

    @property
    def data(self) -> bytes:
        """What is in the image's file. Refused where that is not in base64."""
        head, _, body = self.image_url.url.partition(",")
        try:
            if head.endswith(";base64"):
                return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            pass
        raise Refused("an image's data: URL: expected base64", param="messages")


def _kind_of_part(part: Any) -> str:
    kind = kind_of(part)
    return "Image" if kind in ("image_url", "input_image", "image") else "Text"


Part = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image")],
    Discriminator(_kind_of_part),
]


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
    content: LongText | Annotated[list[Part], items(MOST_LIST)] | None = None
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
            return "".join(p.text for p in self.content if isinstance(p, TextPart))
        return self.content or ""

    @property
    def images(self) -> list[ImagePart]:
        """Its images."""
        parts = self.content if isinstance(self.content, list) else ()
        return [p for p in parts if isinstance(p, ImagePart)]

    @property
    def shown(self) -> Any:
        """What a template is given: its text or, where there are images, its parts."""
        if not self.images or not isinstance(self.content, list):
            return self.text
        texts = ({"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"}
                 for p in self.content)  # fmt: skip
        return list(texts)


def images_of(messages: Sequence[Message]) -> list[bytes]:
    """What is in the files of all images. Refused where somebody else shows one than the user and
    functions, in what they give back."""
    for m in messages:
        if m.images and m.role not in ("user", "tool"):
            raise Refused(f"an image in a message of the {m.role}: expected the user's or a tool's")
    return [p.data for m in messages for p in m.images]


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
