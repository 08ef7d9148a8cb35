"""Random graphs of real ops, with devices and options to plan them. No test is in here.

Legend: R rows, W columns of a tensor; r source of randomness; pool the tensors made so far.
"""

import random
from dataclasses import dataclass, field

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.pipeline import Options
from ggraph.tensor import Tensor, input, state, weight

WIDTHS = (1, 8, 8, 32, 256)
ROWS = (1, 3, 3, 16)
CPU = DeviceSpec("cpu", "cpu", host_visible=True)


@dataclass
class _Maker:
    """A graph in the making: views, in-place chains, states, forks, dead and empty tensors."""

    r: random.Random
    pool: list[Tensor] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    states: int = 0

    def leaves(self) -> None:
        for i in range(self.r.randint(1, 3)):
            self.pool.append(input(f"x{i}", (self.r.choice(ROWS), self.r.choice(WIDTHS))))
        if self.r.random() < 0.2:
            self.pool.append(input("empty", (0, 8)))

    def pick(self) -> Tensor:
        """Often the newest, so that chains grow; else any, so that branches fork."""
        return self.pool[-1] if self.r.random() < 0.4 else self.r.choice(self.pool)

    def step(self, i: int) -> None:
        a = self.pick()
        kinds = ("linear", "scale", "norm", "add", "view", "cache", "join")
        kind = self.r.choices(kinds, (4, 2, 1, 4, 3, 1, 1))[0]
        made = getattr(self, f"_{kind}")(a, f"n{i}")
        self.pool.append(made)

    def _linear(self, a: Tensor, name: str) -> Tensor:
        width = self.r.choice(WIDTHS)
        return ops.mul_mat(weight(f"{name}.w", (width, a.shape[-1])), a, name=name)

    def _scale(self, a: Tensor, name: str) -> Tensor:
        return ops.scale(a, 0.5, name=name)

    def _norm(self, a: Tensor, name: str) -> Tensor:
        return ops.rms_norm(a, eps=1e-5, name=name)

    def _add(self, a: Tensor, name: str) -> Tensor:
        """With a tensor of the same shape, where there is one."""
        others = [t for t in self.pool if t.shape == a.shape]
        return self.r.choice((ops.add, ops.mul))(a, self.r.choice(others), name=name)

    def _view(self, a: Tensor, name: str) -> Tensor:
        """A whole view, some rows, some columns, or the transpose made dense."""
        rows, columns = a.shape
        roll = self.r.randrange(4)
        if roll == 0:
            return ops.reshape(a, columns, rows, name=name) if a.is_contiguous else a
        if roll == 1 and rows > 1:
            return ops.rows(a, 1, rows - 1, name=name)
        if roll == 2 and columns > 1:
            return ops.columns(a, 0, columns // 2, name=name)
        return ops.cont(ops.transpose(a), name=name)

    def _cache(self, a: Tensor, name: str) -> Tensor:
        """Rows written into a state of which everything is read afterwards."""
        rows, columns = a.shape
        if not rows:
            return self._scale(a, name)
        self.states += 1
        slots = input(f"slots{self.states}", (rows,), I32)
        cache = state(f"cache{self.states}", (rows + 2, columns))
        written = ops.set_rows(cache, ops.cont(a), slots, name=name)
        return ops.rows(written, 0, rows, name=f"{name}.seen")

    def _join(self, a: Tensor, name: str) -> Tensor:
        return ops.concat([a, a if self.r.random() < 0.5 else ops.scale(a, 2.0)], name=name)

    def graph(self) -> Graph:
        """Some ends as outputs, others computed in vain."""
        nodes = [t for t in self.pool if not t.is_leaf and not t.is_view]
        ends = [t for t in nodes[-3:] if t.spec is not None and t.spec.overwrites is None]
        if not ends:
            ends = [ops.scale(self.pool[-1], 1.0, name="end")]
        outputs = ends[: self.r.randint(1, len(ends))]
        return Graph.of(outputs, also=[t for t in nodes if t not in outputs][:40], name="random")


def random_graph(r: random.Random, most: int = 16) -> Graph:
    """A graph of at most `most` steps, drawn from `r`."""
    maker = _Maker(r)
    maker.leaves()
    for i in range(r.randint(1, most)):
        maker.step(i)
    return maker.graph()


def random_devices(r: random.Random) -> list[DeviceSpec]:
    """One to three devices: a CPU, simulated GPUs with streams, small buffers, odd alignments."""
    gpus = [
        sim_spec(
            f"sim{k}",
            alignment=r.choice((1, 32, 128)),
            streams=r.randint(1, 4),
            copy_streams=r.randint(0, 2),
            host_visible=r.random() < 0.2,
            peer_bytes_per_s=r.choice((0.0, 1e11)),
        )
        for k in range(r.randint(0, 2))
    ]
    return [*gpus, CPU] if r.random() < 0.6 or not gpus else gpus


def random_options(r: random.Random, graph: Graph, devices: list[DeviceSpec]) -> Options:
    """Pins, streams, slots and mode; no limit of memory."""
    names = [d.name for d in devices]
    nodes = [t.name for t in graph.nodes if t.op != "set_rows"]
    rewrites = r.random() < 0.5  # they drop what is computed in vain, so a pin may find nothing
    chosen = [] if rewrites else r.sample(nodes, min(len(nodes), r.randint(0, 3)))
    return Options(
        pins=tuple(f"^{n.replace('.', '[.]')}$={r.choice(names)}" for n in chosen),
        streams=r.randint(1, max(d.streams for d in devices)),
        copies=r.choice((1, 1, 1, 2)),
        memory=r.choice(("hb", "hb", "offline")),
        offline_seconds=0.002,
        rewrites=rewrites,
        overlap=r.random() < 0.3,
    )
