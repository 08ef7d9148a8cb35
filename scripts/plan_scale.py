"""What a step costs on 1 to 8 devices when its matrices are cut: from plans, without any device.

    python scripts/plan_scale.py

For each shape (8B, 70B, 235B with experts) and number of devices the step of a few layers is built
as `models/sharded.py` cuts it, planned and proved; the critical path of the schedule and the bytes
that cross between devices are those of its commands, and what a layer adds is what two more layers
add. Devices are as described at the head of the file: bandwidths of data sheets, no measurement. A
row reads all experts that it needs from memory and none else.
"""

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ggraph import dtypes
from ggraph.decode.model import StepShape
from ggraph.device import DeviceSpec
from ggraph.order import critical_path
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Do
from models.config import DecoderConfig, Rope
from models.sharded import Sharding, qk_norm_of

MEMORY, LINK, PCIE, FLOPS = 3.35e12, 450e9, 55e9, 400e12  # H100 SXM: bytes/s, bytes/s, flop/s
LAUNCH = 1.5e-6  # a node of a CUDA graph
CACHE = 4096  # tokens that a row sees


@dataclass(frozen=True)
class Shape:
    """A tensor of a checkpoint that nobody has."""

    shape: tuple[int, ...]
    dtype: dtypes.DType


@dataclass(frozen=True)
class Size:
    """A model by its sizes, as its config.json gives them."""

    name: str
    kind: str
    layers: int
    hidden: int
    wide: int
    heads: int
    keys: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0


SIZES = (
    Size("8B", "llama", 32, 4096, 14336, 32, 8, 128256),
    Size("70B", "llama", 80, 8192, 28672, 64, 8, 128256),
    Size("235B-A22B", "qwen3moe", 94, 4096, 1536, 64, 4, 151936, 128, 8),
)


def model(s: Size, layers: int, dtype: dtypes.DType) -> tuple[DecoderConfig, dict[str, Shape]]:
    """A config of so many layers, and what its checkpoint would hold."""
    d = 128
    rope = Rope(n_rot=d, mode="neox", freq_base=1e6)
    c = DecoderConfig(
        s.kind, s.hidden, s.wide, layers, s.heads, s.keys, d, 1e-6, s.vocabulary, 40960, rope,
        num_experts=s.experts, num_experts_per_tok=s.chosen, moe_intermediate_size=s.wide,
    )  # fmt: skip
    found: dict[str, Shape] = {}

    def add(name: str, *shape: int) -> None:
        plain = len(shape) == 1 or "gate_inp" in name
        found[name] = Shape(shape, dtypes.F32 if plain else dtype)

    add("token_embd.weight", s.vocabulary, s.hidden)
    add("output.weight", s.vocabulary, s.hidden)
    add("output_norm.weight", s.hidden)
    for i in range(layers):
        blk = f"blk.{i}"
        for role, count in (("q", s.heads), ("k", s.keys), ("v", s.keys)):
            add(f"{blk}.attn_{role}.weight", count * d, s.hidden)
            if qk_norm_of(s.kind) and role != "v":
                add(f"{blk}.attn_{role}_norm.weight", d)
        add(f"{blk}.attn_output.weight", s.hidden, s.heads * d)
        add(f"{blk}.attn_norm.weight", s.hidden)
        add(f"{blk}.ffn_norm.weight", s.hidden)
        each = (s.experts,) if s.experts else ()
        end = "_exps" if s.experts else ""
        if s.experts:
            add(f"{blk}.ffn_gate_inp.weight", s.experts, s.hidden)
        add(f"{blk}.ffn_gate{end}.weight", *each, s.wide, s.hidden)
        add(f"{blk}.ffn_up{end}.weight", *each, s.wide, s.hidden)
        add(f"{blk}.ffn_down{end}.weight", *each, s.hidden, s.wide)
    return c, found


def planned(s: Size, layers: int, devices: int, rows: int, link: float) -> dict[str, float]:
    """A step of `layers` layers: seconds, bytes between devices, bytes that each holds."""
    config, catalogue = model(s, layers, dtypes.Q8_0)
    names = tuple(f"cuda{i}" for i in range(devices))
    sharding = Sharding(config, catalogue, names, chunks=devices)
    graph = sharding.build(StepShape(rows, CACHE, rows, CACHE + 1, (), dtypes.F16))
    specs = [
        DeviceSpec(
            n, "cuda", memory_bytes=1 << 50, max_buffer_bytes=1 << 50, alignment=256, streams=1,
            copy_streams=min(7, devices), flops_per_s=FLOPS, bytes_per_s=MEMORY,
            link_bytes_per_s=PCIE, peer_bytes_per_s=link, launch_s=LAUNCH,
        )
        for n in names
    ]  # fmt: skip
    verified = make_plan(graph, specs, Options(pins=sharding.pins))
    schedule = verified.plan.schedule
    seconds, _ = critical_path(schedule)
    crossed = sum(
        a.stop - a.start
        for c in schedule.commands
        if c.do is Do.COPY and c.reads[0].value[:1] in "cd" and c.reads[0].value[1:2].isdigit()
        for a in c.reads[:1]
    )
    held = sum(t.nbytes for t in graph if t.name.startswith(("d0.", "c0.")) and t.is_leaf)
    return {"seconds": seconds, "crossed": float(crossed), "held": float(held)}


def whole(s: Size, devices: int, rows: int, link: float) -> dict[str, Any]:
    """A step of all layers, of what two and four layers cost."""
    two, four = (planned(s, n, devices, rows, link) for n in (2, 4))
    per = {k: (four[k] - two[k]) / 2 for k in two}
    return {k: two[k] + (s.layers - 2) * per[k] for k in two}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--only", default="", help="sizes whose names hold this")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    begun = time.perf_counter()
    for s in SIZES:
        for rows in a.rows if a.only in s.name else ():
            base = None
            for link, way in ((LINK, "NVLink"), (PCIE, "PCIe")):
                for n in a.devices:
                    if n == 1 and way == "PCIe":
                        continue
                    f = whole(s, n, rows, link)
                    base = base or f["seconds"]
                    facts = {
                        "size": s.name, "rows": rows, "devices": n, "link": way,
                        "step, ms": round(1e3 * f["seconds"], 3),
                        "times": round(base / f["seconds"], 2),
                        "MB over links": round(f["crossed"] / 1e6, 3),
                        "GB each": round(f["held"] / 1e9, 2),
                    }  # fmt: skip
                    print(json.dumps(facts) if a.json else facts, flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{time.perf_counter() - begun:.0f} s, {memory} MiB")


if __name__ == "__main__":
    main()
