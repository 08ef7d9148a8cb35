"""Several ops as one: what lies between them needs no memory.

`ggraph.rewrite` makes chains where every device knows them, of the regions that
`ggraph.ops.joined` finds. A chain's program is text, one step after the other, whose names are
those of the ops:

    swiglu(a, b); scale(0){scale=0.5 bias=0.0}; add(1, c)
    reduce(a){axes=[1] kind=max}; sub(a, 0); exp(1); reduce(2){axes=[1] kind=sum}; div(2, 3)

a, b, .. are the sources, numbers the results of earlier steps. Steps are ops of elements, and ops
that reduce one space along the same axes: every value then has the shape of that space, or of what
is kept of it; `repeat` spreads a source over the space. The reference runs the steps.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ggraph.dtype import F16, F32
from ggraph.errors import ShapeError
from ggraph.ops.rules import expect, like, plain_float, repeats_into, rule
from ggraph.tensor import (
    OPS,
    Arg,
    Array,
    Attr,
    Attrs,
    Example,
    Meta,
    OpSpec,
    Tensor,
    apply,
    register,
    sound,
)

MOST_SOURCES, MOST_STEPS = 8, 16
_STEP = re.compile(r"(\w+)\(([^)]*)\)(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Link:
    """One step: an op, its arguments by name, its attributes."""

    op: str
    args: tuple[str, ...]
    attrs: Attrs

    @property
    def of_elements(self) -> bool:
        """Whether each element of the result needs one of each argument."""
        return OPS[self.op].elementwise

    def __str__(self) -> str:
        pairs = " ".join(f"{k}={_shown(v)}" for k, v in self.attrs.items())
        return f"{self.op}({', '.join(self.args)})" + (f"{{{pairs}}}" if pairs else "")


def _shown(value: Attr) -> str:
    """An attribute as text: a number, a word, or whole numbers in brackets."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    return value if isinstance(value, str) else repr(float(value or 0))


def _read(text: str) -> Attr:
    """What `_shown` wrote. ShapeError for anything else."""
    try:
        if text.startswith("["):
            expect(text.endswith("]"), f"no attribute: {text!r}")
            return tuple(int(v) for v in text[1:-1].split(",") if v)
        return text if text.isalpha() and text not in ("inf", "nan") else float(text)
    except ValueError:
        raise ShapeError(f"no attribute: {text!r}") from None


@lru_cache(1024)
def links(program: str) -> tuple[Link, ...]:
    """The steps of a program. ShapeError for what is none."""
    found = []
    for text in program.split("; "):
        m = _STEP.fullmatch(text)
        expect(m is not None and _joins(m[1]), f"no step: {text!r}")
        assert m is not None
        pairs = [p.partition("=") for p in (m[3] or "").split()]
        found.append(Link(m[1], tuple(m[2].split(", ")), {k: _read(v) for k, _, v in pairs}))
    return tuple(found)


def _joins(op: str) -> bool:
    """Whether an op can be a step."""
    spec = OPS.get(op)
    return spec is not None and (spec.elementwise or spec.reduces is not None or op == "repeat")


def letter(i: int) -> str:
    """What source i is called."""
    return chr(ord("a") + i)


def reduced_axes(op: str, sources: Sequence[Tensor], attrs: Attrs) -> tuple[int, ...] | None:
    """The axes of source 0 along which an op reduces; None for one that does not."""
    spec = OPS.get(op)
    return None if spec is None or spec.reduces is None else spec.reduces(sources[0].shape, attrs)


def spreads(op: str, sources: Sequence[Tensor], attrs: Attrs) -> bool:
    """Whether this is a `repeat` that repeats what has one place, as broadcasting does."""
    if op != "repeat":
        return False
    shape = attrs["shape"]
    assert isinstance(shape, tuple), shape
    own = (1,) * (len(shape) - len(sources[0].shape)) + sources[0].shape
    return all(a in (1, b) for a, b in zip(own, shape, strict=True))


