"""The registry times its examples: reference against oracle, and declarations tested for honesty.

Each test runs over every registered op, so a new op is under test as soon as it has its record.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from oracles import ORACLES

import ggraph.ops as ops
from ggraph.dtype import A8, F32, I32
from ggraph.errors import ShapeError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import Bytes, compute, evaluate, read, reference, to_storage, write
from ggraph.tensor import OPS, Array, Example, OpSpec, Tensor, apply, input

CASES = list(examples.every())
NAMES = [f"{spec.name}-{i}" for spec, i, _ in CASES]
every_example = pytest.mark.parametrize(("spec", "i", "example"), CASES, ids=NAMES)
every_op = pytest.mark.parametrize("spec", [OPS[n] for n in sorted(OPS)], ids=sorted(OPS))


@pytest.fixture(autouse=True)
def _no_numpy_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def fed(spec: OpSpec, example: Example, seed: int = 0) -> list[Array]:
    """The example's logical arrays, that nobody may write to."""
    arrays = list(examples.feeds(spec, example, seed).values())
    for a in arrays:
        a.flags.writeable = False
    return arrays


def meaning(spec: OpSpec, example: Example, arrays: list[Array], result: Tensor) -> Array:
    """What the oracle says, rounded to the result's dtype."""
    exact = ORACLES[spec.name](*arrays, **example.attrs)
    assert exact.shape == result.shape, f"{spec.name}: the oracle's shape is {exact.shape}"
    return examples.rounded(exact.astype(np.float32) if result.dtype.is_float else exact, result)


def tight(example: Example, result: Tensor) -> float:
    """The example's tolerance is for kernels; references only differ by the storage's rounding."""
    return min(example.tolerance, 2e-5) if result.dtype is F32 else example.tolerance


def assert_near(got: Array, wanted: Array, tolerance: float, what: str) -> None:
    """Equal shapes, integers and infinities; floats within `tolerance` of the largest."""
    assert got.shape == wanted.shape, f"{what}: {got.shape}, expected {wanted.shape}"
    if wanted.dtype.kind == "i":
        assert got.dtype.kind == "i" and np.array_equal(got, wanted), f"{what}: {got} != {wanted}"
        return
    finite = np.isfinite(wanted)
    assert np.array_equal(got[~finite], wanted[~finite], equal_nan=True), f"{what}: infinities"
    span = float(np.abs(wanted[finite]).max(initial=1e-30))
    error = float(np.abs(got[finite] - wanted[finite]).max(initial=0))
    assert error <= tolerance * span, f"{what}: off by {error} where the largest is {span}"


@every_op
def test_a_record_is_complete(spec: OpSpec) -> None:
    assert spec.examples, f"{spec.name} has no example"
    assert spec.doc.startswith(f"{spec.name}("), f"{spec.name}: doc {spec.doc!r}"
    assert spec.name in ORACLES, f"{spec.name} has no oracle"
    assert spec.ggml is None or spec.ggml.isupper(), f"{spec.name}: ggml peer {spec.ggml!r}"
    function = getattr(ops, spec.name)
    assert spec.name in ops.__all__ and len(function.__doc__) > 30, f"{spec.name}: DSL function"


@every_op
def test_examples_have_size_one_and_size_zero(spec: OpSpec) -> None:
    sizes = {examples.build(spec, e).size for e in spec.examples}
    sizes |= {s.size for e in spec.examples for s in examples.leaves(spec, e)}
    whole = spec.name.endswith("quantise")  # their smallest row is one block
    assert {0, A8.block if whole else 1} <= sizes, f"{spec.name}: sizes {sorted(sizes)}"


def test_no_oracle_is_left_over() -> None:
    assert set(ORACLES) == set(OPS)


@every_example
def test_reference_agrees_with_the_oracle(spec: OpSpec, i: int, example: Example) -> None:
    y = examples.build(spec, example)
    for seed in range(3):
        arrays = fed(spec, example, seed)
        wanted = meaning(spec, example, arrays, y)
        names = [t.name for t in examples.leaves(spec, example)]
        got = evaluate(Graph.of({"y": y}), dict(zip(names, arrays, strict=True)))["y"]
        assert_near(got, wanted, tight(example, y), f"{spec.name} example {i} seed {seed}")


