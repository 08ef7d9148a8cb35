"""The runner as a user starts it, as a process or in the tests' own."""

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_model import TINY

from models.cli.app import main

ROOT = Path(__file__).parent.parent
HEAD = TINY / "eagle3_for_llama_tied"


def start(
    *arguments: str | Path, module: str = "models", env: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip


def ggraph(
    *arguments: str | Path, stdin: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Status, output and errors of one command; `env` is added to the environment."""
    with start(*arguments, env=env) as process:
        out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


def refused(*arguments: str | Path, stdin: str = "") -> str:
    """The one line with which a command refuses its input."""
    status, _, err = ggraph(*arguments, stdin=stdin)
    assert status not in (0, -9), (arguments, err)
    assert "Traceback" not in err, err
    return err


def ggraph_here(*arguments: str | Path) -> tuple[int, str, str]:
    """As `ggraph`, by the entry point in this process, which takes no second to start; an exception
    that is a traceback there is one here."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["ggraph", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr("models.cli.app.WATCHERS", [])
        main()
    status = left.value.code or 0
    assert isinstance(status, int)
    return status, out.getvalue(), errors.getvalue()


def refused_here(*arguments: str | Path) -> str:
    """As `refused`, in this process."""
    status, _, err = ggraph_here(*arguments)
    assert status != 0 and "Traceback" not in err, arguments
    return err
