"""One command from a clone: `python3 scripts/dev.py run "PROMPT"`, `... test`, `... check`.

Needs only Python 3.11 or newer: makes a virtual environment in `.venv` (or --venv FOLDER),
installs what pyproject.toml lists, then runs the runner, the tests, or all checks of CI.
"""

import argparse
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(extra: str | None) -> list[str]:
    """The project's dependencies, and those of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else [])]


def environment(folder: Path, extra: str | None) -> Path:
    """The environment's interpreter; packages are installed when the list has changed."""
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / scripts / ("python.exe" if os.name == "nt" else "python")
    wanted = requirements(extra)
    stamp = folder / f"installed-{extra or 'run'}.txt"
    if stamp.is_file() and stamp.read_text().splitlines() == wanted:
        return python
    if not python.exists():
        print(f"making a virtual environment in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    print(f"installing {len(wanted)} packages", file=sys.stderr)
    quiet = ["-q", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *wanted], check=True)
    stamp.write_text("\n".join(wanted) + "\n")
    return python


def steps(what: str, rest: Sequence[str], bin_folder: Path) -> list[list[str]]:
    """The commands of one verb, relative to the environment's interpreter."""
    python = str(bin_folder / "python")
    if what == "run":
        words = list(rest)
        known = words and not words[0].startswith("-") and words[0] in COMMANDS
        return [
            [python, "-m", "models", *words]
            if known
            else [python, "-m", "models", "generate", *words]
        ]
    tests = [[python, "-m", "pytest", *rest]]
    if what == "test":
        return tests
    return [
        *tests,
        [str(bin_folder / "ruff"), "check", "."],
        [str(bin_folder / "ruff"), "format", "--check", "."],
        [str(bin_folder / "lint-imports"), "--no-cache"],
        [str(bin_folder / "mypy")],
    ]


COMMANDS = {"generate", "plan", "eagle3", "convert", "quantize", "hazards", "bench", "verify"}


def main() -> None:
    """Make the environment and run the verb; the exit status is the first failure's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("what", choices=("run", "test", "check"))
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    python = environment(given.venv, None if given.what == "run" else "dev")
    for command in steps(given.what, given.rest, python.parent):
        if given.what == "check":
            print(
                "+",
                " ".join(Path(c).name if i == 0 else c for i, c in enumerate(command)),
                flush=True,
            )
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
