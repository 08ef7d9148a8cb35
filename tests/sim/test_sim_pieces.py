"""In place over bytes that a kernel still reads: the simulator's numbers show it, for every op.

The verdict is the record's (`inplace_ok`, `elementwise`); here each op is run with its result on
each of its sources, alone and with another operand on the same bytes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends.protocol import Launch, Memory, Ref
from ggraph.backends.sim.pieces import run_launch
from ggraph.dtype import I64
from ggraph.ops.evaluate import read, reference
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.tensor import Array, Tensor, input, weight
from ggraph.verify.derived import replaceable

E = 6
X = input("x", (E, E))
W = weight("w", (E, E))


def in_place(t: Tensor, over: str, values: dict[str, Array]) -> tuple[Array, Array]:
    """`t` computed with its result on the bytes of root `over`, and what it should be."""
    roots = {s.root.name: s.root for s in t.sources}
    memory = {
        n: Memory(Buffer(n, "d", r.nbytes, 64), values[n].reshape(-1).view(np.uint8).copy())
        for n, r in roots.items()
    }
    given = [read(s, memory[s.root.name].handle).copy() for s in t.sources]
    right = reference(t, given)
    sources = tuple(Ref(s, memory[s.root.name], s.offset) for s in t.sources)
    command = Command(Do.LAUNCH, Actor("d"), t.name, t.name)
    run_launch(Launch(command, Ref(t, memory[over], 0), sources))
    got: Array = read(t, memory[over].handle).copy()
    return got, right


CASES: dict[str, Tensor] = {
    "add": ops.add(X, W),
    "add twice": ops.add(X, X),
    "add transposed": ops.add(X, X.T),
    "add shifted": ops.add(ops.rows(X, 0, E - 1), ops.rows(X, 1, E - 1)),
    "add shifted back": ops.add(ops.rows(X, 1, E - 1), ops.rows(X, 0, E - 1)),
    "add a row": ops.add(X, ops.rows(X, 0, 1)),
    "scale": ops.scale(X, 2.0),
    "rms_norm": ops.rms_norm(X, eps=1e-5),
    "soft_max": ops.soft_max(X),
    "product": ops.mul_mat(W, X),
    "product with itself": ops.mul_mat(X, X),
    "residual": ops.mul_mat_add(W, X, X),
    "residual apart": ops.mul_mat_add(W, weight("v", (E, E)), X),
    "gate": ops.swiglu(X, X),
    "transposed": ops.cont(X.T),
    "turned": ops.roll(X, (0, 1)),
    "one row": ops.mul_mat_add(W, ops.rows(X, 0, 1), ops.rows(X, 0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_wrong_exactly_where_the_record_forbids_it(name: str) -> None:
    t = replace(CASES[name], name="t")
    rng = np.random.default_rng(0)
    values = {s.root.name: rng.standard_normal(s.root.shape, np.float32) for s in t.sources}
    got, right = in_place(t, "x", values)
    same = got.tobytes() == np.asarray(right, got.dtype).tobytes()
    assert same == ("x" in replaceable(t)), f"{name}: {np.abs(got - right).max()}"


def test_an_overwritten_tensor_read_by_another_source_shows() -> None:
    cache, ids = input("c", (4, E)), input("ids", (2,), I64)
    rng = np.random.default_rng(0)

    def moved(rows: Sequence[int], source: Tensor) -> bool:
        sound = ops.set_rows(cache, input("y", (2, E)), ids)
        t = replace(sound, name="t", sources=(cache, source, ids))
        values = {
            "c": rng.standard_normal((4, E), np.float32),
            "y": rng.standard_normal((2, E), np.float32),
            "ids": np.array(rows, np.int64),
        }
        got, right = in_place(t, "c", values)
        return bool(np.array_equal(got, right))

    assert moved((2, 3), input("y", (2, E)))
    assert not moved((1, 2), ops.rows(cache, 0, 2))
