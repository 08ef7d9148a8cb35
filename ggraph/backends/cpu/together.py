"""Many kernels compiled at the same time: by processes that help, since LLVM's Python binding lets
one thread in at a time.

A helper reads kernels' names, one a line, and answers each with the object's length (8 bytes) and
its bytes; none for a kernel that it does not know, as one that a graph brought along. What a helper
does not give, for whatever reason, this process compiles.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING

from ggraph import env, kept
from ggraph.backends.cpu.compiler import compile_object
from ggraph.backends.cpu.isa import Isa
from ggraph.backends.cpu.simd import KERNELS
from ggraph.lazy import lazy

if TYPE_CHECKING:
    import subprocess
else:
    subprocess = lazy("subprocess")

EACH = 6  # kernels from which on a helper, which costs as much as three or four, saves time
LARGE = ("matmul", "att")  # names of kernels that take twenty times as long as others
WORD = 8
HELP = """import sys
sys.path[:] = {}
import ggraph.backends.cpu.lower  # all kernels are there then
from ggraph.backends.cpu.together import serve
serve()"""


def compiled(
    names: Sequence[str], isa: Isa, told: Callable[[str], None]
) -> Iterator[tuple[str, bytes]]:
    """Each kernel's object; `told` hears of every name before."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in sorted(names, key=lambda n: not n.startswith(LARGE)):
        waiting.put(name)
    count = min(env.usable_cores(), len(names) // EACH) - 1
    found: dict[str, bytes] = {}
    helpers = [_Helper(isa, waiting, found, told) for _ in range(count if sys.executable else 0)]
    with suppress(Empty):
        while True:
            name = waiting.get_nowait()
            told(name)
            yield name, compile_object(KERNELS[name], isa)
            names = [n for n in names if n != name]
    for helper in helpers:
        helper.join()
    for name in names:
        yield name, found.get(name) or compile_object(KERNELS[name], isa)


class _Helper(threading.Thread):
    """A process that helps, and the thread that talks with it."""

    def __init__(
        self,
        isa: Isa,
        waiting: SimpleQueue[str],
        found: dict[str, bytes],
        told: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._waiting, self._found, self._told, self._isa = waiting, found, told, isa
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
        process.stdin.write(json.dumps(asdict(self._isa)).encode() + b"\n")
        process.stdin.flush()
        if process.stdout.read(1) != b"!":  # it is up, and takes no name before
            return
        while True:
            name = self._waiting.get_nowait()
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


def serve() -> None:
    """The helper's side."""
    names, out = sys.stdin, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nobody else's words among the answers
    isa = Isa(**json.loads(names.readline()))
    out.write(b"!")
    out.flush()
    for line in names:
        spec = KERNELS.get(line.strip())
        code = b"" if spec is None else compile_object(spec, isa)
        out.write(len(code).to_bytes(WORD, "little") + code)
        out.flush()
