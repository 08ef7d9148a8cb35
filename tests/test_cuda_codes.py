"""Rows in codes (src/parts.cuh), bit by bit, by whatever makes them."""

from collections.abc import Callable

import numpy as np
import pytest
from cuda_host import SIDE_BY_SIDE
from cuda_kit import (
    DEVICE,
    assert_codes,
    bytes_of,
    code_places,
    coded,
    codes,
    need_driver,
    opened,
    parts,
    place,
    room,
    run,
)
from test_order_offered import beside

from ggraph import ops
from ggraph.backends.cuda import attention, lowering
from ggraph.backends.cuda.lower import needs
from ggraph.backends.cuda.lowering import Lowering, codes_bytes, offered
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.device import RESULT, DeviceSpec, Need
from ggraph.dtype import F16
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Actor, Buffer, Command, Do, Plan
from ggraph.tensor import Array, Tensor, input, weight

pytestmark = need_driver
STALE = 0xAB
MOST = 2**19 - 1  # the largest code


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


def made_by_rows(rows: Array, order: int | None = None) -> Array:
    """What `code_rows` makes of them, and that it writes nothing else."""
    m, k = rows.shape
    backend = opened(16, order)
    x = input("x", rows.shape)
    source = place(backend, x, bytes_of(x, rows))
    nbytes = codes_bytes(x)
    target = backend.allocate(Buffer("codes", "cuda0", nbytes, 256))
    backend.write(target, 0, np.full(nbytes, STALE, np.uint8))
    low = Lowering(backend)
    low.per_element(
        "code_rows", rows.size // 4, x=low.at(Ref(x, source, 0)),
        codes=low.at(Scratch("codes", target, 0, nbytes)), k=k,
    )  # fmt: skip
    for step in low.steps:
        step(backend.driver.stream())
    backend.driver.synchronise()
    found = backend.read(target, 0, nbytes).view(np.uint32).copy()
    quads, pairs = code_places(m, k // 32)
    beside = np.ones(nbytes // 8, bool)
    beside[2 * quads] = beside[2 * quads + 1] = beside[pairs] = False
    assert (found.reshape(-1, 2)[beside].view(np.uint8) == STALE).all()
    backend.close()
    return found


def numbers(made: Array) -> Array:
    """The values that words say, by the definition of a code."""
    rows, groups = made.shape[:2]
    split = {
        name: np.ascontiguousarray(words).view(kind).reshape(rows, groups, 4, 4)
        for name, words, kind in (
            ("high", made[:, :, 0, :, 0], np.int8), ("high 16", made[:, :, 0, :, 1], np.int8),
            ("middle", made[:, :, 0, :, 2], np.uint8), ("middle 16", made[:, :, 0, :, 3], np.uint8),
            ("low", made[:, :, 1, :, 0], np.uint8), ("low 16", made[:, :, 1, :, 1], np.uint8),
        )
    }  # fmt: skip
    code = [
        sum(f * split[n + end].astype(np.int64)
            for f, n in ((65536, "high"), (256, "middle"), (1, "low")))
        for end in ("", " 16")
    ]  # fmt: skip
    unit = np.ascontiguousarray(made[:, :, 1, :1, 2]).view(np.float32)[..., None]
    both = np.stack(code, axis=2).reshape(rows, groups, 32) * unit[..., 0].astype(np.float64)
    return both.reshape(rows, -1)


def test_codes_say_what_the_values_are() -> None:
    """To half a unit, which the largest of 32 columns is 2^19 - 1 of."""
    rows = normal(5, 96) * np.float32(10.0) ** np.arange(-2, 3, dtype=np.float32)[:, None]
    made, pairs = codes(rows)
    most = np.abs(rows.reshape(5, 3, 32)).max(axis=2).repeat(32, axis=1)
    assert (np.abs(numbers(made) - rows) <= most / MOST * 0.51).all()
    assert (made[:, :, 1, :, 2:] == pairs[:, :, :1]).all()
    unit, *sums = np.moveaxis(pairs.view(np.float32).reshape(5, 3, 4), 2, 0)
    groups = numbers(made).reshape(5, 3, 32)
    for found, shown in zip(sums, (np.s_[:], np.s_[:16], np.s_[16:]), strict=True):
        assert np.allclose(found, groups[..., shown].sum(axis=2), rtol=1e-6)
    assert (unit == (most[:, ::32] / np.float32(MOST)).astype(np.float32)).all()


@pytest.mark.parametrize("m", [1, 3, 8, 9, 17])
@pytest.mark.parametrize("k", [32, 96, 4096])
def test_rows_are_coded(m: int, k: int) -> None:
    rows = normal(m, k)
    orders = (None,) if DEVICE else (0, 1, SIDE_BY_SIDE)
    for made in (made_by_rows(rows, order) for order in orders):
        assert_codes(made, rows, f"{m} x {k}")


def test_numbers_at_the_edge_are_coded() -> None:
    """Each in a row of its own, beside usual ones, and alone."""
    edges = [0.0, -0.0, 1e-35, -1e-35, 1e-30, 9e-31, 1e38, -3.4e38, np.nan, np.inf, -np.inf, 1e-45]
    rows = normal(2 * len(edges), 96)
    for i, edge in enumerate(edges):
        rows[2 * i, 40] = edge
        rows[2 * i + 1] = edge
    rows[-1, ::2] = np.nan  # both
    rows[-1, 1::2] = np.inf
    made = made_by_rows(rows)
    assert_codes(made, rows, "edges")
    sums = coded(made, len(rows), 3)[1].view(np.float32)[:, :, 0, 1]
    none = ~np.isfinite(rows.reshape(len(rows), 3, 32)).all(axis=2)
    assert np.isnan(sums[none]).all() and not np.isnan(sums[~none]).any()


def test_a_tie_goes_to_the_even_code() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :5] = MOST, 0.5, 1.5, -2.5, -0.5  # the unit is 1
    made = made_by_rows(row)
    assert_codes(made, row, "ties")
    found = numbers(coded(made, 1, 1)[0])
    assert found[0, :5].tolist() == [MOST, 0, 2, -2, 0]


@pytest.mark.parametrize("n", [32, 96, 1056, 2080, 4096, 9216])
@pytest.mark.parametrize("start", [0, 1])
def test_a_norm_gives_codes(n: int, start: int) -> None:
    """`run` compares what is given with the value, here and below; rows of many warps, whose last
    have no more than some lanes; rows that begin anywhere, which another kernel takes."""
    held = input("x", (9 * n + start,))
    x = ops.view(held, (9, n), (n, 1), start)
    y = ops.rms_norm(x, 1e-5, name="y")
    assert any(need.name == "codes" for need in needs(y))
    run(y, {"x": bytes_of(held, normal(*held.shape))})


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (9, 544), (2, 5, 64), (17, 4096)])
@pytest.mark.parametrize("op", [ops.add, ops.swiglu])
def test_pairs_give_codes(shape: tuple[int, ...], op: Callable[..., Tensor]) -> None:
    """Also where the last block's last warp has not a value in every lane."""
    a, b = input("a", shape), input("b", shape)
    y = op(a, b, name="y")
    assert [need.name for need in needs(y)] == ["parts", "codes"]
    given = normal(2 * shape[0], *shape[1:])
    run(y, {"a": bytes_of(a, given[: shape[0]]), "b": bytes_of(b, given[shape[0] :])})


