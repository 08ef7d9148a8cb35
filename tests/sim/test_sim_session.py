"""The real session and executor on simulated devices, the host included in the interleaving."""

import numpy as np
import pytest
from worlds import CPU, SIM0, SIM1, feeds, no_reuse, schedule_of, tiny, weights

from ggraph.backends import open_backend
from ggraph.backends.sim import Machine, Random, SimBackend, SimHost, Simulator
from ggraph.device import HOST
from ggraph.pipeline import Options
from ggraph.session import Session

GRAPH = tiny()
WEIGHTS, FEEDS = weights(GRAPH), feeds(GRAPH, 3)
OPTIONS = Options(layers={"sim0": 1, "sim1": 1}, streams=4)


def replayed(session: Session) -> list[bytes]:
    """The outputs of three runs of one prepared plan."""
    session.prepare("tiny", lambda: GRAPH, lambda t: WEIGHTS[t.name])
    found = [session.run("tiny", f)["y"].tobytes() for f in FEEDS]
    session.close()
    return found


def wanted() -> list[bytes]:
    unsplit = Simulator(no_reuse(schedule_of(GRAPH, [CPU])), WEIGHTS).run(FEEDS)
    return [r["y"].tobytes() for r in unsplit.outputs]


@pytest.mark.parametrize("seed", range(8))
def test_a_session_over_three_simulated_devices_is_bit_equal(seed: int) -> None:
    machine = Machine(Random(seed))
    devices = {d.name: SimBackend(d, machine) for d in (SIM0, SIM1, CPU)}
    assert replayed(Session({**devices, HOST: SimHost(machine)}, OPTIONS)) == wanted()


def test_devices_by_name_and_the_real_cpu() -> None:
    sims = {name: open_backend(name) for name in ("sim0", "sim1")}
    assert replayed(Session(sims, OPTIONS)) == wanted()
    mixed = {name: open_backend(name) for name in ("sim0", "cpu")}
    split = Options(pins=(r"^head=cpu", r"cache\.1=cpu"), streams=2)
    got = [np.frombuffer(y, np.float32) for y in replayed(Session(mixed, split))]
    for a, b in zip(got, wanted(), strict=True):
        assert np.abs(a - np.frombuffer(b, np.float32)).max() < 1e-4, "other kernels, same meaning"
