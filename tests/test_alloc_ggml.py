"""`ggml` mode against the real allocator's numbers: random graphs, G0 to G5, A26."""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggraph.alloc.dyn import DynAllocator
from ggraph.alloc.ggml import Node, NodeList, Spot, plan_list
from ggraph.errors import AllocError

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(GOLDEN / f"ggml_alloc_{name}.jsonl.gz", "rt") as lines:
        yield from map(json.loads, lines)


def listed(d: dict[str, Any]) -> NodeList:
    tensors = tuple(
        Node(
            t["name"],
            t["op"],
            t["nbytes"],
            tuple(t["src"]),
            t["view_src"],
            (t["type"], *t["ne"], *t["nb"]),
            t["input"],
            t["output"],
            t["weight"],
        )
        for t in d["tensors"]
    )
    return NodeList(tensors, tuple(d["nodes"]), tuple(d["leafs"]))


@pytest.mark.parametrize(("name", "tensors"), [("offsets", 8703), ("clamp", 1225)])
def test_random_graphs_have_the_real_allocators_offsets(name: str, tensors: int) -> None:
    """Recorded from a CPU build of August 2026, and from 0.3.36: graphs with CLAMP."""
    checked = 0
    for d in golden(name):
        buffer = DynAllocator(d["alignment"])
        spots = plan_list(listed(d), [buffer])
        got = [s.at.offset if s.buffer >= 0 else None for s in spots]
        assert got == [t["offset"] for t in d["tensors"]], d["seed"]
        assert buffer.size == d["total"], d["seed"]
        checked += len(got)
    assert checked == tensors


class Lines:
    """Writes a node list as one would write ggml calls; sizes in bytes."""

    def __init__(self) -> None:
        self.tensors: list[Node] = []
        self.nodes: list[int] = []
        self.leafs: list[int] = []

    def index(self, name: str) -> int:
        return next(i for i, t in enumerate(self.tensors) if t.name == name)

    def leaf(self, name: str, nbytes: int, **flags: bool) -> None:
        self.leafs.append(len(self.tensors))
        self.tensors.append(Node(name, "NONE", nbytes, layout=nbytes, is_input=True, **flags))

    def op(self, name: str, op: str, nbytes: int, *sources: str, **more: Any) -> None:
        self.nodes.append(len(self.tensors))
        at = tuple(map(self.index, sources))
        more.setdefault("layout", nbytes)
        self.tensors.append(Node(name, op, nbytes, at, **more))

    def view(self, name: str, source: str, nbytes: int) -> None:
        root = self.tensors[self.index(source)].view_of
        self.op(
            name, "RESHAPE", nbytes, source, view_of=self.index(source) if root is None else root
        )

    def plan(self) -> tuple[int, dict[str, int]]:
        """Bytes of the buffer, and offsets by name."""
        buffer = DynAllocator(32)
        spots = zip(self.tensors, plan_list(self.list(), [buffer]), strict=True)
        return buffer.size, {t.name: s.at.offset for t, s in spots if s.buffer >= 0}

    def list(self) -> NodeList:
        return NodeList(tuple(self.tensors), tuple(self.nodes), tuple(self.leafs))


def test_g0_eagle3_head() -> None:
    g = Lines()
    g.leaf("tokens", 16)
    g.leaf("g", 1024)
    g.op("embd", "GET_ROWS", 1024, "tokens")
    for side, source in (("A", "embd"), ("B", "g")):
        g.op(f"rms{side}", "RMS_NORM", 1024, source)
        g.op(f"norm{side}", "MUL", 1024, f"rms{side}")
    g.op("concat", "CONCAT", 2048, "normA", "normB")
    g.op("Q", "MUL_MAT", 1024, "concat")
    g.op("K", "MUL_MAT", 512, "concat")
    g.op("V", "MUL_MAT", 512, "concat")
    g.op("KV", "CONCAT", 1024, "K", "V")
    g.op("attn", "MUL", 1024, "Q", "KV")
    g.op("resid", "ADD", 1024, "attn", "g")
    g.op("logits", "MUL_MAT", 2048, "resid", is_output=True)
    nbytes, at = g.plan()
    assert nbytes == 5152
    assert at == {
        "tokens": 0, "g": 32, "embd": 1056, "rmsA": 1056, "normA": 1056, "rmsB": 2080,
        "normB": 2080, "concat": 3104, "Q": 1056, "K": 2080, "V": 2592, "KV": 3104,
        "attn": 1056, "resid": 1056, "logits": 2080,
    }  # fmt: skip