def _rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    expect(
        0 < len(sources) <= MOST_SOURCES, f"{len(sources)} sources, expected 1 to {MOST_SOURCES}"
    )
    steps = links(str(attrs.get("program")))
    known = {letter(i): s for i, s in enumerate(sources)}
    space: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    for i, step in enumerate(steps):
        if not known.keys() >= {*step.args}:
            raise ShapeError(f"{step}: known are {', '.join(known)}")
        given = [known[a] for a in step.args]
        meta = OPS[step.op].infer(given, step.attrs)
        axes = reduced_axes(step.op, given, step.attrs)
        if axes is not None:
            space = space or (given[0].shape, axes)
            if (given[0].shape, axes) != space:
                raise ShapeError(f"{step} reduces another space than {space}")
        spread = spreads(step.op, given, step.attrs) and not step.args[0].isdigit()
        if step.op == "repeat" and not spread:
            raise ShapeError(f"{step}: only a source's axes of 1 repeat")
        known[str(i)] = sound(
            name=str(i), shape=meta.shape, dtype=meta.dtype, kind=sources[0].kind,
            strides=(0,) * len(meta.shape),
        )  # fmt: skip
    idle = set(map(letter, range(len(sources)))) - {a for step in steps for a in step.args}
    expect(not idle, f"no step takes {', '.join(sorted(idle))}")
    whole, kept = _shapes(meta.shape, space)
    for i, step in enumerate(steps if space is not None else ()):
        if known[str(i)].shape not in (whole, kept):
            raise ShapeError(f"{step}: of another shape")
    everything = sound(
        name="all", shape=whole, dtype=F32, kind=sources[0].kind, strides=(0,) * len(whole)
    )
    for s in sources:
        plain_float(s)
        repeats_into(s, everything)
    return Meta(meta.shape, meta.dtype)


def _shapes(
    result: tuple[int, ...], space: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the space and of what is kept of it."""
    whole, axes = space or (result, ())
    return whole, tuple(1 if i in axes else n for i, n in enumerate(whole))


def _reference(*arrays: Array, program: str) -> Array:
    known = {letter(i): a for i, a in enumerate(arrays)}
    steps = links(program)
    for i, step in enumerate(steps):
        values = [known[a] for a in step.args]
        known[str(i)] = like(OPS[step.op].reference(*values, **step.attrs), values[0])
    return known[str(len(steps) - 1)]


SOFT_MAX = (
    "reduce(a){axes=[1] kind=max}; sub(a, 0); exp(1); reduce(2){axes=[1] kind=sum}; div(2, 3)"
)
SUMMED = "repeat(b){shape=[3,7,20]}; mul(0, a); mul(1, c); reduce(2){axes=[1] kind=mean}; sqr(3)"

CHAIN = register(
    OpSpec(
        "chain",
        infer=rule("chain", "source+", _rule),
        reference=_reference,
        inplace_ok=tuple(range(MOST_SOURCES)),
        examples=(
            Example((Arg((3, 5)), Arg((5,))), {"program": "mul(a, b); silu(0); add(1, a)"}),
            Example(
                (Arg((2, 3, 37)), Arg((2, 3, 37)), Arg((3, 1))),
                {"program": "swiglu(a, b); scale(0){scale=0.5 bias=1.0}; sub(1, c)"},
            ),
            Example((Arg((1, 1)),), {"program": "tanh(a); exp(0)"}),
            Example((Arg((0, 4)),), {"program": "tanh(a); exp(0)"}),
            Example((Arg((3, 5), F16),), {"program": "tanh(a); exp(0)"}, tolerance=2e-3),
            Example((Arg((3, 7, 20)),), {"program": SOFT_MAX}),
            Example((Arg((3, 1, 20)), Arg((3, 7, 1)), Arg((3, 1, 1))), {"program": SUMMED}),
            Example((Arg((4, 67)), Arg((67,))), {"program": "norm(a){eps=1e-05}; mul(0, b)"}),
            Example((Arg((0, 3, 4)),), {"program": SOFT_MAX}),
        ),
        doc="chain(sources, program): ops of elements and reductions, one after the other.",
    )
)


def chain(*sources: Tensor, program: str, name: str = "") -> Tensor:
    """Ops of elements and reductions along the same axes, one after the other, as `program` says;
    all plain float. No ggml peer.

    Sources repeat into the space that is reduced, or without one into the result's shape. Errors:
    ShapeError for a program that is none.
    """
    return apply("chain", *sources, name=name, program=program)
