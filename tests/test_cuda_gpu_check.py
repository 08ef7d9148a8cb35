"""`scripts/gpu_check.py` on the stand-in for a GPU: processes, limits, parts, the table."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from cuda_host import need_compiler

from ggraph.formats import open_checkpoint

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def check(*given: str, device: str = "stand-in") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        device,
        "--quick",
        "--seconds",
        "3000",
        *given,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_check")


@need_compiler
def test_sections_leave_their_parts_and_merge_into_one_record(tmp_path: Path) -> None:
    """In two commands with a folder each; the model comes in two pieces."""
    raw = small_file(tmp_path).read_bytes()
    pieces = [tmp_path / "model.0", tmp_path / "model.1"]
    for path, part in zip(pieces, (raw[:50_000], raw[50_000:]), strict=True):
        path.write_bytes(part)
    one, two = tmp_path / "one", tmp_path / "two"
    done = check("--out", str(one), "--only", "driver,ceilings,llama-bf16,few,algorithms,races")
    assert done.returncode == 0, done
    done = check("--out", str(two), "--only", "model", "--model", *map(str, pieces))
    assert done.returncode == 0, done
    merged = subprocess.run(
        [sys.executable, str(SCRIPT), "--merge", str(one), str(two), "--to", str(tmp_path / "to")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert merged.returncode == 0 and "not run: compile, products" in merged.stdout, merged
    (path,) = (tmp_path / "to").iterdir()
    record = json.loads(path.read_text())
    found = record["sections"]
    assert [*found] == ["driver", "ceilings", "llama-bf16", "few", "algorithms", "races", "model"]
    assert found["driver"]["passed"] >= 2 and found["races"]["bad_share"] == 1.0
    few = found["few"]["us_and_bytes_per_s"]
    assert len(few) == 4 and all(us > 0 and rate > 0 for us, rate in few.values())
    ranks = found["algorithms"]["seconds_by_rank"]
    assert len(ranks) == 7 and all([*seconds] == ["0", "1"] for seconds in ranks.values())
    assert found["model"]["error_f32"] < 1e-3 and found["llama-bf16"]["same_text"]
    low, high = found["llama-bf16"]["rows1_8_s_range"]
    assert low <= found["llama-bf16"]["rows1_8_s"] <= high
    assert len(record["about"]["sources"]) == 16 and record["about"]["numpy"]
    assert all(r["reached"] is None for r in record["proof"]), "only the real sizes count"


def small_file(folder: Path) -> Path:
    """A complete GGUF file."""
    made: Path = importlib.import_module("small_model").small_model(folder / "small.gguf")
    return made


def test_the_table_of_bars(script: Any) -> None:
    rows = script.proof(
        {
            "races": {"ok": True, "bad_share": 0.96, "fixed_wrong": 1},
            "torch": {"ok": True, "times_faster": 12.0},
            "llama-bf16": {"ok": True, "decode_host_us": 45.0, "rows8_over_1_2048": 1.3},
            "llama-q4_k": {"ok": True, "quick": True, "rows8_over_1_2048": 1.0},
        }
    )
    reached = {r["what"]: r["reached"] for r in rows if r["reached"]}
    assert reached == {
        "races: least share of bad runs": "bar",
        "races: fixed runs that corrupt": "missed",
        "SmolLM2 decode over transformers": "aim",
        "host us per replayed step": "bar",
        "8 rows over 1 at 2048, bf16": "missed",
    }


def test_a_section_ends_at_its_limit_and_the_others_go_on(script: Any, tmp_path: Path) -> None:
    """Killed with its children; what has no time is named; what a test journal had, comes back."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    (tmp_path / "races.tests.jsonl").write_text(
        '{"test": "a", "outcome": "passed"}\n{"test": "b", "outcome": "begun"}\n{"te'
    )
    script.__file__ = str(slow)
    found = script.supervise("races", [], tmp_path, 0.5)
    assert not found["ok"] and "over its limit" in found["error"] and found["seconds"] < 30
    assert found["passed"] == 1 and found["wrong"] == ["b: begun"]
    slow.write_text("import os; os.abort()")
    assert "ended with status -6" in script.supervise("draw", [], tmp_path, 30)["error"]
    assert script.run_all(["draw", "split"], [], tmp_path, 1.0) == ["draw", "split"]
    assert not (tmp_path / "split.json").exists()


