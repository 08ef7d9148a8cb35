"""Size of memory plans: ours, ggml's list order, greedy by size, and lower bounds.

    python bench/alloc.py minimalloc [--seconds 5]   heights of minimalloc's A to K over 1,048,576
    python bench/alloc.py instances [--seconds 1]    bench/instances/*.json: bytes per method
    python bench/alloc.py models                     hb and offline against ggml mode, per model
    python bench/alloc.py export                     write bench/instances/*.json anew

`--seconds` is the search budget per instance in seconds of the nominal machine (work is counted);
the column `s` is the processor time that it took here. Every packing is checked for overlaps before
it is printed; solutions of A to K are also verified as plans (`proved` counts the reads traced),
and so are the plans of the models in every mode that is meant to be sound.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console
from rich.table import Table

from ggraph import DeviceSpec, Graph, Tensor, input, ops, weight
from ggraph import dtype as dtypes
from ggraph.alloc import MODES, allocate, hb, lower_bounds
from ggraph.alloc.dyn import DynAllocator
from ggraph.alloc.fit import Ints, Packing, packed
from ggraph.alloc.search import instances, offline
from ggraph.alloc.search.instances import Instance
from ggraph.decode.model import StepShape
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import Plan, Schedule
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.verify import verify
from models import eagle3
from models.config import DecoderConfig, Rope
from models.registry import ARCHITECTURES
from models.step import Step

HERE = Path(__file__).parent / "instances"
CAPACITY = 1 << 20  # bytes for which A to K are known to have a solution
ALIGNMENT = 128  # bytes, as CUDA's
LAYERS = 4
FORKS = 4  # synthetic fork-join graphs per number of streams


class Blank(Step):
    """A step whose weights exist by name only: planning needs shapes, no data."""

    def w(self, name: str, *shape: int) -> Tensor:
        """A weight of the wanted shape: matrices in float16, vectors in float32."""
        dtype = dtypes.F16 if len(shape) > 1 else dtypes.F32
        return self.weights.setdefault(name, weight(name, shape, dtype))

    def has(self, name: str) -> bool:
        """Every weight is there but frequency factors; no biases, no adapters."""
        return name.endswith(".weight") and not name.startswith("rope_freqs")


def _config(name: str, e: int, f: int, h: int, g: int, d: int, v: int) -> DecoderConfig:
    rope = Rope("neox", d)
    return DecoderConfig(name, e, f, LAYERS, h, g, d, 1e-6, v, 4096, rope)


CONFIGS = {
    "llama": _config("llama", 2048, 8192, 32, 8, 64, 128256),
    "qwen3": _config("qwen3", 1024, 3072, 16, 8, 128, 151936),
    "qwen3moe": replace(
        _config("qwen3moe", 2048, 6144, 32, 4, 128, 151936),
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip


def model_graph(name: str, rows: int) -> Graph:
    """One step of a model of real width with `LAYERS` layers, or of an EAGLE-3 head."""
    shape = StepShape(rows, 1024, 1, 1025)
    if name != "eagle3":
        return ARCHITECTURES[name].build(Blank(CONFIGS[name], {}, shape))
    wide = CONFIGS["llama"]
    head = eagle3.HeadConfig(wide, wide.hidden_size, (1, 2, 3), 32000)
    step = Blank(wide, {}, shape)
    attending, residual = eagle3.decoder(step, head, eagle3.encoder(step, head))
    return eagle3.outputs(step, head, attending, residual)


def fork_graph(seed: int, width: int) -> Graph:
    """Stages of `width` chains of products of random widths that join in a sum."""
    r = random.Random(seed)
    x = input("x", (4, 512))
    for stage in range(4):
        ends = []
        for k in range(width):
            y = x
            for i in range(r.randint(1, 4)):
                n = r.choice((64, 128, 512, 1024, 1536, 4096))
                w = weight(f"w{stage}.{k}.{i}", (n, y.shape[-1]), dtypes.F16)
                y = ops.mul_mat(w, y, name=f"mul.{stage}.{k}.{i}")
            w = weight(f"o{stage}.{k}", (512, y.shape[-1]), dtypes.F16)
            ends.append(ops.mul_mat(w, y, name=f"end.{stage}.{k}"))
        x = ends[0]
        for y in ends[1:]:
            x = x + y
    return Graph.of({"out": x})


def planned(graph: Graph, streams: int) -> Schedule:
    """The schedule of `graph` on one device with so many streams."""
    device = [DeviceSpec("sim0", "sim", alignment=ALIGNMENT, streams=streams)]
    return order(split(place(rewrite(graph, device), device)), streams=streams)


def all_schedules() -> Iterator[tuple[str, str, Schedule]]:
    """Name, description and schedule of everything that is exported."""
    for name in (*CONFIGS, "eagle3"):
        for rows in (1, 16, 256):
            for streams in (1, 2, 4):
                about = f"{name}, {LAYERS} layers, {rows} tokens, {streams} streams"
                schedule = planned(model_graph(name, rows), streams)
                yield f"{name}-t{rows}-s{streams}", about, schedule
    for streams in (2, 4):
        for seed in range(FORKS):
            about = f"synthetic fork-join graph {seed}, {streams} chains on {streams} streams"
            yield f"fork{seed}-s{streams}", about, planned(fork_graph(seed, streams), streams)


def export() -> None:
    """Write every instance of `all_schedules`."""
    for name, about, schedule in all_schedules():
        found = instances.from_schedule(schedule, "sim0", name)
        text = instances.to_json(found, alignment=ALIGNMENT, about=about)
        (HERE / f"{name}.json").write_text(text)


def checked(p: Packing, at: Ints) -> int:
    """Height of a packing; an overlap of two blocks in conflict ends the benchmark."""
    owner = np.repeat(np.arange(len(p)), np.diff(p.start))
    apart = (at[p.near] + p.size[p.near] <= at[owner]) | (at[owner] + p.size[owner] <= at[p.near])
    if not apart.all():
        raise SystemExit(f"overlap in a packing of {len(p)} blocks")
    return int((at + p.size).max())


def listed(i: Instance) -> int:
    """Height of ggml's byte planner; blocks come and go in list order, ends before births."""
    dyn = DynAllocator(1)
    events = sorted(
        [(int(t), 1, b) for b, t in enumerate(i.birth)]
        + [(int(t), 0, b) for b, t in enumerate(i.birth + i.life)]
    )
    places = {}
    for _, begins, b in events:
        if begins:
            places[b] = dyn.alloc(int(i.packing.size[b]), i.names[b])
        else:
            dyn.free(places[b], int(i.packing.size[b]), i.names[b])
    at = np.array([places[b].offset for b in range(len(i.names))])
    return checked(i.listed, at)


