"""`scripts/gpu_check.py` end to end on the stand-in for a GPU: every section that it has there."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cuda_host import HostDriver, need_compiler

ROOT = Path(__file__).parent.parent


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, on a stand-in, with two races and no repetitions."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    found = importlib.import_module("gpu_check")
    monkeypatch.setattr(found, "open_driver", lambda name: HostDriver(1 << 33))
    monkeypatch.setattr(found, "KINDS", ("q4_k",))
    monkeypatch.setattr(found.gpu_correct, "HAZARDS", found.gpu_correct.HAZARDS[:2])
    monkeypatch.setattr(found.gpu_speed, "seconds_of", _once)
    return found


def _once(work: Any, wait: Any, least: float = 0.0, watched: Any = None) -> tuple[float, float]:
    begun = time.perf_counter()
    work()
    wait()
    return max(time.perf_counter() - begun, 1e-6), watched.waited if watched else 0.0


@need_compiler
def test_every_section_runs(check: Any, tmp_path: Path) -> None:
    """In two commands that share one file; the model comes in two pieces."""
    out = tmp_path / "gpu.json"
    sections = "ops,invariance,logits,draw,split,identity,races,ceilings,speed"
    raw = small_file(tmp_path).read_bytes()
    pieces = [tmp_path / "model.0", tmp_path / "model.1"]
    for path, part in zip(pieces, (raw[:50_000], raw[50_000:]), strict=True):
        path.write_bytes(part)
    assert check.main(["--quick", "--only", sections, "--out", str(out)]) == 0
    model = [str(p) for p in pieces]
    given = ["--quick", "--only", "model", "--model", *model, "--out", str(out)]
    assert check.main(given) == 0
    record = json.loads(out.read_text())
    found = record["sections"]
    assert set(found) == {*sections.split(","), "model", "tiny q4_k"} - {"speed"}
    assert found["ops"]["examples"] > 200 and found["races"]["bad_share"] == 1.0
    assert found["split"]["devices"] == ["cpu", "cuda0"] and found["model"]["error_f32"] < 1e-3
    assert found["tiny q4_k"]["eagle_round_over_decode"] > 0 and found["tiny q4_k"]["same_text"]
    reached = {r["what"]: r["reached"] for r in record["proof"]}
    assert reached["races: fixed runs that corrupt"] == "aim"
    assert reached["8 rows over 1, bf16"] is None, "only the real shapes count"


def small_file(folder: Path) -> Path:
    """A complete GGUF file."""
    made: Path = importlib.import_module("small_model").small_model(folder / "small.gguf")
    return made


def test_the_table_of_bars(check: Any) -> None:
    rows = check.proof(
        {
            "races": {"ok": True, "bad_share": 0.96, "fixed_wrong": 1},
            "torch": {"ok": True, "times_faster": 12.0},
            "Llama-3.1-8B bf16": {"ok": True, "decode_host_us": 45.0, "verify8_over_decode": 1.3},
        }
    )
    reached = {r["what"]: r["reached"] for r in rows if r["reached"]}
    assert reached == {
        "races: least share of bad runs": "bar",
        "races: fixed runs that corrupt": "missed",
        "SmolLM2 decode over transformers": "aim",
        "host us per replayed step": "bar",
        "8 rows over 1, bf16": "missed",
    }


@need_compiler
def test_a_failing_section_is_reported_and_the_others_go_on(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "open_driver", lambda name: HostDriver(1 << 20))
    given = ["--quick", "--only", "ceilings,ops", "--out", str(tmp_path / "gpu.json")]
    assert check.main(given) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert found["ops"]["ok"] and "BackendError" in found["ceilings"]["error"]


def test_without_a_gpu_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = importlib.import_module("gpu_check")
    out = tmp_path / "gpu.json"
    assert check.main(["--device", "cuda9999", "--only", "ops", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu_check: cuda9999: ") and error.count("\n") == 1
    assert not out.exists()


def test_an_unknown_section_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = importlib.import_module("gpu_check")
    with pytest.raises(SystemExit):
        check.main(["--only", "ops,speeed"])
    assert "no section speeed" in capsys.readouterr().err
