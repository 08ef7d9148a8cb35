"""`scripts/gpu_check.py` end to end on the stand-in for a GPU: every section that it has there."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from cuda_host import HostDriver, need_compiler

ROOT = Path(__file__).parent.parent


@need_compiler
def test_every_section_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = importlib.import_module("gpu_check")
    monkeypatch.setattr(check, "open_driver", lambda name: HostDriver(1 << 33))
    monkeypatch.setattr(check, "HAZARDS", check.HAZARDS[:2])
    monkeypatch.setattr(check, "seconds_of", lambda work, wait: (work(), wait(), 1.0)[-1])
    out = tmp_path / "gpu.json"
    sections = "ops,invariance,logits,identity,races,ceilings,host,speed"
    model = str(ROOT / "tests" / "golden" / "tiny" / "llama_tied")
    given = ["--quick", "--only", sections, "--model", model, "--out", str(out)]
    assert check.main(given) == 0
    found = json.loads(out.read_text())["sections"]
    assert set(found) == {*sections.split(","), "model", "tiny bf16", "tiny q4_k"} - {"speed"}
    assert found["ops"]["examples"] > 200 and found["races"]["reports"][0]["ok"]
    for kind in ("bf16", "q4_k"):
        assert found[f"tiny {kind}"]["eagle_round_over_decode"] > 0


@need_compiler
def test_a_failing_section_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = importlib.import_module("gpu_check")
    monkeypatch.setattr(check, "open_driver", lambda name: HostDriver(1 << 20))
    given = ["--quick", "--only", "ceilings,ops", "--out", str(tmp_path / "gpu.json")]
    assert check.main(given) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert found["ops"]["ok"] and "BackendError" in found["ceilings"]["error"]
    assert "sys" in sys.modules