def attended(rows: int, heads: int, v_dim: int) -> tuple[Tensor, dict[str, Array]]:
    shapes = {"q": (rows, heads, 64), "k": (70, 2, 64), "v": (70, 2, v_dim)}
    q, k, v = (input(n, s, F16) if n != "q" else input(n, s) for n, s in shapes.items())
    stored = {t.name: bytes_of(t, normal(*t.shape)) for t in (q, k, v)}
    return ops.flash_attn(q, k, v, scale=0.125, name="y"), stored


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("v_dim", [32, 64, 160, 512])
def test_attention_gives_codes(rows: int, v_dim: int) -> None:
    """Of all heads of a token as one row."""
    y, stored = attended(rows, 4, v_dim)
    (need,) = (n for n in needs(y) if n.name == "codes")
    assert need == lowering.coded(y, RESULT, 4 * v_dim) and need.how == f"[{rows}x{4 * v_dim}]"
    run(y, stored)


def test_attention_in_slices_gives_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice begins amid eight rows."""
    y, stored = attended(11, 4, 64)
    monkeypatch.setattr(attention, "PART_BYTES", 3 * attention._slice(y)[1] // 11)
    assert attention._slice(y)[0] == 3
    run(y, stored)


def test_only_whole_groups_are_offered() -> None:
    """Half a group of a head would be another warp's."""
    assert [n.name for n in needs(attended(2, 4, 48)[0])] == ["splits", "lists", "parts"]
    assert [n.name for n in offered(input("x", (3, 36)))] == ["parts"]
    assert offered(input("x", (3, 34))) == () == offered(input("x", (3, 64), F16))


