"""Chat templates: messages to the prompt text a model was trained on.

Semantics are Hugging Face's (`apply_chat_template`): jinja2 with trimmed blocks, `raise_exception`,
`strftime_now`, `tojson`, loop controls and `{% generation %}`. Templates come out of downloaded
files and run in chat_sandbox.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError

from ggraph.errors import FormatError, InputError
from ggraph.text.chat_budget import BUDGET, Budget, TooMuchWork, weigh
from ggraph.text.chat_filters import Refusal
from ggraph.text.chat_sandbox import ChatEnvironment
from ggraph.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What a model gets that has no template but knows the ChatML markers."""

_MAX_SOURCE = 1 << 18  # letters; the longest published templates have some 20,000
_BASE_UNITS = 1_000_000  # about a second
_UNITS_PER_INPUT = 3_000  # a body of a thousand nodes may visit each part of the input three times
_MAX_UNITS = 30_000_000


class ChatTemplate:
    """A compiled chat template. `bos` and `eos` are the texts of those tokens.

    FormatError when the source is no template.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if not isinstance(source, str) or len(source) > _MAX_SOURCE:
            got = f"{len(source)} letters" if isinstance(source, str) else type(source).__name__
            raise FormatError(f"chat template: expected at most {_MAX_SOURCE} letters, got {got}")
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template = _compile(source)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template that came with a vocabulary, or ChatML where it has that format's markers.

        InputError when there is neither: then only plain completion makes sense.
        """
        source = tokenizer.chat_template
        if source is None:
            missing = [t for t in ("<|im_start|>", "<|im_end|>") if tokenizer.id_of(t) is None]
            if missing:
                raise InputError(
                    "the model has no chat template, and the default (ChatML) needs "
                    f"{' and '.join(missing)}, which its vocabulary lacks: use it without chat"
                )
            source = CHATML
        return cls(source, tokenizer.bos_text, tokenizer.eos_text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text, to be encoded with `special=True, bos=False`.

        `messages` are mappings with `role` and mostly `content`; `extra` are the template's own
        variables (tools, enable_thinking, ...). InputError when the messages are not such or the
        template refuses them; FormatError when the template fails or would run away.
        """
        _check_messages(messages)
        variables = {**self._tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        token = BUDGET.set(Budget(_MAX_UNITS))
        try:
            BUDGET.set(Budget(min(_MAX_UNITS, _BASE_UNITS + _UNITS_PER_INPUT * weigh(variables))))
            return self._template.render(variables)
        except Refusal as e:
            raise InputError(f"the chat template refuses the messages: {e}") from None
        except TooMuchWork as e:
            raise FormatError(f"chat template stopped: {e}") from None
        except Exception as e:  # a template is a program: it can raise anything
            raise FormatError(f"chat template failed: {type(e).__name__}: {_short(e)}") from None
        finally:
            BUDGET.reset(token)


def _compile(source: str) -> Template:
    token = BUDGET.set(Budget(_BASE_UNITS))
    try:
        return ChatEnvironment().from_string(source)
    except TemplateError as e:
        line = getattr(e, "lineno", None)
        where = f" (line {line})" if line else ""
        raise FormatError(f"chat template{where}: {_short(e)}") from None
    except Exception as e:  # deep nesting ends in RecursionError, SyntaxError or MemoryError
        raise FormatError(f"chat template: {type(e).__name__}: {_short(e)}") from None
    finally:
        BUDGET.reset(token)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{i}]: expected a mapping, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}]: expected a role, got {message.get('role')!r}")


def _short(e: BaseException) -> str:
    text = " ".join(str(e).split())
    return text if len(text) <= 200 else text[:199] + "…"
