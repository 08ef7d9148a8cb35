"""Ops from outside with CUDA source: on the stand-in (or a GPU), against their NumPy meaning."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_kit import driver_of, need_driver
from test_cuda_nvrtc import need_nvrtc

from ggraph import Array, Graph, Session, dtypes, input, open_backend, register_op
from ggraph.backends.cuda import kernels, nvrtc
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.cuda.own import unit_of
from ggraph.errors import BackendError, GraphError
from ggraph.tensor import OPS, Arg, Example, Meta
from ggraph.testing import Differs, check_op

pytestmark = need_driver
PAGE = Path(__file__).parent.parent / "docs" / "library.md"
SMALL = (Example((Arg((3, 5)),)), Example((Arg((0, 4)),)), Example((Arg((2, 3, 37)),)))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`open_backend("cuda0")` opens the stand-in; what a test registers goes with it."""
    before = dict(OPS)
    monkeypatch.setattr("ggraph.backends.cuda.open_driver", lambda name: driver_of())
    yield
    OPS.clear()
    OPS.update(before)


def of_the_page() -> str:
    """The block of docs/library.md that registers an op with CUDA source."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    (code,) = [block for block in found if "cuda=" in block]
    return str(code)


def before() -> dict[str, Any]:
    """What earlier blocks of the page have imported."""
    return {
        "np": np,
        "register_op": register_op,
        "Arg": Arg,
        "Example": Example,
        "check_op": check_op,
    }


def test_the_op_of_the_page_runs_on_cuda() -> None:
    exec(compile(of_the_page(), str(PAGE), "exec"), before())
    found = check_op("swish", ("cuda0", "cpu", "sim0"))
    assert {c.device for c in found} == {"cuda0", "cpu", "sim0"} and all(c.compiled for c in found)
    assert max(c.error for c in found) < 1e-6


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_op_of_the_page_compiles_for_gpus(arch: str) -> None:
    need_nvrtc()
    exec(compile(of_the_page(), str(PAGE), "exec"), before())
    unit = unit_of(OPS["swish"])
    assert nvrtc.compile_source("swish.cu", unit.text, kernels.headers(), arch, "")


NEIGHBOURS = """
// The mean of a row's neighbours, which needs shapes and an attribute.
KERNEL blur(float *y, const float *x, const int *shift, Axes x_shape, i64 count, float weight) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 columns = x_shape.v[3], row = i / columns, column = i % columns;
  const i64 other = (column + shift[0] % columns + columns) % columns;
  y[i] = weight * x[i] + (1.0f - weight) * x[row * columns + other];
}
"""


def blur(x: Array, shift: Array, *, weight: float) -> Array:
    turned = np.roll(x, -int(shift[0]), -1)
    return np.asarray(weight * x + (1 - weight) * turned, np.float32)


def test_a_kernel_asks_for_shapes_and_attributes_by_name() -> None:
    args = (Arg((6, 40)), Arg((1,), dtypes.I32, "ids:7"))
    op = register_op("blur", blur, examples=[Example(args, {"weight": 0.25})], cuda=NEIGHBOURS)
    assert check_op("blur", ("cuda0",))[0].compiled
    x, shift = input("x", (300, 7)), input("s", (1,), "i32")
    graph = Graph.of({"y": op(op(x, shift, weight=0.5), shift, weight=0.25) + 1})
    session = Session({"cuda0": open_backend("cuda0")})
    session.prepare("k", graph)
    values = np.random.default_rng(0).standard_normal((300, 7), np.float32)
    places = np.array([3], np.int32)
    got = [session.run("k", {"x": values, "s": places})["y"] for _ in range(3)]  # captured, too
    session.close()
    once = blur(values, places, weight=0.5)
    assert all(np.allclose(g, blur(once, places, weight=0.25) + 1, atol=1e-6) for g in got)


NAMES = """
KERNEL mixed(float *kernel, const float *grid, const float *block, float type, float unit_,
             Axes grid_shape, float self) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < grid_shape.v[3]) kernel[i] = type * grid[i] + unit_ * block[i] + self;
}
"""


def test_names_of_operands_and_attributes_are_the_users_own() -> None:
    """Also those that functions of this package call theirs."""

    def mixed(grid: Array, block: Array, **given: Any) -> Array:
        return np.float32(given["type"]) * grid + np.float32(given["unit_"]) * block + given["self"]

    attrs = {"type": 0.5, "unit_": -2.0, "self": 1.0}
    example = Example((Arg((300,)), Arg((300,))), attrs)
    register_op("mixed", mixed, examples=[example], cuda=NAMES)
    (checked,) = check_op("mixed", ("cuda0",))
    assert checked.compiled and checked.error < 1e-6


def test_a_wrong_kernel_is_told_by_check_op() -> None:
    source = "KERNEL twice(float *y, const float *x, i64 count) { if (!threadIdx.x) y[0] = x[0]; }"
    register_op("twice", lambda x: 2 * x, examples=SMALL[:1], cuda=source)
    with pytest.raises(Differs, match="twice, example 0 on cuda0"):
        check_op("twice", ("cuda0",))


def test_what_a_kernel_does_not_take_goes_to_the_cpu() -> None:
    source = "KERNEL same(float *y, const float *x, i64 count) {}"
    op = register_op("same", lambda x: x, examples=SMALL, cuda=source)
    assert accepts(op(input("x", (3, 4)))) and not accepts(op(input("x", (3, 4), "f16")))
    assert not accepts(op(input("x", (3, 4)).T)) and not accepts(op(input("x", (1, 1, 1, 3, 4))))


def test_a_kernel_of_another_form_is_one_clear_error() -> None:
    def registered(cuda: str, **more: Any) -> Any:
        OPS.pop("odd", None)
        return register_op("odd", lambda x: x, examples=SMALL, cuda=cuda, **more)

    with pytest.raises(GraphError, match=re.escape("declares no `KERNEL odd(..)`")):
        registered("KERNEL other(float *y, const float *x) {}")
    with pytest.raises(GraphError, match="may not work in place"):
        registered("KERNEL odd(float *y, const float *x) {}", inplace=(0,))
    x = input("x", (3, 4))
    with pytest.raises(BackendError, match="pointers to the result and 1 sources, then of"):
        accepts(registered("KERNEL odd(float *y, i64 count) {}")(x))
    with pytest.raises(BackendError, match=r"odd\(y, x, size\): expected .* count, x_shape, y_sh"):
        accepts(registered("KERNEL odd(float *y, const float *x, i64 size) {}")(x))
    with pytest.raises(BackendError, match=r"kernel odd\(\): expected pointers"):
        accepts(registered("// KERNEL odd(float *y, const float *x)")(x))
    with pytest.raises(BackendError, match="kernel parameter 'short size': expected i64, int"):
        accepts(registered("KERNEL odd(float *y, const float *x, short size) {}")(x))


def test_a_shape_rule_that_fails_is_told() -> None:
    def rule(sources: Any, attrs: Any) -> Meta:
        return Meta(sources[1].shape)

    with pytest.raises(GraphError, match=r"odd: the rule for shapes fails on .*IndexError"):
        register_op("odd", lambda x: x, examples=SMALL, shape=rule)
    assert "odd" not in OPS
