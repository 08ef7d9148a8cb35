"""SmolLM2 over cpu + sim0 + sim1 in several ways: logits bit-equal to the unsplit run, or exit 1.

    python scripts/check_splits.py [--model PATH] [--seeds N] [--tokens N]

Every seed is another legal order of all devices and the host. All devices are simulated and run
the NumPy references, so a difference could only come from placement, splits, order or memory.
Fetches the default model when it is not in the cache. Takes about a second per seed and token.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import Options, Session
from ggraph.backends.sim import InOrder, Machine, Random, SimBackend, SimHost, sim_spec
from ggraph.decode.runner import Runner
from ggraph.device import HOST, DeviceSpec
from models.registry import Model, open_model
from models.run.fetch import fetch_default

CPU = DeviceSpec("cpu", "cpu", host_visible=True)
DEVICES = (sim_spec("sim0"), sim_spec("sim1"), CPU)
WAYS = {
    "by layer": Options(layers={"sim0": 12, "sim1": 12, "cpu": 6}),
    "by pin": Options(pins=(r"blk\.\d+\.ffn_=sim1", r"blk\.\d+\.attn_=sim0", r"token_embd=cpu")),
    "cache elsewhere": Options(
        layers={"sim0": 15, "sim1": 15}, pins=(r"cache\.k\.\d$=sim1", r"cache\.v\.2\d$=cpu")
    ),
}
STREAMS = (1, 2, 4)


class World:
    """One session over simulated devices."""

    def __init__(self, model: Model, devices: tuple[DeviceSpec, ...], options: Options) -> None:
        self.machine = Machine()
        backends = {d.name: SimBackend(d, self.machine) for d in devices}
        self.session = Session({**backends, HOST: SimHost(self.machine)}, options)
        self.runner = Runner(model, self.session, 64)

    def logits(self, ids: list[int], seed: int | None) -> bytes:
        """All rows' logits of `ids` in one step, in the order of `seed`, from an empty context."""
        self.machine.order = InOrder() if seed is None else Random(seed)
        self.machine.timeline.clear()
        self.runner.past = 0
        return self.runner.text(ids, every=True).logits.tobytes()


def main() -> int:
    """Compare every way, number of streams and seed with the unsplit run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seeds", type=int, default=23, help="orders per way and streams")
    parser.add_argument("--tokens", type=int, default=2)
    given = parser.parse_args()
    model = open_model(given.model or fetch_default())
    ids = list(range(100, 100 + given.tokens))
    wanted = World(model, (CPU,), Options()).logits(ids, None)
    wrong = 0
    for way, options in WAYS.items():
        for streams in STREAMS:
            begun = time.perf_counter()
            world = World(model, DEVICES, replace(options, streams=streams))
            bad = [s for s in range(given.seeds) if world.logits(ids, s) != wanted]
            world.session.close()
            wrong += len(bad)
            took = time.perf_counter() - begun
            verdict = f"seeds {bad} differ" if bad else "bit-equal"
            print(f"{way}, {streams} streams: {given.seeds} orders {verdict}, {took:.0f} s")
    total = given.seeds * len(WAYS) * len(STREAMS)
    print(f"{total - wrong} of {total} orders bit-equal to the unsplit run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