@every_example
def test_strided_sources_give_the_same(spec: OpSpec, i: int, example: Example) -> None:
    """Each source in turn becomes a view with exchanged axes of a leaf that holds it so."""
    names = [t.name for t in examples.leaves(spec, example)]
    arrays = dict(zip(names, fed(spec, example), strict=True))
    for slot, t in enumerate(examples.leaves(spec, example)):
        if slot == spec.overwrites or len(t.shape) < 2 or (t.dtype.is_block and len(t.shape) < 3):
            continue
        axes = (1, 0, *range(2, len(t.shape)))
        turned = input(t.name, [t.shape[a] for a in axes], t.dtype)
        sources = list(examples.leaves(spec, example))
        sources[slot] = ops.permute(turned, *axes)
        try:
            y = apply(spec.name, *sources, name="y", **example.attrs)
        except ShapeError as e:
            assert "not contiguous" in str(e)
            continue
        given = {**arrays, t.name: arrays[t.name].transpose(axes)}
        wanted = meaning(spec, example, list(arrays.values()), y)
        got = evaluate(Graph.of({"y": y}), given)["y"]
        assert_near(got, wanted, tight(example, y), f"{spec.name} example {i} strided {slot}")


@every_example
def test_only_what_is_declared_is_written(spec: OpSpec, i: int, example: Example) -> None:
    """References get read-only arrays, but for the one they say they overwrite."""
    y = examples.build(spec, example)
    arrays = fed(spec, example)
    if spec.overwrites is not None:
        arrays[spec.overwrites] = arrays[spec.overwrites].copy()
    result = reference(y, arrays)
    if spec.overwrites is not None:
        assert result is arrays[spec.overwrites], f"{spec.name}: must return what it overwrites"
        assert y.shape == y.sources[spec.overwrites].shape
        assert y.dtype is y.sources[spec.overwrites].dtype


@every_example
def test_a_view_shows_the_bytes_of_its_source(spec: OpSpec, i: int, example: Example) -> None:
    """What the strides of a view show is what its reference says, and no byte is copied."""
    y = examples.build(spec, example)
    if spec.view_of is None:
        assert y.view_src is None and y.is_contiguous
        return
    source = y.sources[spec.view_of]
    assert y.view_src is source.root
    values = fed(spec, example)[spec.view_of]
    memory = _stored(source, values)
    shown = read(y, memory)
    assert np.array_equal(shown, reference(y, [values])), f"{spec.name} example {i}"
    if y.size and not y.dtype.is_block and y.dtype.numpy in ("<f4", "<i4"):
        assert np.shares_memory(shown, memory)
        assert np.shares_memory(reference(y, [values]), values)
    reach = {at for start, stop in y.byte_ranges() for at in range(start, stop)}
    assert not reach or max(reach) < source.root.nbytes


def _stored(t: Tensor, values: Array) -> Array:
    """The bytes of a contiguous tensor that holds `values`."""
    return np.frombuffer(to_storage(values, t).tobytes(), np.uint8).copy()


GUARD = 64  # poisoned bytes on both sides of a result


@every_example
def test_results_stay_within_their_bytes(spec: OpSpec, i: int, example: Example) -> None:
    """A result fills exactly its own bytes, whatever they held before."""
    y = examples.build(spec, example)
    if y.is_view or y.size == 0:
        return
    memory = np.full(y.nbytes + 2 * GUARD, 0xA5, np.uint8)
    places = [Bytes(s, _stored(s, v)) for s, v in zip(y.sources, fed(spec, example), strict=True)]
    if spec.overwrites is not None:
        memory[GUARD:-GUARD] = places[spec.overwrites].memory
        places[spec.overwrites] = Bytes(y.sources[spec.overwrites], memory, GUARD)
    before = [p.memory.copy() for p in places]
    compute(Bytes(y, memory, GUARD), places)
    wanted = meaning(spec, example, fed(spec, example), y)
    assert_near(read(y, memory, GUARD), wanted, tight(example, y), f"{spec.name} example {i}")
    assert (memory[:GUARD] == 0xA5).all() and (memory[-GUARD:] == 0xA5).all()
    for slot, (p, old) in enumerate(zip(places, before, strict=True)):
        assert slot == spec.overwrites or np.array_equal(p.memory, old), f"source {slot} changed"


