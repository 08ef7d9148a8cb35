"""The real llama.cpp, as it is and with faults put into it: recorded, judged, run late.

`judge_setting` records one configuration of an unmodified version; `judge_mutant` changes one
statement, builds, records, and runs it eagerly and lazily beside the sound program.
"""

import re
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from subprocess import DEVNULL, PIPE

from ggraph.record.judge import Verdict, judge
from ggraph.record.log import Recording, read_log
from ggraph.record.plugin import Engine, libraries_in
from ggraph.record.real.engine import Build, build, completion
from ggraph.record.real.models import (
    block_drafter,
    equal_experts,
    next_tokens,
    noise_adapter,
)
from ggraph.record.real.mutants import MUTANTS, NEW, NOTHING_NEW, OLD, Mutant
from ggraph.record.real.settings import SETTINGS, Setting, setting, wait_for
from ggraph.record.run import Program, Run, Stage

__all__ = [
    "MUTANTS",
    "NEW",
    "NOTHING_NEW",
    "OLD",
    "SETTINGS",
    "Files",
    "Found",
    "Mutant",
    "MutantFound",
    "Setting",
    "build_for",
    "judge_mutant",
    "judge_setting",
    "setting",
]

SECONDS = 900.0  # that one run may take on a small machine
SERVER_ENDS = 60.0


@dataclass(frozen=True)
class Files:
    """The files that settings name: a model, an EAGLE-3 head for it, and a folder to write in."""

    model: Path
    head: Path
    folder: Path

    def named(self) -> dict[str, str]:
        """The names that arguments may use."""
        made = {
            "experts": equal_experts,
            "adapter": noise_adapter,
            "mtp": next_tokens,
            "dflash": block_drafter,
        }
        paths = {"model": self.model, "head": self.head, "folder": self.folder}
        paths |= {k: make(self.model, self.folder / f"{k}.gguf") for k, make in made.items()}
        return {k: str(path) for k, path in paths.items()}


@dataclass(frozen=True)
class Found:
    """What became of one configuration. `verdicts` are empty where it did not run; `failed` is
    what it said then."""

    setting: Setting
    version: str
    status: int | None
    text: str
    verdicts: Sequence[Verdict]
    failed: str = ""

    @property
    def word(self) -> str:
        """proved, refused, not played, or did not run."""
        if self.setting.unplayed:
            return "not played"
        if not self.verdicts or self.status != 0:
            return "did not run"
        return "refused" if any(v.refused for v in self.verdicts) else "proved"

    @property
    def why(self) -> str:
        """The causes of what was refused, one line each, or why there is no verdict."""
        if self.word in ("not played", "did not run"):
            return self.setting.unplayed or f"status {self.status}: {self.failed}"
        lines: Counter[str] = Counter()
        for v in (v for v in self.verdicts if v.refused is not None):
            causes = v.diagnosis.causes if v.diagnosis is not None else ()
            lines.update(f"{v.kind}: {c}" for c in causes)
            if not causes and v.refused is not None:
                lines[f"{v.kind}: {v.refused.kind}: {v.refused.message}"] += 1
        return "\n".join(f"{n} x {x}" if n > 1 else x for x, n in lines.items())


@dataclass(frozen=True)
class MutantFound:
    """One fault: what `verify` says of it, and whether its texts are the sound program's."""

    mutant: Mutant
    found: Found
    eager_same: bool
    lazy_same: bool


def build_for(version: str, chosen: Sequence[Setting]) -> Build:
    """The build of a version with the programs that these configurations need."""
    return build(version, *sorted({_program(s, version) for s in chosen if not s.unplayed}))


def judge_setting(made: Build, chosen: Setting, files: Files) -> Found:
    """Record one configuration on played devices and judge it."""
    if chosen.unplayed:
        return Found(chosen, made.version, None, "", [])
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder) / "log.jsonl", Path(folder) / "said"
        ended = Run(None, b"")
        for _ in range(chosen.repeat):
            ended = _run(made, chosen, files, Stage(chosen.devices, chosen.contract), log)
        recording = read_log(log) if _recorded(log) else Recording()
        failed = _complaint(said.read_text(errors="replace").splitlines())
    if recording.cut_short:  # nothing is said about a whole run
        recording, failed = Recording(), f"the log ends early: {recording.cut_short}"
    verdicts = judge(recording)
    text = ended.output.decode(errors="replace")
    return Found(chosen, made.version, ended.status, text, verdicts, failed)


def judge_mutant(made: Build, mutant: Mutant, files: Files, sound: str) -> MutantFound:
    """Put a fault in, build, and run. `sound` is the unmodified program's text."""
    chosen = setting(mutant.where)
    with made.changed(mutant, _program(chosen, made.version)), tempfile.TemporaryDirectory() as f:
        found = judge_setting(made, chosen, files)
        late = Stage(chosen.devices, chosen.contract, "lazy", poison=True)
        lazy = _run(made, chosen, files, late, Path(f) / "log.jsonl")
    same = lazy.status == 0 and lazy.output.decode(errors="replace") == sound
    return MutantFound(mutant, found, found.status == 0 and found.text == sound, same)


def _complaint(lines: Sequence[str]) -> str:
    """The last line of what a program said, without what a debugger adds to it."""
    said = [x for x in lines if x.strip() and not re.match(r"\d+\t|warning: |\[|#", x)]
    return said[-1] if said else ""


def _recorded(log: Path) -> bool:
    return log.is_file() and log.stat().st_size > 0


def _program(chosen: Setting, version: str) -> str:
    return completion(version) if chosen.program == "completion" else chosen.program


def _run(made: Build, chosen: Setting, files: Files, stage: Stage, log: Path) -> Run:
    named = files.named()
    port = _free_port() if chosen.serve is not None else 0
    arguments = [
        a.format(port=port, version=made.version, **named) for a in chosen.arguments.split()
    ]
    if "-m" not in arguments:
        arguments += ["-m", named["model"]]
    if chosen.serve is None:
        arguments += ["-p", chosen.prompt]
    given = Program(
        (str(made.program(_program(chosen, made.version))), *arguments),
        Engine(libraries_in(made.folder / "bin"), made.sources),
        chosen.environment,
    )
    with log.with_name("said").open("wb") as errors:
        if chosen.serve is None:
            return given.run(stage, log, output=PIPE, errors=errors, timeout=SECONDS)
        environment = given.environment(stage, log)
        server = subprocess.Popen(given.arguments, env=environment, stdout=DEVNULL, stderr=errors)
        return _served(server, chosen.serve, port)


def _served(server: subprocess.Popen[bytes], asked: Callable[[int], None], port: int) -> Run:
    """How a server ends that is asked things and then told to end; None: it hung."""
    try:
        wait_for(port, server)
        asked(port)
        server.terminate()
        status = server.wait(SERVER_ENDS)
    except (OSError, subprocess.TimeoutExpired):
        server.kill()
        status = server.wait()
        return Run(status if status not in (0, -SIGKILL) else None, b"")
    return Run(0 if status in (0, -SIGTERM) else status, b"")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
