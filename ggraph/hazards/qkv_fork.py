"""The fork of Q, K and V at a model's own widths.

Upstream (llama.cpp #16991) interleaves the three branches behind `attn_norm`, lays out memory for
that list, runs each branch on a stream of its own and then compares what the branches *write*.
Hazard 03 shows the shape in miniature; here are the widths of a Qwen3 layer, and
`tests/test_hazards_fork.py` counts what that comparison overlooks.

Legend: T token rows, E width of the layer, H query heads, K key-value heads, D = 128 head size,
C cache rows. All activations are float32.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import zip_longest

from ggraph import ops
from ggraph.alloc import allocate
from ggraph.backends.sim import sim_spec
from ggraph.dtype import F16, I32, I64
from ggraph.graph import Graph
from ggraph.hazards.corpus import listed
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import Do, Plan, Schedule
from ggraph.split import split
from ggraph.tensor import Tensor, input, state, weight

D, C = 128, 256
DEVICE = "sim0"
ALIGNMENT = 32  # bytes: that of ggml's CPU buffers, with which the counts were measured


@dataclass(frozen=True)
class Fork:
    """Sizes of one fork. With `packed` the Q product holds a gate as well, and Q is copied out of
    it; `interleaved` is upstream's order of the list, else branch follows branch."""

    heads: int = 8
    kv_heads: int = 2
    tokens: int = 1
    width: int = 1024
    qk_norm: bool = True
    packed: bool = False
    interleaved: bool = True

    @property
    def branches(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes of each branch in order: what runs on one stream."""
        normed = ("rms", "norm") if self.qk_norm else ()
        packed = ("cont",) if self.packed else ()
        q, k = ("mul", *packed, *normed, "rope"), ("mul", *normed, "rope")
        return {
            "q": tuple(f"q_{step}" for step in q),
            "k": tuple(f"k_{step}" for step in k),
            "v": ("v_mul",),
        }

    def graph(self) -> Graph:
        """x [T, E] -> y [T, E] with the caches of K and V, nodes in the order of the list."""
        x = input("x", (self.tokens, self.width))
        rms = ops.rms_norm(x, name="rms")
        fork = ops.mul(rms, weight("attn_norm.weight", (self.width,)), name="attn_norm")
        at, index = input("pos", (self.tokens,), I32), input("idx", (self.tokens,), I64)
        q, k = self._heads(fork, "q", at), self._heads(fork, "k", at)
        v = self._product(fork, "v", self.kv_heads * D)
        keys, values = (_stored(n, t, index) for n, t in (("k", k), ("v", v)))
        kv = (keys.reshape(C, self.kv_heads, D), values.reshape(C, self.kv_heads, D))
        mixed = ops.flash_attn(q, *kv, scale=D**-0.5, name="attn")  # [T, H, D]
        out = self._product(mixed.reshape(self.tokens, self.heads * D), "o", self.width)
        y = ops.add(out, x, name="y")
        return listed(Graph.of({"y": y}, name="qkv fork"), self._list())

    def _product(self, x: Tensor, name: str, width: int) -> Tensor:
        return ops.mul_mat(
            weight(f"{name}.weight", (width, x.shape[-1]), F16), x, name=f"{name}_mul"
        )

    def _heads(self, x: Tensor, name: str, at: Tensor) -> Tensor:
        """Product, heads, norm, rotation: [T, E] -> [T, H, D] (or K)."""
        count, packed = (self.heads, self.packed) if name == "q" else (self.kv_heads, False)
        wide = 2 * D if packed else D
        t = self._product(x, name, count * wide).reshape(self.tokens, count, wide)
        if packed:
            t = ops.cont(ops.narrow(t, 2, 0, D), name=f"{name}_cont")
        if self.qk_norm:
            t = ops.rms_norm(t, name=f"{name}_rms")
            t = ops.mul(t, weight(f"{name}_norm.weight", (D,)), name=f"{name}_norm")
        return ops.rope(t, at, name=f"{name}_rope")

    def _list(self) -> tuple[str, ...]:
        """Nodes from the fork on; the caches are written once the branches are done."""
        parts = self.branches.values()
        turns = zip_longest(*parts) if self.interleaved else parts
        return ("attn_norm", *(n for turn in turns for n in turn if n is not None), "k_store")

    def plan(self, memory: str = "ggml") -> Plan:
        """One stream per branch, and one for the rest; memory laid out in the given mode.

        Nobody has verified it. Raises AllocError for an unknown mode.
        """
        lanes = {n: i for i, part in enumerate(self.branches.values(), 1) for n in part}
        schedule = self._schedule(lanes)
        ends = {f"after:{part[-1]}" for part in self.branches.values()}
        schedule = _joined(schedule, ends, "k_store")
        return Plan(schedule, allocate(schedule, mode=memory))

    def serial(self, memory: str = "hb") -> Plan:
        """The same list on one stream."""
        schedule = self._schedule({})
        return Plan(schedule, allocate(schedule, mode=memory))

    def _schedule(self, lanes: Mapping[str, int]) -> Schedule:
        device = sim_spec(DEVICE, alignment=ALIGNMENT, streams=4)
        placed = place(self.graph(), (device,))
        return order(
            split(placed), on_stream={t.name: lanes.get(t.name, 0) for t in placed.graph.nodes}
        )


def _joined(schedule: Schedule, ends: AbstractSet[str], first: str) -> Schedule:
    """Upstream's join: the main stream waits for all branches before it goes on with `first`."""
    commands = list(schedule.commands)
    at = next(i for i, c in enumerate(commands) if c.node == first)
    waits = [c for c in commands[at:] if c.do is Do.WAIT and c.event in ends]
    rest = [c for c in commands[at:] if c not in waits]
    return replace(schedule, commands=(*commands[:at], *waits, *rest))


def _stored(name: str, rows: Tensor, index: Tensor) -> Tensor:
    """Rows [T, K, D] or [T, K D] into their cache [C, K D]."""
    wide = rows.reshape(rows.shape[0], -1) if len(rows.shape) == 3 else rows
    cache = state(f"cache_{name}", (C, wide.shape[-1]), F16)
    return ops.set_rows(cache, wide, index, name=f"{name}_store")


# Counted with the real allocator (CPU buffers, llama.cpp d99724f2): read/write overlaps.
FORKS: Mapping[str, tuple[Fork, int]] = {
    "8 heads": (Fork(), 11),
    "16 heads": (Fork(heads=16), 6),
    "without QK norm": (Fork(qk_norm=False), 3),
    "4 tokens": (Fork(tokens=4), 11),
    "Q packed with a gate": (Fork(qk_norm=False, packed=True), 5),
}