def test_what_an_earlier_run_left_is_not_this_one_s(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a section that fails now, and of one that has no time; others' parts stay."""
    crash = tmp_path / "crash.py"
    crash.write_text("import os; os.abort()")
    script.__file__ = str(crash)
    for name in ("draw", "races", "split", "few"):
        (tmp_path / f"{name}.json").write_text('{"ok": true, "seconds": 1}')
    (tmp_path / "races.tests.jsonl").write_text('{"test": "a", "outcome": "passed"}\n')
    assert script.run_all(["draw", "races"], [], tmp_path, 60.0) == ["draw", "races"]
    part = json.loads((tmp_path / "races.json").read_text())
    assert part["error"] == "ended with status -6" and "passed" not in part
    assert script.run_all(["split"], [], tmp_path, 0.0) == ["split"]
    assert not (tmp_path / "split.json").exists() and (tmp_path / "few.json").exists()
    assert "no time for: split" in capsys.readouterr().out


@need_compiler
def test_a_refused_capture_fails_its_section(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(device: str) -> Any:
        driver = importlib.import_module("cuda_host").HostDriver()
        driver.refuses_capture = True
        return driver

    monkeypatch.setattr(script, "opened", refusing)
    given = ["--quick", "--device", "stand-in", "--section", "draw", "--out", str(tmp_path)]
    with warnings.catch_warnings():
        assert script.main(given) == 1
    part = json.loads((tmp_path / "draw.json").read_text())
    assert "run without graphs" in part["error"]


def test_without_a_gpu_there_is_one_line(tmp_path: Path) -> None:
    done = check("--only", "draw", "--out", str(tmp_path / "out"), device="cuda9999")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("gpu_check: cuda9999: ") and done.stderr.count("\n") == 1


def test_an_unknown_section_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--only", "draw,speeed", "--out", "x"])
    assert "no section speeed" in capsys.readouterr().err


def test_a_test_that_kills_its_process_is_named_and_the_rest_run(
    script: Any, tmp_path: Path
) -> None:
    runner = importlib.import_module("gpu_tests")
    held = tmp_path / "test_some.py"
    held.write_text(
        "import os\ndef test_a(): pass\ndef test_b(): os._exit(9)\ndef test_c(): assert 0\n"
        "def test_d(): pass\n"
    )
    found = runner.run(tmp_path / "journal", [str(held)], "", "")
    assert (found["passed"], found["failed"], found["begun"], found["restarts"]) == (2, 1, 1, 1)
    assert not found["ok"] and [w.split(": ")[1][:6] for w in found["wrong"]] == ["begun", "failed"]


def test_every_call_of_the_page_is_small_enough_to_travel(script: Any) -> None:
    played: Any = importlib.import_module("gpu_rehearse")
    for call in played.calls():
        tree = sum((ROOT / name).stat().st_size for name in played.files(call))
        assert tree + bool(call.travels) * played.PIECE_BYTES <= played.MOST_BYTES, call


@need_compiler
def test_calls_of_the_page_on_a_machine_that_is_played(
    script: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model's four calls: a piece travels with each, three wait on the machine, one folder
    comes back per call. A command over the limit is ended, a tree over 64 MiB does not travel."""
    played: Any = importlib.import_module("gpu_rehearse")
    calls = {c.number: c for c in played.calls()}
    assert [*calls] == [*range(1, 9)] and {n for n, c in calls.items() if c.travels} == {4, 5, 6, 7}
    model = small_file(tmp_path)
    to, fourth = tmp_path / "to", -(-model.stat().st_size // 4)
    to.mkdir()
    chosen = [calls[n] for n in (4, 5, 6, 7)]
    assert played.rehearse(chosen, to, model, 600.0, fourth) == 0, capfd.readouterr()
    assert not [*(to / "4").iterdir()] and (to / "7" / "model.json").is_file()
    assert json.loads((to / "7" / "model.json").read_text())["ok"]
    for folder, most in (("slow", played.MOST_BYTES), ("large", 1000)):
        played.MOST_BYTES = most
        (tmp_path / folder).mkdir()
        one = [played.Call(1, calls[1].stays, "", "touch $OUT/begun; sleep 60")]
        assert played.rehearse(one, tmp_path / folder, None, 0.5) == 1
    assert (tmp_path / "slow" / "1" / "begun").is_file() and not [*(tmp_path / "large").iterdir()]
    assert "call 1: status 124" in capfd.readouterr().out


@need_compiler
def test_a_peer_on_the_same_file(tmp_path: Path) -> None:
    """The file is made, llama-bench is asked for each case, and rates stand beside its own."""
    tokens = small_file(tmp_path)
    count = len(open_checkpoint(tokens).metadata["tokenizer.ggml.tokens"])
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 256,
             "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": count}  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    bench = tmp_path / "llama-bench"
    row = '[{"avg_ts": 2.0, "build_commit": "abc", "build_number": 7}]'
    bench.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\necho '{row}'\n")
    bench.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_peer.py"), "--device", "stand-in", "--shape",
         str(tmp_path / "tiny.json"), "--llama-bench", str(bench), "--folder", str(tmp_path),
         "--tokenizer", str(tokens), "--to", str(tmp_path / "found.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "tiny.q4_k_m.gguf").is_file(), done
    asked = (tmp_path / "asked").read_text()
    assert [line.split(" -d ")[1].split()[0] for line in asked.splitlines()] == ["64", "2048", "0"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["llama.cpp"] == "abc (7)" and len(found["rows"]) == 3
    for rates in found["rows"].values():
        assert rates["llama.cpp"] == 2.0 and rates["ratio"] > 0
        assert rates["ratio"] == pytest.approx(rates["ggraph"] / 2)
