"""What fields of requests share: bounds, and refusals in words."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticKnownError, PydanticUseDefault

MOST_TEXT = 1 << 22  # letters of one string
MOST_IMAGE = 1 << 23  # of one with an image in it
MOST_LIST = 4096


def items(most: int, least: int = 0) -> Any:
    """The bounds of a list, whose first wrong item is all that is told: a report of each would take
    a hundred times the bytes of the items."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def few(value: Any) -> Any:
    """Refuses a long mapping before its items are looked at."""
    if isinstance(value, dict) and len(value) > MOST_LIST:
        found = {"field_type": "Dictionary", "max_length": MOST_LIST, "actual_length": len(value)}
        raise PydanticKnownError("too_long", found)
    return value


class Body(BaseModel):
    """Common ground: no infinities, names of Python's beside those of the wire."""

    model_config = ConfigDict(allow_inf_nan=False, populate_by_name=True)


def _left_out(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


T = TypeVar("T")
# Of a field with a default: clients write null for what they leave out, as OpenAI's own types do
OrNull = Annotated[T, BeforeValidator(_left_out)]
LongText = Annotated[str, Field(max_length=MOST_TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Annotated[str, Field(pattern=r"^[a-z]{1,32}$")]
Scalar = bool | int | float | Annotated[str, Field(max_length=256)] | None
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], items(1 << 20)]


def unable(advice: str = "") -> PydanticCustomError:
    """What a field is refused with that would change the answer, and cannot."""
    left = "leave it out" + (f", {advice}" if advice else "")
    return PydanticCustomError("unable", "this server cannot do that: {left}", {"left": left})


def only(*defaults: Any, instead: str = "") -> BeforeValidator:
    """Of a field whose defaults alone can be had, perhaps since another one is used `instead`. It
    is named here so that nobody takes an answer for one that followed it."""
    advice = f"or say {json.dumps(defaults[0])}" if defaults else ""
    advice = f"and say {instead}" if instead else advice

    def check(value: Any) -> Any:
        if value is not None and value not in defaults:
            raise unable(advice)
        return value

    return BeforeValidator(check)


def kind_of(given: Any) -> Any:
    """The type of what may have several forms, whether it is JSON or made of it."""
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


def of_types(*own: str) -> BeforeValidator:
    """Of tools, those of other types left out, which nobody here could call: agents send them
    beside functions and do without."""

    def check(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        return [t for t in tools if not isinstance(kind := kind_of(t), str) or kind in own]

    return BeforeValidator(check)


# Of a count that other servers take -1 for, where 0 bounds nothing
MINUS_ONE = BeforeValidator(lambda value: 0 if value == -1 else value)


def readable(kind: Any) -> Any:
    """Refuses sounds and files in words: who sends them thinks that they can be heard."""
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError("unreadable", "this model reads text and images, expected 'text'")
    return kind
