"""Options that several commands share, as dataclasses in a command's signature.

    @dataclass(frozen=True)
    class ModelOptions:
        threads: Annotated[int | None, typer.Option("--threads", "-t")] = None

    @flat
    def generate(prompt: str, on: ModelOptions) -> None: ...

The command line sees `prompt` and `--threads`; the function gets `on.threads`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its dataclass parameters in their place, all by keyword."""
    hints = get_type_hints(command, include_extras=True)
    groups = {n: t for n, t in hints.items() if isinstance(t, type) and is_dataclass(t)}
    parameters = [
        p for name in inspect.signature(command).parameters for p in _flat(command, name, hints)
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flat(command: Callable[..., None], name: str, hints: dict[str, Any]) -> Iterator[Parameter]:
    """The parameter itself, or one for each field of its dataclass."""
    kind, group = Parameter.KEYWORD_ONLY, hints[name]
    if isinstance(group, type) and is_dataclass(group):
        inner = get_type_hints(group, include_extras=True)
        for f in fields(group):
            yield Parameter(f.name, kind, default=f.default, annotation=inner[f.name])
    else:
        own = inspect.signature(command).parameters[name]
        yield Parameter(name, kind, default=own.default, annotation=group)
