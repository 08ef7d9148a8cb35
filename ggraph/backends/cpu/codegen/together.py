"""Many kernels compiled at the same time: by processes that help, since LLVM's Python binding lets
one thread in at a time.

A helper reads what source it is to have, and leaves where it has another: files change under a
process that runs. Then it reads kernels' names, one a line, and answers each with the object's
length (8 bytes) and its bytes; none for a kernel that it does not know, as one that a graph brought
along. What a helper does not give, for whatever reason, this process compiles.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, PriorityQueue
from typing import IO, TYPE_CHECKING

from ggraph import env, kept
from ggraph.backends.cpu.codegen.compiler import compile_object
from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.lazy import lazy

if TYPE_CHECKING:
    import subprocess
else:
    subprocess = lazy("subprocess")

EACH = 6  # small kernels from which on a helper, which costs as much, saves time
LARGE = ("att", "matmul")  # names of those that take ten times as long as others, the longest first
WORD = 8
HELP = """import sys
sys.path[:] = {}
import ggraph.backends.cpu.lowering.lower  # all kernels are there then
from ggraph.backends.cpu.codegen.jit import SOURCE
from ggraph.backends.cpu.codegen.together import serve
serve(SOURCE)"""


def _place(name: str) -> int:
    """When a kernel is begun: those that take longest come first."""
    return next((i for i, start in enumerate(LARGE) if name.startswith(start)), len(LARGE))


class Crew:
    """The kernels that one process and its helpers of the same source compile; `told` hears of
    every name before."""

    def __init__(self, isa: Isa, source: str, told: Callable[[str], None]) -> None:
        self._wanted = json.dumps({"isa": asdict(isa), "source": source}).encode() + b"\n"
        self._isa, self._told = isa, told
        self._waiting: PriorityQueue[tuple[int, str]] = PriorityQueue()
        self._asked, self._helpers = set[str](), list[_Helper]()
        self.found: dict[str, bytes] = {}

    def begin(self, names: Sequence[str], own: int = 0) -> None:
        """Have helpers compile these, `own` of which this process is about to do itself."""
        for name in names:
            if name not in self._asked:
                self._asked.add(name)
                self._waiting.put((_place(name), name))
        large = sum(_place(name) < len(LARGE) for name in names) - own
        count = min(env.usable_cores() - 1, max(large, len(names) // EACH - 1))
        self._helpers = [h for h in self._helpers if h.is_alive()]
        for _ in range(count - len(self._helpers) if sys.executable else 0):
            self._helpers.append(_Helper(self._wanted, self._waiting, self.found, self._told))

    def compiled(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Each of these kernels' object."""
        self.begin(names, own=1)
        left = dict.fromkeys(names)
        with suppress(Empty):
            while True:
                _, name = self._waiting.get_nowait()
                if name in left:  # not only expected
                    del left[name]
                    self._told(name)
                    yield name, compile_object(KERNELS[name], self._isa)
        for helper in self._helpers:
            helper.join()
        for name in left:
            yield name, self.found.get(name) or compile_object(KERNELS[name], self._isa)


class _Helper(threading.Thread):
    """A process that helps, and the thread that talks with it."""

    def __init__(
        self,
        wanted: bytes,
        waiting: PriorityQueue[tuple[int, str]],
        found: dict[str, bytes],
        told: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._waiting, self._found, self._told, self._wanted = waiting, found, told, wanted
        self.start()

    def run(self) -> None:
        """Hand out names until none is left, or the process ends."""
        with suppress(OSError, Empty):
            program = [sys.executable, "-c", HELP.format(repr(sys.path))]
            with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL) as process:  # fmt: skip
                try:
                    self._talk(process)
                finally:
                    process.kill()

    def _talk(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._wanted)
        process.stdin.flush()
        if process.stdout.read(1) != b"!":  # it is up, and takes no name before
            return
        while True:
            _, name = self._waiting.get_nowait()
            self._told(name)
            process.stdin.write(name.encode() + b"\n")
            process.stdin.flush()
            code = _answer(process.stdout)
            if code is None:
                return
            self._found[name] = code


def _answer(stream: IO[bytes]) -> bytes | None:
    """An object; None where the process has ended amid it, or what it says is none."""
    head = stream.read(WORD)
    size = int.from_bytes(head, "little")
    if len(head) < WORD or size > kept.MOST:
        return None
    code = stream.read(size)
    return code if len(code) == size else None


def serve(source: str) -> None:
    """The helper's side, which has this source."""
    names, out = sys.stdin, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nobody else's words among the answers
    wanted = json.loads(names.readline())
    if wanted["source"] != source:
        return
    isa = Isa(**wanted["isa"])
    out.write(b"!")
    out.flush()
    for line in names:
        spec = KERNELS.get(line.strip())
        code = b"" if spec is None else compile_object(spec, isa)
        out.write(len(code).to_bytes(WORD, "little") + code)
        out.flush()
