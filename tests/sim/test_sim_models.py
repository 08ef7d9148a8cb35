"""A real checkpoint split over three simulated devices: the logits of every legal order tried are
bit-equal to those of the unsplit run.

All devices compute with the same reference kernels, so any difference is the scheduler's.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from worlds import CPU, SIM0, SIM1

from ggraph.backends.sim import InOrder, Machine, Random, SimBackend, SimHost
from ggraph.decode.runner import Runner
from ggraph.device import HOST, DeviceSpec
from ggraph.dtype import F32
from ggraph.pipeline import Options
from ggraph.session import Session
from models.registry import Model, open_model

PATH = Path(__file__).parents[1] / "golden" / "tiny" / "llama_tied"
SEEDS = 17  # for each way and number of streams: 204 in all
WAYS: dict[str, Options] = {
    "by layer": Options(layers={"sim0": 1, "sim1": 2, "cpu": 1}),
    "by pin": Options(
        pins=(r"blk\.\d\.ffn_.*=sim1", r"blk\.[02]\.attn_.*=sim0", r"token_embd=cpu")
    ),
    "cache elsewhere": Options(
        layers={"sim0": 2, "sim1": 2}, pins=(r"cache\.k\.[01]$=sim1", r"cache\.v\.[23]$=cpu")
    ),
    "one head apart": Options(pins=(r"^output_norm=sim1", r"^logits=sim0", r"blk\.1\.=cpu")),
}


@cache
def model() -> Model:
    return open_model(PATH)


@cache
def prompt() -> tuple[int, ...]:
    ids = np.load(PATH / "expected.npz")["ids"]
    return tuple(int(i) for i in ids[:7])


class World:
    """One session over simulated devices; each `logits` call begins with an empty context."""

    def __init__(self, devices: tuple[DeviceSpec, ...], options: Options) -> None:
        self.machine = Machine()
        backends = {d.name: SimBackend(d, self.machine) for d in devices}
        self.session = Session({**backends, HOST: SimHost(self.machine)}, options)
        self.runner = Runner(model(), self.session, 24, cache_dtype=F32)

    def logits(self, seed: int | None) -> bytes:
        """A prompt of five tokens, then two single ones, all rows, in the order of `seed`."""
        self.machine.order = InOrder() if seed is None else Random(seed)
        self.machine.timeline.clear()
        self.runner.past = 0
        ids = prompt()
        parts = [self.runner.text(p, every=True).logits for p in (ids[:5], ids[5:6], ids[6:])]
        return b"".join(p.tobytes() for p in parts)


@cache
def unsplit() -> bytes:
    return World((CPU,), Options()).logits(None)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_split_logits_are_bit_equal_in_every_order_tried(way: str, streams: int) -> None:
    world = World((SIM0, SIM1, CPU), replace(WAYS[way], streams=streams))
    wanted = unsplit()
    for seed in range(SEEDS):
        assert world.logits(seed) == wanted, (way, streams, seed)
    assert world.session.plans_made == 2, "orders change, plans do not"
    used = {s.actor.device for s in world.machine.timeline}
    assert used >= {"sim0", "sim1"}, "the split is a real one"
    world.session.close()


def test_unsplit_logits_are_the_golden_ones() -> None:
    """What everything is compared with is itself right."""
    golden = np.load(PATH / "expected.npz")["logits"][:7]
    got = np.frombuffer(unsplit(), np.float32).reshape(7, -1)
    assert np.abs(got - golden).max() < 2e-4 * np.ptp(golden)
