"""Random graphs of every op of the registry, with their values, and worlds to run them in.

A graph grows by calls of ops as their examples show them, with sizes taken from tensors that are
there, so that operands are shared, viewed and overwritten; its values are computed by the NumPy
references while it grows. How far a kernel may be off is not guessed from the ops: the references
run again with noise on every result, as large as the ops' own tolerances, and what that moves is
allowed. No test is in here.

Legend: r source of randomness, pool the tensors made so far, root the tensor that owns the bytes.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from fuzz_motifs import MOTIFS, ROUNDED, SIZES, coarse

from ggraph import ops
from ggraph.dtype import A8, DType
from ggraph.errors import GraphError, InputError, ShapeError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import Bytes, compute, encode, raw_view, read, to_storage
from ggraph.tensor import OPS, Arg, Array, Attr, Example, Kind, OpSpec, Tensor, apply, leaf

LARGEST = 1 << 14  # elements of a tensor
HUGE = 1e4  # values beyond are no test of anything but overflow
NOISE = {"f32": 2e-6, "f64": 1e-7, **ROUNDED}
OWN = frozenset({"copy"})  # ops that planning alone may make


@dataclass
class Grown:
    """A graph in the making. `memory` holds the bytes of each root by identity."""

    r: random.Random
    pool: list[Tensor] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)  # logical values of all leaves
    memory: dict[int, Array] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # roots that are overwritten
    noise: dict[str, float] = field(default_factory=dict)  # by name: relative to the largest value
    ordered: set[str] = field(default_factory=set)  # leaves whose values hang on their place
    made: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # all of them: identities must not come again

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def leaf(self, arg: Arg, kind: Kind | None = None) -> Tensor:
        """A new leaf filled as `arg` asks. GraphError for indices into nothing."""
        if arg.fill == "ids:0" and 0 not in arg.shape:
            raise GraphError("indices into nothing")
        kinds = [Kind.INPUT, Kind.INPUT, Kind.WEIGHT, Kind.STATE]
        if arg.dtype is A8:
            kinds = [Kind.INPUT]
        if arg.fill.startswith("parents"):  # a state begins with zeros, which are no parents
            kinds = [Kind.INPUT, Kind.WEIGHT]
        chosen = kind or self.r.choice(kinds)
        t = leaf(chosen, f"{chosen.value[0]}{len(self.feeds)}", arg.shape, arg.dtype)
        rng = np.random.default_rng(self.r.randrange(1 << 30))
        self.kept.append(t)
        if arg.fill.startswith("parents"):
            self.ordered.add(t.name)
        self.feeds[t.name] = examples.rounded(examples.values(arg, rng), t)
        self.memory[id(t)] = np.frombuffer(to_storage(self.feeds[t.name], t).tobytes(), np.uint8)
        if arg.fill in ("normal", "positive"):
            self.pool.append(t)
        return t

    def add(self, t: Tensor, tolerance: float) -> Tensor:
        """Take `t` in with its value. GraphError for a value that no kernel could be held to."""
        self.kept.append(t)
        if t.size > LARGEST or id(t.root) in self.gone:
            raise GraphError("too large, or a reader of what is gone")
        if not t.is_view:
            old = t.overwritten
            if old is not None and (old.root.kind in (Kind.INPUT, Kind.WEIGHT)):
                raise GraphError("overwrites what nothing may")
            space = np.zeros(t.nbytes, np.uint8)
            if old is not None:
                space = self.memory[id(old.root)].copy()
            compute(Bytes(t, space), [Bytes(s, self.memory[id(s.root)]) for s in t.sources])
            value = read(t, space)
            if t.dtype.is_float and value.size and not np.abs(value).max() < HUGE:
                raise GraphError("not finite")
            self.memory[id(t)] = space
            if old is not None:
                self.gone.add(id(old.root))
        self.noise[t.name] = max(tolerance, NOISE.get(t.dtype.name, 0.0))
        self.made.append(t)
        self.pool.append(t)
        return t

    def live(self) -> list[Tensor]:
        """Tensors whose bytes still stand."""
        return [t for t in self.pool if id(t.root) not in self.gone]

    def fitting(self, shape: Sequence[int], dtype: DType) -> Tensor | None:
        """A tensor of the pool with this shape: itself, or a window on or a reshape of another."""
        found = [t for t in self.live() if t.dtype is dtype]
        same = [t for t in found if t.shape == tuple(shape)]
        if same and self.chance(0.7):
            return self.r.choice(same[-4:] if self.chance(0.5) else same)
        count = prod(shape)
        larger = [t for t in found if t.size >= count > 0]
        if not larger or dtype.is_block:
            return None
        return self._window(self.r.choice(larger), tuple(shape))

    def _window(self, t: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        roll, n = self.r.random(), prod(shape)
        try:
            if roll < 0.3 and len(t.shape) == len(shape):
                spare = [a - b for a, b in zip(t.shape, shape, strict=True)]
                if min(spare, default=0) >= 0:
                    return self._named(ops.slice(t, [self.r.randint(0, s) for s in spare], shape))
            if roll < 0.5 and len(shape) > 1 and t.shape == (*shape[:-2], shape[-1], shape[-2]):
                return self._named(t.T)
            if roll < 0.8 and t.is_contiguous:
                return self._named(ops.view(t, shape, None, self.r.randint(0, t.size - n)))
            if t.size == n:
                return self._named(t.reshape(*shape))
        except ShapeError:
            return None
        return None

    def _named(self, t: Tensor) -> Tensor:
        return self.add(t.named(f"v{len(self.made)}"), 0.0)


def _sizes_of(example: Example) -> set[int]:
    return {n for a in example.args for n in a.shape if n > 1}


def _resized(r: random.Random, grown: Grown, spec: OpSpec, example: Example) -> Example:
    """The example with other sizes: those of a tensor that is there, and odd ones."""
    change: dict[int, int] = {}
    slots = [i for i, a in enumerate(example.args) if a.fill in ("normal", "positive")]
    if slots and grown.live():
        arg = example.args[r.choice(slots)]
        like = [t for t in grown.live() if len(t.shape) == len(arg.shape) and t.dtype is arg.dtype]
        if like:
            for old, new in zip(arg.shape, r.choice(like).shape, strict=True):
                change.setdefault(old, new)
    for n in _sizes_of(example):
        blocky = any(a.dtype.is_block and a.shape and a.shape[-1] == n for a in example.args)
        step = max((a.dtype.block for a in example.args if a.dtype.is_block), default=1)
        change.setdefault(n, step * r.choice((1, 2, 3)) if blocky else r.choice(SIZES))
    args = tuple(_changed(a, change) for a in example.args)
    attrs = {k: _attr(k, v, change) for k, v in example.attrs.items()}
    return Example(args, attrs, example.tolerance)


def _changed(arg: Arg, change: Mapping[int, int]) -> Arg:
    fill = re.sub(r"\d+", lambda m: str(change.get(int(m[0]), int(m[0]))), arg.fill)
    return Arg(tuple(change.get(n, n) for n in arg.shape), arg.dtype, fill)


def _attr(key: str, value: Attr, change: Mapping[int, int]) -> Attr:
    """Sizes that stand in attributes change as the shapes do."""
    if key in ("n_rot", "k", "sizes", "shape", "repeats") and isinstance(value, int | tuple):
        several = value if isinstance(value, tuple) else (value,)
        moved = tuple(change.get(n, n) if isinstance(n, int) else n for n in several)
        return moved if isinstance(value, tuple) else moved[0]
    return value


def _call(grown: Grown, spec: OpSpec, example: Example) -> None:
    """One call of an op over tensors that are there, or new leaves."""
    r, sources = grown.r, []
    for i, arg in enumerate(example.args):
        found = None
        if i == spec.overwrites:
            found = _whole(grown, arg) if grown.chance(0.7) else None
            sources.append(found if found is not None else grown.leaf(arg, Kind.STATE))
            continue
        if arg.fill == "normal" and grown.chance(0.8):
            alike = [s for s in sources if (s.shape, s.dtype) == (arg.shape, arg.dtype)]
            shared = alike and grown.chance(0.3)
            found = r.choice(alike) if shared else grown.fitting(arg.shape, arg.dtype)
        sources.append(found if found is not None else grown.leaf(arg))
    y = apply(spec.name, *sources, name=f"n{len(grown.made)}", **example.attrs)
    grown.add(y, max(example.tolerance, *map(coarse, sources), 0.0))


def _whole(grown: Grown, arg: Arg) -> Tensor | None:
    """A result or state of this shape that may be overwritten."""
    found = [
        t
        for t in grown.live()
        if (t.shape, t.dtype) == (arg.shape, arg.dtype)
        and t.root.kind in (Kind.STATE, Kind.COMPUTED)
        and t.is_contiguous
        and t.size == t.root.size
    ]
    return grown.r.choice(found) if found else None


def grow(seed: int, most: int = 14) -> Grown:
    """The graph of a seed, with its values: up to `most` calls."""
    r = random.Random(seed)
    grown = Grown(r)
    grown.leaf(Arg((r.choice(SIZES), r.choice((*SIZES, 32, 64)))), Kind.INPUT)
    specs = [s for n, s in sorted(OPS.items()) if n not in OWN]
    wanted = r.randint(1, most)
    for _ in range(3 * wanted):
        if len(grown.made) >= wanted:
            break
        _try(grown, r.choice(specs))
    return grown


def _try(grown: Grown, spec: OpSpec) -> None:
    """One step; what an op refuses is left."""
    r = grown.r
    pool, made, gone = len(grown.pool), len(grown.made), set(grown.gone)
    try:
        if grown.chance(0.25):
            r.choice(MOTIFS)(grown)
            return
        example = r.choice(spec.examples)
        if grown.chance(0.8):
            example = _resized(r, grown, spec, example)
        _call(grown, spec, example)
    except (GraphError, InputError, ValueError, ZeroDivisionError):
        del grown.pool[pool:], grown.made[made:]
        grown.gone = gone


def graph_of(grown: Grown) -> Graph | None:
    """The graph of what has grown: some ends as outputs, the rest in vain or for its effect.

    None where nothing was made, or where readers of an old value need the new one.
    """
    r = grown.r
    ends = [t for t in grown.made if id(t.root) not in grown.gone and t.dtype is not A8]
    if not ends:
        return None
    outputs = {t.name: t for t in {ends[-1].name: ends[-1], **_some(r, ends)}.values()}
    if grown.chance(0.1):
        outputs["twice"] = ends[-1]
    also = [t for t in grown.made if t.overwritten is not None or grown.chance(0.2)]
    try:
        return Graph.of(outputs, also=also, name="fuzzed")
    except GraphError as error:
        if "a reader of the old value" in str(error):
            return None
        raise


def _some(r: random.Random, ends: list[Tensor]) -> dict[str, Tensor]:
    return {t.name: t for t in r.sample(ends, min(len(ends), r.randint(0, 3)))}


def meaning(
    graph: Graph,
    values: Mapping[str, Array],
    states: Mapping[str, Array],
    noise: Mapping[str, float] | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Outputs and the states' last values, logical, by the references alone.

    With `noise` every float result is moved by up to that share of its largest value.
    """
    memory: dict[str, Array] = {}
    for t in graph:
        if t.is_view:
            continue
        if t.is_leaf:
            held = states.get(t.name, values.get(t.name))
            assert held is not None, t
            memory[t.name] = np.frombuffer(to_storage(held, t).tobytes(), np.uint8)
            continue
        old = t.overwritten
        space = np.zeros(t.nbytes, np.uint8) if old is None else memory[old.root.name].copy()
        compute(Bytes(t, space), [Bytes(s, memory[s.root.name]) for s in t.sources])
        if noise is not None and rng is not None and t.dtype.is_float and t.size:
            _disturb(t, space, noise.get(t.name, NOISE["f32"]), rng)
        memory[t.name] = space
    shown = {t.name: read(t, memory[t.root.name]).copy() for t in graph.outputs}
    last = {n: read(t, memory[t.root.name]).copy() for n, t in graph.updates.items()}
    return shown, last


def _disturb(t: Tensor, space: Array, share: float, rng: np.random.Generator) -> None:
    value = read(t, space).astype(np.float64)
    finite = np.isfinite(value)
    span = float(np.abs(value[finite]).max(initial=0.0))
    moved = value + np.where(finite, rng.uniform(-share, share, value.shape) * span, 0)
    raw = raw_view(t, space)
    raw[...] = encode(moved.astype(np.float32), t.dtype).reshape(raw.shape)


def other_feeds(grown: Grown, graph: Graph, seed: int) -> dict[str, Array]:
    """New values of the inputs, for a second run; indices are those of the first, turned."""
    rng = np.random.default_rng(seed)
    found = {}
    for t in graph.leaves(Kind.INPUT):
        held = grown.feeds[t.name]
        flat = rng.permutation(held.reshape(-1)).reshape(held.shape) if held.size else held
        found[t.name] = held if t.dtype.is_block or t.name in grown.ordered else flat
    return found
