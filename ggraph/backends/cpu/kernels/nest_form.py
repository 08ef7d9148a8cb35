"""What a kernel by rule computes, as data: `nest.py` emits it.

A `Nest` says which axes are kept and which are reduced, along which one vectors lie, how each
operand lies along it, and the steps of the expression.
"""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache


@dataclass(frozen=True)
class Operand:
    """Its element's name, and how it lies along the vectors: "v" side by side, "s" one for all,
    "g" at a distance."""

    kind: str
    lies: str


@dataclass(frozen=True)
class Nest:
    """What a kernel computes. `steps` are (op, arguments): earlier steps, or for "load" and
    "number" which operand or number. `computes` is the type between loads and stores: "f32", "i64"
    or a type that is only moved. `along` is "kept" or "reduced": which innermost axis is vectors'.
    `whole`: the result has the reduced axes too; a step of it that is `held` is computed in one
    pass, which leaves it where the result will be, and read there by later ones."""

    kept: int
    reduced: int
    along: str
    operands: tuple[Operand, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    computes: str
    whole: bool
    held: int | None = None

    @cached_property
    def name(self) -> str:
        """The kernel's name: element types, and a digest of the rest."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"nest_{'_'.join(o.kind for o in self.operands)}_{digest}"

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return (*(f"k{i}" for i in range(self.kept)), *(f"r{i}" for i in range(self.reduced)))

    @cached_property
    def numbers(self) -> int:
        """How many numbers the expression has."""
        return max((a[0] + 1 for op, a in self.steps if op == "number"), default=0)

    @property
    def args(self) -> tuple[str, ...]:
        """Names of the instruction's words."""
        places = [f"{o}{axis}" for o in names(len(self.operands)) for axis in ("", *self.axes)]
        return (*self.axes, *places, *(f"c{i}:f" for i in range(self.numbers)))


@cache
def names(count: int) -> tuple[str, ...]:
    """What operands are called: y, then a, b, .."""
    return ("y", *(chr(ord("a") + i) for i in range(count - 1)))


@lru_cache(1024)
def axes_among(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Which of an instruction's arguments are the extents of its nest's axes."""
    return tuple(name for name in arguments if name[0] in "kr" and name[1:].isdigit())