def by_size(i: Instance) -> int:
    """Height of greedy by size, first fit."""
    return checked(i.packing, packed(i.packing, np.lexsort((i.birth, -i.packing.size)))[1])


def searched(i: Instance, seconds: float) -> tuple[Ints, Ints, float]:
    """Offsets of `hb` and `offline`, and the processor time of the search in seconds."""
    _, at, order_ = hb.solve(i.packing, i.birth, i.life)
    begun = time.process_time()
    found = offline.search(i.packing, order_, at, i.bound, i.cliques, seconds)
    return at, found, time.process_time() - begun


def minimalloc(seconds: float) -> Table:
    """Heights over the known capacity, and their geometric means."""
    names = ("file", "blocks", "bound", "list order", "greedy by size", "hb", "offline", "proved")
    table = Table(*names, "s")
    total: list[list[float]] = []
    spent = 0.0
    for path in sorted((HERE / "minimalloc").glob("*.csv")):
        i = instances.from_csv(path.read_text(), path.stem)
        at, found, took = searched(i, seconds)
        ours, best = checked(i.packing, at), checked(i.packing, found)
        proved = [verify(instances.to_plan(i, x)).certificate.reads_proved for x in (at, found)]
        row = [h / CAPACITY for h in (i.bound, listed(i), by_size(i), ours, best)]
        total.append(row)
        spent += took
        cells = (*(f"{h:.3f}" for h in row), str(proved[1]), f"{took:.1f}")
        table.add_row(path.stem[0], str(len(i.names)), *cells)
    means = [math.prod(c) ** (1 / len(total)) for c in zip(*total, strict=True)]
    table.add_row("geomean", "", *(f"{h:.4f}" for h in means), "", f"{spent:.1f}")
    return table


def concurrent(seconds: float) -> Table:
    """Bytes per method for every exported instance; `lost` is what concurrency costs."""
    names = ("instance", "blocks", "no reuse", "list order", "bound", "hb", "offline", "lost", "s")
    table = Table(*names)
    for path in sorted(HERE.glob("*.json")):
        i = instances.from_json(path.read_text())
        at, found, took = searched(i, seconds)
        ours, best = checked(i.packing, at), checked(i.packing, found)
        one = searched_listed(i, seconds)
        cells = (i.no_reuse, listed(i), i.bound, ours, best, best - one)
        table.add_row(i.name, str(len(i.names)), *(f"{c:,}" for c in cells), f"{took:.2f}")
    return table


def searched_listed(i: Instance, seconds: float) -> int:
    """Height of the same blocks, searched, if list order alone had to be respected."""
    _, at, order_ = hb.solve(i.listed, i.birth, i.life)
    found = offline.search(i.listed, order_, at, 1, None, seconds)
    return checked(i.listed, found)


def models() -> Table:
    """Arena bytes and planning milliseconds of the three modes."""
    table = Table("model", "commands", "bound", *(f"{m} (ms)" for m in MODES), "hb / ggml")
    for name, _, schedule in all_schedules():
        cells, sizes = [], []
        for mode in MODES:
            begun = time.perf_counter()
            memory = allocate(schedule, mode=mode)
            took_ms = (time.perf_counter() - begun) * 1e3
            if mode != "ggml":
                verify(Plan(schedule, memory))
            sizes.append(memory.buffers["arena@sim0"].nbytes)
            cells.append(f"{sizes[-1]:,} ({took_ms:.0f})")
        least = lower_bounds(schedule)["sim0"].nbytes
        ratio = f"{sizes[0] / sizes[2]:.3f}"
        table.add_row(name, str(len(schedule.commands)), f"{least:,}", *cells, ratio)
    return table


def main() -> None:
    """Parse arguments and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("minimalloc", "instances", "models", "export"))
    parser.add_argument("--seconds", type=float, help="search budget per instance (nominal)")
    given = parser.parse_args()
    if given.what == "export":
        export()
        return
    if given.what == "models":
        table = models()
    elif given.what == "minimalloc":
        table = minimalloc(5.0 if given.seconds is None else given.seconds)
    else:
        table = concurrent(1.0 if given.seconds is None else given.seconds)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
