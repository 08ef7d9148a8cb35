"""Several ops of elements as one: what lies between them needs no memory.

`ggraph.rewrite` makes chains where every device knows them. A chain's program is text, one step
after the other, whose names are those of the ops:

    swiglu(a, b); scale(0){scale=0.5 bias=0.0}; add(1, c)

a, b, .. are the sources, numbers the results of earlier steps. The reference runs the steps.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggraph.dtype import F16, F32
from ggraph.ops.rules import expect, f32, plain_float, repeats_into, rule
from ggraph.tensor import OPS, Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register

MOST_SOURCES, MOST_STEPS = 8, 16
_STEP = re.compile(r"(\w+)\(([^)]*)\)(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Link:
    """One step: an op, its arguments by name, its numbers."""

    op: str
    args: tuple[str, ...]
    attrs: Mapping[str, float]

    def __str__(self) -> str:
        numbers = " ".join(f"{k}={v!r}" for k, v in self.attrs.items())
        return f"{self.op}({', '.join(self.args)})" + (f"{{{numbers}}}" if numbers else "")


def links(program: str) -> tuple[Link, ...]:
    """The steps of a program. ShapeError for what is none."""
    found = []
    for text in program.split("; "):
        m = _STEP.fullmatch(text)
        expect(m is not None and m[1] in OPS and OPS[m[1]].elementwise, f"no step: {text!r}")
        assert m is not None
        pairs = (p.split("=") for p in (m[3] or "").split())
        found.append(Link(m[1], tuple(m[2].split(", ")), {k: float(v) for k, v in pairs}))
    return tuple(found)


def _letter(i: int) -> str:
    return chr(ord("a") + i)


def _rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    expect(
        0 < len(sources) <= MOST_SOURCES, f"{len(sources)} sources, expected 1 to {MOST_SOURCES}"
    )
    steps = links(str(attrs.get("program")))
    known = {_letter(i): s for i, s in enumerate(sources)}
    for i, step in enumerate(steps):
        expect(set(step.args) <= set(known), f"{step}: known are {', '.join(known)}")
        meta = OPS[step.op].infer([known[a] for a in step.args], step.attrs)
        known[str(i)] = Tensor(
            str(i), meta.shape, meta.dtype, sources[0].kind, (0,) * len(meta.shape)
        )
    idle = set(map(_letter, range(len(sources)))) - {a for step in steps for a in step.args}
    expect(not idle, f"no step takes {', '.join(sorted(idle))}")
    for s in sources:
        plain_float(s)
        repeats_into(s, known[str(len(steps) - 1)])
    return Meta(meta.shape, meta.dtype)


def _reference(*arrays: Array, program: str) -> Array:
    known = {_letter(i): a for i, a in enumerate(arrays)}
    steps = links(program)
    for i, step in enumerate(steps):
        values = [known[a] for a in step.args]
        known[str(i)] = f32(OPS[step.op].reference(*values, **step.attrs))
    return known[str(len(steps) - 1)]


CHAIN = register(
    OpSpec(
        "chain",
        infer=rule("chain", "source+", _rule),
        reference=_reference,
        inplace_ok=tuple(range(MOST_SOURCES)),
        elementwise=True,
        examples=(
            Example((Arg((3, 5)), Arg((5,))), {"program": "mul(a, b); silu(0); add(1, a)"}),
            Example(
                (Arg((2, 3, 37)), Arg((2, 3, 37)), Arg((3, 1))),
                {"program": "swiglu(a, b); scale(0){scale=0.5 bias=1.0}; sub(1, c)"},
            ),
            Example((Arg((1, 1)),), {"program": "tanh(a); exp(0)"}),
            Example((Arg((0, 4)),), {"program": "tanh(a); exp(0)"}),
            Example((Arg((3, 5), F16),), {"program": "tanh(a); exp(0)"}, tolerance=2e-3),
        ),
        doc="chain(sources, program): ops of elements, one after the other.",
    )
)


def joined(t: Tensor, lonely: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> Tensor | None:
    """`t` with the ops of elements that only it reads, as one chain; None where there are none.

    `made` holds the chains of those ops by their names.
    """
    if not _fits(t):
        return None
    sources: list[Tensor] = []
    steps: list[Link] = []
    own: list[str] = []
    for s in t.sources:
        inner = made.get(s.name, s)
        inside = lonely.get(s.name) is t and _fits(s) and s.shape == t.shape
        own.append(_inline(inner, sources, steps) if inside else _source(s, sources))
    if not steps:
        return None
    _append(t, own, steps)
    if len(steps) > MOST_STEPS or len(sources) > MOST_SOURCES:
        return None
    return apply("chain", *sources, name=t.name, program="; ".join(map(str, steps)))


def _fits(t: Tensor) -> bool:
    """Whether a float32 op of elements, whose other attributes are numbers."""
    good = t.spec is not None and t.spec.elementwise
    numbers = all(isinstance(v, int | float) for v in t.attrs.values())
    return good and t.dtype is F32 and (numbers or t.op == "chain")


def _source(s: Tensor, sources: list[Tensor]) -> str:
    if all(s is not old for old in sources):
        sources.append(s)
    return _letter(next(i for i, old in enumerate(sources) if old is s))


def _inline(t: Tensor, sources: list[Tensor], steps: list[Link]) -> str:
    """Put the steps of `t` behind those there are; names its result."""
    _append(t, [_source(s, sources) for s in t.sources], steps)
    return str(len(steps) - 1)


def _append(t: Tensor, names: Sequence[str], steps: list[Link]) -> None:
    """The steps of `t`, a chain or a single op, whose sources have these names."""
    if t.op != "chain":
        attrs = {k: float(v) for k, v in t.attrs.items() if isinstance(v, int | float)}
        steps.append(Link(t.op, tuple(names), attrs))
        return
    first = len(steps)
    known = {_letter(i): name for i, name in enumerate(names)}
    for link in links(str(t.attrs["program"])):
        args = tuple(known[a] if a in known else str(int(a) + first) for a in link.args)
        steps.append(Link(link.op, args, link.attrs))


def chain(*sources: Tensor, program: str, name: str = "") -> Tensor:
    """Ops of elements one after the other, as `program` says; all plain float. No ggml peer.

    Sources repeat into the result's shape. Errors: ShapeError for a program that is none.
    """
    return apply("chain", *sources, name=name, program=program)