def test_bytes_are_of_whole_groups_of_rows() -> None:
    assert codes_bytes(input("x", (2, 3, 64))) == 2 * 72 * 16
    assert codes_bytes(input("x", (9, 64))) == 2 * 2 * 72 * 16
    assert codes_bytes(input("x", (2, 3, 64)), 192) == 6 * 72 * 16
    assert codes_bytes(input("x", (0, 64))) == codes_bytes(input("x", (4, 0))) == 0


@pytest.mark.parametrize("asked", [(), ("parts",), ("codes",), ("parts", "codes")])
def test_any_of_two_offers_is_made_where_it_is_asked_for(asked: tuple[str, ...]) -> None:
    """And no other, by one norm; a product of rows of another length makes its own."""
    found = beside(planned(asked, 64), "#")
    made = {"parts": "n#parts.0", "codes": "n#codes[2x64].0"}
    assert found["n"] == ([], [made[name] for name in ("parts", "codes") if name in asked])
    assert found["y"] == ([made[name] for name in asked], [])


def test_rows_of_another_length_are_coded_by_who_reads_them() -> None:
    found = beside(planned(("parts", "codes"), 32), "#")
    assert found["n"] == ([], ["n#parts.0"])
    assert found["y"] == (["n#parts.0"], ["n#codes[4x32].0"])


def planned(asked: tuple[str, ...], k: int) -> Plan:
    """A product of a norm of two rows of 64, as rows of k, that asks for these."""

    def wanted(t: Tensor) -> tuple[Need, ...]:
        if t.op != "mul_mat":
            return needs(t)
        x = t.sources[1]
        both = Need("parts", x.nbytes, (1,), flat=True), lowering.coded(x, 1)
        return tuple(need for need in both if need.name in asked)

    n = ops.rms_norm(input("x", (2, 64)), name="n")
    y = ops.mul_mat(weight("w", (4, k)), n.reshape(128 // k, k), name="y")
    spec = DeviceSpec("d", "sim", launch_s=0, needs=wanted)
    return make_plan(Graph.of({"y": y}), [spec], Options(rewrites=False)).plan


@pytest.mark.parametrize("start", [0, 1])
def test_a_norm_gives_what_is_asked_for_alone(start: int) -> None:
    """Either without the other, and neither; rows that begin anywhere are read back behind a
    barrier."""
    held = input("x", (3 * 64 + start,))
    x = ops.view(held, (3, 64), (64, 1), start)
    y = ops.rms_norm(x, 1e-5, name="y")
    for asked in ((), ("parts",), ("codes",)):
        backend = opened(16)
        source = place(backend, held, bytes_of(held, normal(*held.shape)))
        target = place(backend, y)
        wanted = [n for n in needs(y) if n.name in asked]
        beside = {n.key: room(backend, n) for n in wanted}
        launch = Launch(
            Command(Do.LAUNCH, Actor("cuda0", 0), "y", "y"), Ref(y, target, 0),
            (Ref(x, source, x.offset),), beside,
        )  # fmt: skip
        backend.submit(0, backend.lower([launch]))
        backend.synchronise()
        value = backend.read(target, 0, y.nbytes).view(np.float32).reshape(3, 64)
        assert np.isfinite(value).all()
        for need in wanted:
            made = backend.read(beside[need.key].memory, 0, need.nbytes).view(np.uint32)
            if need.name == "codes":
                assert_codes(made, value, "alone")
            else:
                assert made.tobytes() == parts(value).tobytes()
        backend.close()