@pytest.mark.parametrize("second", [False, True])
def test_g1_g2_two_chains(second: bool) -> None:
    g = Lines()
    g.leaf("x", 1024)
    if second:
        for c in "ab":
            g.op(f"{c}0", "MUL_MAT", 1024, "x")
            g.op(f"{c}_rms", "RMS_NORM", 1024, f"{c}0")
            g.op(f"{c}_mul", "MUL", 1024, f"{c}_rms")
            g.op(f"{c}1", "MUL_MAT", 1024, f"{c}_mul")
        g.op("cat", "CONCAT", 2048, "a1", "b1")
    else:
        for c in "ab":
            g.op(f"{c}0", "MUL_MAT", 1024, "x")
        for c in "ab":
            g.op(f"{c}_rms", "RMS_NORM", 1024, f"{c}0")
            g.op(f"{c}_mul", "MUL", 1024, f"{c}_rms")
        g.op("cat", "CONCAT", 2048, "a_mul", "b_mul")
    g.op("out", "MUL_MAT", 1024, "cat", is_output=True)
    nbytes, at = g.plan()
    assert nbytes == 5120
    if second:
        assert (at["a0"], at["a_rms"], at["b0"], at["b_rms"], at["b1"]) == (1024,) * 4 + (0,)
    else:
        assert [at[n] for n in ("a0", "a_mul", "b0", "b_mul", "out")] == [1024, 1024, 2048, 2048, 0]


def test_g3_the_second_branch_is_put_over_its_input() -> None:
    g = Lines()
    g.leaf("x", 1024)
    for c in "ab":
        g.op(f"{c}_rms", "RMS_NORM", 1024, "x")
        g.op(f"{c}_mul", "MUL", 1024, f"{c}_rms")
    g.op("sum", "ADD", 1024, "a_mul", "b_mul")
    nbytes, at = g.plan()
    assert nbytes == 2048
    assert (at["a_rms"], at["b_rms"]) == (1024, 0)


def test_g4_qwen3_fork_in_interleaved_order() -> None:
    g = Lines()
    g.leaf("x", 4096)
    g.leaf("pos", 4)
    g.leaf("idx", 8)
    g.op("rms", "RMS_NORM", 4096, "x")
    g.op("attn_norm", "MUL", 4096, "rms")
    heads = {"Q": 4096, "K": 1024, "V": 1024}
    for h, n in heads.items():
        g.op(f"{h}mul", "MUL_MAT", n, "attn_norm")
    for h in "QK":
        g.view(f"{h}heads", f"{h}mul", heads[h])
    for name, op, more in (
        ("rms", "RMS_NORM", ()),
        ("normW", "MUL", ()),
        ("rope", "ROPE", ("pos",)),
    ):
        before = {"rms": "heads", "normW": "rms", "rope": "normW"}[name]
        for h in "QK":
            g.op(f"{h}{name}", op, heads[h], f"{h}{before}", *more)
    g.op("store", "SET_ROWS", 0, "Krope", "idx", external=True)
    g.op("store_v", "SET_ROWS", 0, "Vmul", "idx", external=True)
    g.op("attn", "FLASH_ATTN_EXT", 4096, "Qrope")
    g.op("o", "MUL_MAT", 4096, "attn")
    g.op("res", "ADD", 4096, "o", "x", is_output=True)
    nbytes, at = g.plan()
    assert nbytes == 14400
    assert (at["attn_norm"], at["Qmul"], at["Kmul"], at["Vmul"]) == (4160, 8256, 12352, 13376)
    assert {at[f"Q{n}"] for n in ("rms", "normW", "rope")} == {4160}
    assert {at[f"K{n}"] for n in ("rms", "normW", "rope")} == {8256}
    assert at["attn"] == 8256