@every_example
def test_in_place_gives_the_same(spec: OpSpec, i: int, example: Example) -> None:
    """The promise of `inplace_ok`: the result may replace a source of the same layout."""
    y = examples.build(spec, example)
    for slot in (i for i in spec.inplace_ok if i < len(y.sources)):
        source = y.sources[slot]
        if (source.shape, source.dtype, source.strides) != (y.shape, y.dtype, y.strides):
            continue
        stored = [_stored(s, v) for s, v in zip(y.sources, fed(spec, example), strict=True)]
        apart = np.zeros(y.nbytes, np.uint8)
        compute(Bytes(y, apart), [Bytes(s, m) for s, m in zip(y.sources, stored, strict=True)])
        compute(
            Bytes(y, stored[slot]), [Bytes(s, m) for s, m in zip(y.sources, stored, strict=True)]
        )
        assert np.array_equal(stored[slot], apart), f"{spec.name} example {i} in place of {slot}"


@every_example
def test_costs_are_finite_counts(spec: OpSpec, i: int, example: Example) -> None:
    y = examples.build(spec, example)
    cost = spec.cost(y)
    assert type(cost.flops) is int and type(cost.bytes) is int
    assert cost.flops >= 0 and cost.bytes >= 0
    assert (cost.bytes == 0) >= (spec.view_of is not None), "a view is free"


@every_op
def test_a_wrong_number_of_sources_is_a_shape_error(spec: OpSpec) -> None:
    example = spec.examples[0]
    sources = examples.leaves(spec, example)
    extra = input("extra", (1,))
    if spec.name not in ("concat", "mul_mats"):  # which take several
        says = "no step takes" if spec.name == "chain" else "expected the sources"
        with pytest.raises(ShapeError, match=rf"^{spec.name}\(.*{says}"):
            apply(spec.name, *sources, extra, **example.attrs)
    if sources:
        with pytest.raises(ShapeError, match=rf"^{spec.name}\("):
            apply(spec.name, **example.attrs)


@every_op
def test_missing_and_foolish_attributes_are_shape_errors(spec: OpSpec) -> None:
    for example in spec.examples:
        sources = examples.leaves(spec, example)
        for key in example.attrs:
            rest = {k: v for k, v in example.attrs.items() if k != key}
            with pytest.raises(ShapeError):
                apply(spec.name, *sources, **rest)
            with pytest.raises(ShapeError):
                apply(spec.name, *sources, **{**rest, key: ("no",)})  # type: ignore[dict-item]


@every_op
def test_integer_sources_are_refused_or_kept(spec: OpSpec) -> None:
    """An op on reals says so when it is given integers; an op that moves bytes keeps the type."""
    example = spec.examples[0]
    given = examples.leaves(spec, example)
    sources = [input(t.name, t.shape, I32) for t in given]
    try:
        y = apply(spec.name, *sources, **example.attrs)
    except ShapeError as e:
        assert "float" in str(e) or "expected" in str(e)
    else:
        assert not sources or y.dtype.name in ("i32", example.attrs.get("dtype"))


def test_writing_through_a_view_reaches_the_root() -> None:
    x = input("x", (2, 3))
    memory = np.zeros(x.nbytes, np.uint8)
    write(ops.transpose(x), memory, 0, np.arange(6, dtype=np.float32).reshape(3, 2))
    assert read(x, memory).tolist() == [[0, 2, 4], [1, 3, 5]]
