"""A program of its own that renders chat templates: one line of JSON in, one line out.

A template comes out of a downloaded file and is itself a program: it may reach for Python's
insides, or never end, or fill the memory. jinja2's immutable sandbox refuses the first; this
process has a bound on its memory and writes no files, and chat.py ends it when an answer takes too
long. What a template prints is plain text and is trusted with nothing.

Asked `{"source": ..., "variables": {...} or null}`, it answers with one of `text` (rendered, or
compiled only), `refused` (by the template's own `raise_exception`), `broken`, `failed` and
`stopped`. Started as a file, without ggraph, so that it is there in a tenth of a second.
"""

import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has no such bounds
    resource = None  # type: ignore[assignment]

MEMORY_BYTES = 1 << 29  # a prompt of a million letters takes a fiftieth of it


class Refusal(TemplateError):
    """The template itself refused its input."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what a model said: passed through."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates as Hugging Face's `apply_chat_template` does."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding would run the template's code while it is compiled
            extensions=[Generation, loopcontrols],
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Reaching for Python's own attributes is never a slip, so it does not pass for empty."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__}")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is not escaped for HTML, as Hugging Face's templates expect it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: Any) -> NoReturn:
    """`raise_exception` of templates."""
    raise Refusal(str(message))


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """The program of a template. Raises what jinja2 raises."""
    return ChatEnvironment().from_string(source)


def answer(source: str, variables: dict[str, Any] | None) -> dict[str, str]:
    """What to say to one question."""
    try:
        template = compiled(source)
    except Exception as error:  # deep nesting ends in RecursionError, SyntaxError or MemoryError
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        return {"broken": f"{where}: {kind}{short(error)}"}
    try:
        return {"text": "" if variables is None else template.render(variables)}
    except Refusal as error:
        return {"refused": short(error)}
    except (MemoryError, OverflowError) as error:
        return {"stopped": f"{type(error).__name__}: {short(error)}"}
    except Exception as error:  # a template can raise anything
        return {"failed": f"{type(error).__name__}: {short(error)}"}


def short(error: BaseException) -> str:
    """An error's message on one line of at most 200 letters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:199] + "…"


def bound() -> None:
    """From here on: no more memory than that, and nothing written to files."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main() -> None:
    """Answer until the questions end."""
    bound()
    for line in sys.stdin.buffer:
        reply = json.dumps(answer(**json.loads(line)))
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