def test_g5_a_packed_gate_is_copied_onto_the_norm() -> None:
    g = Lines()
    g.leaf("x", 4096)
    g.op("rms", "RMS_NORM", 4096, "x")
    g.op("attn_norm", "MUL", 4096, "rms")
    for h, n in (("QG", 8192), ("K", 1024), ("V", 1024)):
        g.op(h, "MUL_MAT", n, "attn_norm")
    g.view("Q", "QG", 4096)
    g.view("G", "QG", 4096)
    g.op("gate", "CONT", 4096, "G")
    g.op("attn", "FLASH_ATTN_EXT", 4096, "Q", "K", "V")
    g.op("gated", "MUL", 4096, "attn", "gate")
    g.op("res", "ADD", 4096, "gated", "x", is_output=True)
    _, at = g.plan()
    assert at["gate"] == at["attn_norm"] == 4096


def test_a17_a_view_parent_is_never_replaced() -> None:
    g = Lines()
    g.leaf("x", 64)
    g.op("s", "MUL_MAT", 64, "x")
    g.view("r", "s", 64)
    g.op("n", "RMS_NORM", 64, "r")
    _, at = g.plan()
    assert at == {"x": 0, "s": 64, "n": 0}  # not 64, where it could be in place


def test_a18_the_tail_of_a_larger_parent_is_free_at_once() -> None:
    g = Lines()
    g.leaf("x", 32)
    g.op("big", "MUL_MAT", 200, "x", layout="same")
    g.op("small", "SCALE", 40, "big", layout="same")
    g.op("next", "MUL_MAT", 128, "small")
    nbytes, at = g.plan()
    assert at == {"x": 0, "big": 32, "small": 32, "next": 96}  # 32 + align(40, 32)
    assert plan_list(g.list(), [DynAllocator(32)])[2].in_place_of == 1
    assert nbytes == 256


def test_a18_a_larger_child_is_an_error() -> None:
    g = Lines()
    g.leaf("x", 32)
    g.op("a", "MUL_MAT", 64, "x", layout="same")
    g.op("b", "SCALE", 128, "a", layout="same")
    with pytest.raises(AllocError, match=r"%b \(128 bytes\) cannot be in place of %a \(64 bytes\)"):
        g.plan()


def test_a13_outputs_and_unused_nodes_keep_their_bytes() -> None:
    g = Lines()
    g.leaf("x", 32)
    g.op("out", "MUL_MAT", 32, "x", is_output=True)
    g.op("dead", "MUL_MAT", 32, "out")
    g.op("last", "SCALE", 32, "out")
    nbytes, at = g.plan()
    assert at == {"x": 0, "out": 32, "dead": 0, "last": 64}
    assert nbytes == 96


def test_a19_in_place_keeps_the_parents_buffer() -> None:
    g = Lines()
    g.leaf("x", 32)
    g.op("a", "MUL_MAT", 32, "x")
    g.op("b", "SCALE", 32, "a", buffer=1)
    buffers = DynAllocator(32), DynAllocator(32)
    assert [s.buffer for s in plan_list(g.list(), buffers)] == [0, 0, 0]
    assert [b.size for b in buffers] == [64, 0]


def test_a23_a_none_view_stretches_a_lifetime() -> None:
    def build(dep: bool) -> dict[str, int]:
        g = Lines()
        g.leaf("x", 32)
        g.op("a", "MUL_MAT", 32, "x")
        g.op("b", "MUL_MAT", 32, "a")
        g.op("c", "MUL_MAT", 32, "b")
        g.op("d", "MUL_MAT", 32, "c")
        if dep:
            g.op("keep", "NONE", 0, "a", view_of=1)
        return g.plan()[1]

    assert build(False)["c"] == 32
    assert build(True)["c"] == 64


def chain(*sizes: int, buffer: int = 0) -> NodeList:
    g = Lines()
    g.leaf("x", sizes[0])
    for i, n in enumerate(sizes[1:]):
        g.op(f"n{i}", "MUL_MAT", n, "x" if not i else f"n{i - 1}", buffer=buffer)
    return g.list()


