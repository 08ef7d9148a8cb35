"""One command from a clone: `python3 scripts/dev.py run "PROMPT"`, `... test`, `... check`.

Needs only Python 3.11 or newer: makes a virtual environment in `.venv` (or --venv FOLDER),
installs what pyproject.toml lists, then runs the runner, the tests, or all checks of CI.
"""

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (this file is what an older one meets first)
    sys.exit(f"ggraph needs Python 3.11 or newer, this is {sys.version.split()[0]}")

import tomllib

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "generate", "chat", "serve", "batch", "plan", "eagle3", "convert", "quantize", "hazards",
    "bench", "verify", "train-eagle3", "record", "torture", "import", "imatrix", "perplexity",
}  # fmt: skip
VERBS = ("run", "test", "check")


def requirements(extra: str | None) -> list[str]:
    """The project's dependencies, and those of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, listed = f"{project['name']}[", project["optional-dependencies"][extra] if extra else []
    others = [x for r in listed if r.startswith(own) for x in requirements(r[len(own) : -1])]
    found = [*project["dependencies"], *others, *(r for r in listed if not r.startswith(own))]
    return list(dict.fromkeys(found))


def environment(folder: Path, extra: str | None) -> Path:
    """The environment's interpreter; packages are installed when the list has changed."""
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / scripts / ("python.exe" if os.name == "nt" else "python")
    wanted = requirements(extra)
    stamp = folder / f"installed-{extra or 'run'}.txt"
    if stamp.is_file() and stamp.read_text().splitlines() == wanted:
        return python
    if not has_pip(python):
        print(f"making a virtual environment in {folder}", file=sys.stderr)
        make(folder)
    print(f"installing {len(wanted)} packages", file=sys.stderr)
    quiet = ["-q", "--disable-pip-version-check"]
    pip = [str(python), "-m", "pip", "install", *quiet, *wanted]
    if subprocess.run(pip, check=False).returncode:
        sys.exit("pip could not install the packages; its own message is above")
    stamp.write_text("\n".join(wanted) + "\n")
    return python


def has_pip(python: Path) -> bool:
    """Whether an environment is there and whole: an interrupted one has no pip."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and not subprocess.run(command, capture_output=True).returncode


def make(folder: Path) -> None:
    """A new virtual environment. Some systems ship Python without what that needs."""
    try:
        venv.create(folder, with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"cannot make {folder}: {error}\nOn Debian and Ubuntu: apt install python3-venv")


def steps(what: str, rest: Sequence[str], bin_folder: Path) -> list[list[str]]:
    """The commands of one verb, relative to the environment's interpreter."""
    python = str(bin_folder / "python")
    if what == "run":
        whole = not rest or rest[0] in COMMANDS or rest[0] in ("-h", "--help", "--version")
        return [[python, "-P", "-m", "models", *([] if whole else ["generate"]), *rest]]
    tests = [[python, "-m", "pytest", *workers(rest), *rest]]
    if what == "test":
        return tests
    return [
        *tests,
        [str(bin_folder / "ruff"), "check", "."],
        [str(bin_folder / "ruff"), "format", "--check", "."],
        [str(bin_folder / "lint-imports"), "--no-cache"],
        [str(bin_folder / "mypy")],
    ]


def extra(what: str, rest: Sequence[str]) -> str | None:
    """The extra whose packages a verb needs beside the project's own."""
    if what != "run":
        return "ray-dev" if any("test_serve_ray" in a for a in rest) else "dev"
    if rest[:1] not in (["serve"], ["batch"]):
        return None
    return "ray" if "--ray" in rest else "serve"


def workers(rest: Sequence[str]) -> list[str]:
    """Options that run the tests side by side, file by file, unless some are named.

    One more than there are cores, as tests wait for processes and sockets; more than four gain
    little beside the longest file.
    """
    if any((ROOT / a.split("::")[0]).exists() for a in rest):
        return []
    return ["-n", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "loadfile"]


def main() -> None:
    """Make the environment and run the verb; the exit status is the first failure's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("what", choices=VERBS)
    parser.epilog = "What follows the verb goes to the runner (run --help) or to pytest."
    own, rest = split(sys.argv[1:])
    given = parser.parse_args(own)
    python = environment(given.venv, extra(given.what, rest))
    for command in steps(given.what, rest, python.parent):
        if given.what == "check":
            print("+", Path(command[0]).name, *command[1:], flush=True)
        if given.what == "run":  # in the user's folder, whose files the arguments name
            paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
            where = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            status = followed(command, where)
        else:
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            sys.exit(status)


def followed(command: Sequence[str], environment: dict[str, str]) -> int:
    """The status of a command that Ctrl-C reaches by itself: this program waits for its end."""
    running = subprocess.Popen(command, env=environment)
    while True:
        try:
            return running.wait()
        except KeyboardInterrupt:
            continue


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """This program's own arguments, up to the verb, and the rest."""
    for i, a in enumerate(arguments):
        if a in VERBS and (i == 0 or arguments[i - 1] != "--venv"):
            return list(arguments[: i + 1]), list(arguments[i + 1 :])
    return list(arguments), []


if __name__ == "__main__":
    main()
