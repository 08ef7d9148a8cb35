"""Run a program on played devices. The program is the user's own and runs with their rights."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ggraph.door import fit
from ggraph.env import child_environment, put
from ggraph.errors import InputError
from ggraph.record.judge import Verdict, judge, missing
from ggraph.record.log import MOST_DEVICES, read_log
from ggraph.record.plugin import Engine, engine_of, plugin

CONTRACTS = ("cuda", "cuda-no-peer", "vulkan", "metal", "sycl", "rpc", "on-target")
ORDER = re.compile(r"eager|lazy|late:(?P<late>\d)|random:\d{1,9}|hold:\d+\.\d+(:\d+\.\d+)?", re.A)
MOST_LOG_BYTES = 256 << 20


@dataclass(frozen=True)
class Stage:
    """What the devices play. `order` is one of native/queue.hpp, `poison` marks unfinished work."""

    devices: int = 1
    contract: str = "cuda"
    order: str = "eager"
    poison: bool = False
    traps: bool = True  # protect pinned memory while it is in flight

    def __post_init__(self) -> None:
        fit(self)
        if not 1 <= self.devices <= MOST_DEVICES:
            raise InputError(f"{self.devices} devices: 1 to {MOST_DEVICES} can be played")
        if self.contract not in CONTRACTS:
            raise InputError(f"contract {self.contract!r}: one of {', '.join(CONTRACTS)}")
        found = ORDER.fullmatch(self.order)
        if found is None:
            raise InputError(f"order {self.order!r}: one of eager, lazy, late:D, random:SEED")
        if found["late"] is not None and int(found["late"]) >= self.devices:
            last = self.devices - 1
            raise InputError(f"order {self.order!r}: the devices are 0 to {last}")

    def settings(self, log: Path) -> dict[str, str]:
        """The environment that the plugin reads."""
        return {
            "GGRAPH_RECORD_LOG": str(log),
            "GGRAPH_RECORD_LIMIT": str(MOST_LOG_BYTES),
            "GGRAPH_RECORD_DEVICES": str(self.devices),
            "GGRAPH_RECORD_CONTRACT": self.contract,
            "GGRAPH_RECORD_ORDER": self.order,
            "GGRAPH_RECORD_POISON": str(int(self.poison)),
            "GGRAPH_RECORD_TRAP": str(int(self.traps)),
            "GGRAPH_RECORD_REGISTER": "1",
        }


@dataclass(frozen=True)
class Run:
    """How a program ended: exit status (negative: the signal; None: out of time), output."""

    status: int | None
    output: bytes


@dataclass(frozen=True)
class Program:
    """A command line, and the ggml that it loads."""

    arguments: tuple[str, ...]
    engine: Engine
    extra: Mapping[str, str] = field(default_factory=dict)  # environment of its own

    def environment(self, stage: Stage, log: Path) -> dict[str, str]:
        """What it is to find in its environment."""
        preload = {"LD_PRELOAD": str(plugin(self.engine))}
        return child_environment({**self.extra, **preload, **stage.settings(log)})

    def run(
        self,
        stage: Stage,
        log: Path,
        *,
        output: IO[bytes] | int | None = None,
        errors: IO[bytes] | int | None = None,
        timeout: float | None = None,
    ) -> Run:
        """Run it once; `output` and `errors` as in subprocess, None shares ours."""
        try:
            done = subprocess.run(
                self.arguments,
                env=self.environment(stage, log),
                stdout=output,
                stderr=errors,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Run(None, error.stdout or b"")
        except OSError as error:
            raise InputError(f"cannot run {self.arguments[0]}: {error.strerror}") from None
        return Run(done.returncode, done.stdout or b"")


def program(arguments: Sequence[str], sources: Path | None = None) -> Program:
    """A command line as a Program. InputError where it cannot be found or loads no shared ggml."""
    if not arguments:
        raise InputError("expected a program and its arguments, got nothing")
    found = shutil.which(arguments[0])
    if found is None:
        raise InputError(f"no program {arguments[0]!r}")
    return Program((found, *arguments[1:]), engine_of(Path(found), sources))


@dataclass
class Session:
    """What `ggml` yields; `verdicts` are there when the block has ended.

    `missing`: why they are not about all that was done in it, if they are not.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    cut_short: str = ""
    missing: list[str] = field(default_factory=list)


_loaded: list[ctypes.CDLL] = []


@contextmanager
def ggml(
    library: str | Path, stage: Stage | None = None, *, sources: str | Path | None = None
) -> Iterator[Session]:
    """Record this process' own use of a ggml, such as llama-cpp-python's, on played devices.

    `library` is its libggml.so. Once in a process, before a model is loaded: ggml lists its devices
    then, and never forgets one. Models must be closed when the block ends.
    """
    if _loaded:
        raise InputError("ggraph.record.ggml can be used once in a process")
    compiled = plugin(engine_of(Path(library), Path(sources) if sources else None))
    session = Session()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        for name, value in (stage or Stage()).settings(log).items():
            put(name, value)
        _loaded.append(ctypes.CDLL(str(compiled), ctypes.RTLD_GLOBAL))
        yield session
        recording = read_log(log)
        session.verdicts, session.cut_short = judge(recording), recording.cut_short
        session.missing = missing(recording, session.verdicts)