# A26: the scenarios of upstream's own test, with its oracle (program order, no streams).


def check_program_order(graph: NodeList, spots: Sequence[Spot], max_bytes: int | None) -> None:
    last = {i: k for k, n in enumerate(graph.nodes) for i in (n, *graph.tensors[n].sources)}
    first = dict.fromkeys(graph.leafs, -1) | {n: k for k, n in enumerate(graph.nodes)}
    ends = [s.at.offset + t.nbytes for s, t in zip(spots, graph.tensors, strict=True)]
    for i, s in enumerate(spots):
        assert s.buffer >= 0, graph.tensors[i].name
        if max_bytes is not None and graph.tensors[i].nbytes <= max_bytes:
            assert ends[i] <= max_bytes
        for j in range(i):
            t = spots[j]
            if (s.buffer, s.at.chunk) != (t.buffer, t.at.chunk) or s.in_place_of == j:
                continue
            empty = not (graph.tensors[i].nbytes and graph.tensors[j].nbytes)
            apart = empty or ends[i] <= t.at.offset or ends[j] <= s.at.offset
            assert apart or last.get(j, -1) < first[i] or last.get(i, -1) < first[j], (i, j)


@pytest.mark.parametrize(
    ("max_bytes", "sizes", "chunks"),
    [
        (16, (8, 8, 8, 8, 8, 8), 4),  # too many tensors for one chunk
        (32, (16, 8, 24, 8), 2),  # one too large for the rest of a chunk
        (16, (8, 24, 8), 3),  # one larger than the maximum
        (16, (16,) * 20, 16),  # more than 16 chunks: the last is endless
    ],
)
def test_a26_scenarios(max_bytes: int, sizes: tuple[int, ...], chunks: int) -> None:
    g = Lines()
    for k, n in enumerate(sizes):
        g.leaf(f"t{k}", n)
    g.op("use", "CONCAT", 8, *(f"t{k}" for k in range(len(sizes))))
    buffer = DynAllocator(8, max_bytes)
    spots = plan_list(g.list(), [buffer])
    check_program_order(g.list(), spots, max_bytes if chunks < 16 else None)
    assert len(buffer.chunks) == chunks


def random_list(r: random.Random, buffers: int) -> NodeList:
    """Two leafs and a few nodes; sources at random, so that lifetimes differ."""
    sizes = (0, 1, 32, 96, 100, 1000, 1 << 36) if r.random() < 0.2 else (0, 1, 32, 96, 100, 1000)
    first = [r.choice(sizes) for _ in range(2)]
    tensors = [Node(f"x{i}", "NONE", n, layout=n, is_input=True) for i, n in enumerate(first)]
    for i in range(r.randint(1, 12)):
        sources = tuple(r.randrange(len(tensors)) for _ in range(r.randint(1, 2)))
        op, size = r.choice(("MUL_MAT", "ADD")), r.choice(sizes)
        tensors.append(Node(f"n{i}", op, size, sources, layout=size, buffer=r.randrange(buffers)))
    return NodeList(tuple(tensors), tuple(range(2, len(tensors))), (0, 1))


@pytest.mark.parametrize("kinds", [[(32,)], [(8, 256)], [(32,), (128,)]])
def test_random_lists_lie_in_their_buffers_and_keep_program_order(
    kinds: list[tuple[int, ...]],
) -> None:
    for seed in range(300):
        graph = random_list(random.Random(seed), len(kinds))
        buffers = [DynAllocator(*kind) for kind in kinds]
        spots = plan_list(graph, buffers)
        check_program_order(graph, spots, None)
        for spot, node in zip(spots, graph.tensors, strict=True):
            chunk = buffers[spot.buffer].chunks[spot.at.chunk]
            assert spot.at.offset + node.nbytes <= chunk.max_size, (seed, node)
        again = [DynAllocator(*kind) for kind in kinds]
        assert plan_list(graph, again) == spots and again == buffers


def test_a_tensor_that_names_no_buffer_is_refused() -> None:
    with pytest.raises(AllocError, match=r"%n0: buffer 3 of 1"):
        plan_list(chain(32, 32, buffer=3), [DynAllocator(32)])
