"""The corpus of races on the CUDA backend: real streams' order by virtual time, real kernels.

On a GPU the same runner does the same with a kernel that takes time: `scripts/gpu_check.py`.
"""

import json

import numpy as np
import pytest
from cuda_host import SIDE_BY_SIDE, HostDriver, need_compiler
from typer.testing import CliRunner

from ggraph.backends.cuda import Replayer
from ggraph.errors import BackendError
from ggraph.hazards import HAZARDS, Hazard, find, plan_of
from ggraph.hazards.gpu import run_on_gpu
from ggraph.hazards.run import data_of
from models.cli import hazards as cli_hazards

pytestmark = need_compiler


@pytest.mark.parametrize("hazard", HAZARDS, ids=[h.id for h in HAZARDS])
def test_bad_plans_corrupt_and_fixed_plans_do_not(hazard: Hazard) -> None:
    report = run_on_gpu(hazard, HostDriver(1 << 34), times=2)
    assert report.fixed_wrong == 0
    assert report.bad_wrong == (None if hazard.bad is None else 2), report


def test_a_launch_that_races_with_itself_does_so_where_its_blocks_run_at_once() -> None:
    """As on a GPU, where all of them read before any of them writes, unless some are held back."""
    hazard = find("17")
    assert hazard.bad is not None
    driver, data = HostDriver(1 << 34, order=SIDE_BY_SIDE), data_of(hazard, 0)
    replayer = Replayer(plan_of(hazard, hazard.bad), data.weights, driver)
    untouched = replayer.run(data.feeds)
    replayer.close()
    for got, wanted in zip(untouched, data.expected, strict=True):
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-4, err_msg="no race was lost")
    report = run_on_gpu(hazard, driver, times=2)
    assert (report.late, report.bad_wrong, report.fixed_wrong) == ("sum", 2, 0)


def test_a_replay_begins_from_poison_and_frees_everything() -> None:
    hazard = find("02")
    driver = HostDriver(1 << 34)
    data = data_of(hazard, 0)
    replayer = Replayer(plan_of(hazard, hazard.fixed), data.weights, driver)
    first, second = replayer.run(data.feeds), replayer.run(data.feeds)
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)
    replayer.close()
    assert driver.used == 0 and not driver.pinned


def test_a_lost_device_is_one_line() -> None:
    hazard = find("02")
    driver = HostDriver(1 << 34)
    data = data_of(hazard, 0)
    replayer = Replayer(plan_of(hazard, hazard.fixed), data.weights, driver)
    driver.lost = True
    with pytest.raises(BackendError, match="the device is lost"):
        replayer.run(data.feeds)
    replayer.close()


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_hazards, "open_driver", lambda name: HostDriver(1 << 34))
    given = ["run", "01H", "--device", "cuda0", "--times", "1"]
    table = CliRunner().invoke(cli_hazards.hazards_app, given)
    assert table.exit_code == 0 and "1 of 1" in table.stdout and "0 of 1" in table.stdout
    found = json.loads(CliRunner().invoke(cli_hazards.hazards_app, [*given, "--json"]).stdout)
    assert found[0]["ok"] and found[0]["late"] == "logits" and found[0]["device"]
    refused = CliRunner().invoke(cli_hazards.hazards_app, [*given, "--html", "x.html"])
    assert "leave out --device" in str(refused.exception)
