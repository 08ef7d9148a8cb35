"""Options that commands share: one dataclass in the signature, its fields on the command line."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from models.cli.flat import flat


@dataclass(frozen=True)
class Shared:
    """Two options."""

    threads: Annotated[int | None, typer.Option("--threads", "-t")] = None
    device: Annotated[str, typer.Option(help="Where.")] = "cpu"


def test_a_dataclass_gives_its_fields_to_the_command_line() -> None:
    seen: list[object] = []

    @flat
    def command(prompt: str, on: Shared, count: int = 3) -> None:
        """Does something."""
        seen.append((prompt, on, count))

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["hi", "-t", "2", "--count", "4"]).exit_code == 0
    assert CliRunner().invoke(app, ["hi", "--device", "sim0"]).exit_code == 0
    assert seen == [("hi", Shared(2), 4), ("hi", Shared(device="sim0"), 3)]
    assert list(inspect.signature(command).parameters) == ["prompt", "threads", "device", "count"]
    assert command.__doc__ == "Does something."
    assert CliRunner().invoke(app, ["hi", "-t", "two"]).exit_code == 2
