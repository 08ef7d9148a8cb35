"""The runner as a user meets it: output, statistics, and one clear line for bad input."""

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cli_kit import HEAD, ROOT, ggraph, ggraph_here, refused_here, start
from small_model import TINY, small_model
from typer.main import get_command
from typer.testing import CliRunner

from ggraph.decode.engine import Engine
from ggraph.decode.sampler import SamplerConfig
from models.cli.app import COMMANDS, app
from models.cli.chat import _lines
from models.cli.draft import painted
from models.run.drafting import DraftOptions
from models.run.generation import Drafting, Generation, compare
from models.run.load import load


def test_generate_prints_text_and_statistics(model: Path) -> None:
    status, out, err = ggraph("generate", "-m", model, "-n", "12", "--temp", "0", "Hello")
    assert status == 0, err
    assert out.strip()
    for word in ("load", "plan and verify", "prompt", "decode", "peak memory"):
        assert word in err


def test_json_is_one_object_and_seeds_repeat(model: Path) -> None:
    asked = ("generate", "-m", model, "-n", "16", "--json", "Hello", "--seed")
    found = ggraph(*asked, "1"), ggraph_here(*asked, "1"), ggraph_here(*asked, "2")
    one, two, other = (json.loads(out) for _, out, _ in found)
    assert one["text"] == two["text"] != other["text"]
    assert one["new_tokens"] == 16
    assert one["stopped_by"] == "length"


@pytest.mark.parametrize("temp", ["0", "0.8"])
def test_one_plan_for_the_prompt_and_one_for_the_rounds(model: Path, temp: str) -> None:
    """However the sampler chooses: a prompt planned for another one would be a plan too many, which
    the first token waits for."""
    found = ggraph_here("generate", "-m", model, "-n", "4", "--temp", temp, "--json", "Hello")
    assert json.loads(found[1])["plans"] == 2


def test_a_profile_names_ops_and_ceilings(model: Path) -> None:
    status, out, err = ggraph(
        "generate", "-m", model, "-n", "6", "--temp", "0", "--profile", "--json", "Hello"
    )
    assert status == 0, err
    facts = json.loads(out)["profile"]
    assert set(facts["ceilings"]) == {"read", "copy", "fma", "products"}
    assert sum(r["share"] for r in facts["ops"]) == pytest.approx(1)
    decode = {r["op"]: r for r in facts["ops"] if r["rows"] == 1}
    assert any(name.startswith("mul_mat") for name in decode)
    assert any(name.startswith("flash_attn") for name in decode)
    shown = ggraph_here("eagle3", "-m", model, "-n", "6", "--profile", "Hello")[2]
    assert "GFLOP/s" in shown


def test_the_first_run_says_that_it_compiles(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "models", "generate", "-m", str(model), "-n", "3", "Hi"]
    environment = {**os.environ, "GGRAPH_CACHE": str(tmp_path)}
    said = [
        subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stderr
        for _ in range(2)
    ]
    assert said[0].count("compiling kernels") == 1
    assert "behind the first token" not in said[0], "the rounds' kernels come before it too"
    assert "compiling" not in said[1], "the second run finds them"
    assert len(list((tmp_path / "cpu").glob("*.image"))) > 5


def test_standard_input_is_a_prompt(model: Path) -> None:
    plain = ggraph_here("generate", "-m", model, "-n", "8", "--temp", "0", "--json", "Hi there")
    piped = ggraph(
        "generate", "-m", model, "-n", "8", "--temp", "0", "--json", "-", stdin="Hi there"
    )
    assert json.loads(plain[1])["text"] == json.loads(piped[1])["text"]


def test_a_stop_string_ends_the_text_before_it(model: Path) -> None:
    asked = ("generate", "-m", model, "-n", "40", "--temp", "0", "--json")
    whole = json.loads(ggraph_here(*asked, "Hello")[1])["text"]
    word = whole[5:8]
    facts = json.loads(ggraph_here(*asked, "--stop", word, "Hello")[1])
    assert facts["text"] == whole[: whole.index(word)]
    assert facts["stopped_by"] == "stop string"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_clear_line(model: Path) -> None:
    command = [sys.executable, "-m", "models", "generate", "-m", str(model), "-n", "4", "Hi"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == ["ggraph: [Errno 28] No space left on device"]


def test_a_terminal_without_the_letters_gets_marks(model: Path) -> None:
    command = [sys.executable, "-m", "models", "generate", "-m", str(model), "-n", "20", "Hi"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=plain, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_eagle3_shows_identical_text(model: Path) -> None:
    with start("-m", model, "--json", "-n", "24", "Hello", module="models.eagle3") as process:
        out, err = process.communicate(timeout=120)
    facts = json.loads(out)
    assert facts["identical"] is True, err
    assert facts["rounds"] >= 1
    head = TINY / "eagle3_for_llama_tied"
    fixed = ["--fixed", "--draft-max", "4"]  # left to itself, a random head is left alone
    for more in (["--tree", "8,2,3"], ["--draft", "suffix,eagle3"], ["--accept", "reject"]):
        asked = ("eagle3", "-m", model, "--head", head, "--json", *more, *fixed, "Hello")
        status, out, err = ggraph_here(*asked)
        assert status == 0, err
        assert json.loads(out)["drafted"] > 0


def test_generate_drafts_and_compares(model: Path) -> None:
    """The drafters' options and figures are those of the eagle3 command, and change no text."""
    asked = ("generate", "-m", model, "-n", "40", "--seed", "5", "--json", "--stop", "zq")
    plain = json.loads(ggraph_here(*asked, "Hello")[1])
    assert "speculation" not in plain
    head = TINY / "eagle3_for_llama_tied"
    for more in (
        ["--draft", "suffix,lookup"], ["--head", head], ["--head", head, "--tree", "8,2,3"],
        ["--model-draft", model, "--draft-max", "3", "--draft-p-min", "0.1", "--fixed"],
    ):  # fmt: skip
        status, out, err = ggraph_here(*asked, *more, "Hello")
        assert status == 0, err
        facts = json.loads(out)
        assert facts["text"] == plain["text"], more
        assert facts["new_tokens"] == plain["new_tokens"]
        drafts = facts["speculation"]
        assert drafts["acceptance_length_counts_bonus"] is True
        gained = drafts["accepted"] + drafts["rounds"]
        assert drafts["acceptance_length"] == gained / drafts["rounds"]
        assert gained == facts["new_tokens"] - 1
        assert sum(drafts["drafted_by_position"]) <= drafts["drafted"]
        assert len(drafts["drafted_by_position"]) == len(drafts["accepted_by_position"])
        for part in ("draft", "verify", "sample", "host"):
            assert drafts[f"{part}_seconds"] >= 0
    fixed = ("--draft-max", "3", "--fixed")  # else drafts that never pay are not made
    status, out, err = ggraph_here(*asked, "--compare", "--head", head, *fixed, "Hello")
    assert status == 0, err
    facts = json.loads(out)
    assert facts["identical"] is True
    assert facts["text"] == plain["text"]
    assert facts["speedup"] == facts["plain_seconds"] / facts["speculative_seconds"]


def test_drafting_is_told_to_people(model: Path) -> None:
    asked = ("generate", "-m", model, "-n", "9", "--seed", "1", "Hi Hi Hi")
    status, out, err = ggraph_here(*asked, "--draft", "suffix")
    assert status == 0 and out.strip()
    assert "acceptance length" in err and "bonus counted" in err
    status, out, err = ggraph_here(*asked, "--compare")
    assert status == 0 and out.strip()
    for word in ("plain", "speculative", "identical text", "draft", "verify", "sample", "host"):
        assert word in err


def test_what_is_painted_is_the_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters of several tokens are whole, and it ends before what ends it."""
    said = "a\u00e9 \U0001f30a end of it".encode()  # each byte is a token
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: iter(said))
    with closing(load(model, threads=1)) as m:
        run = Generation(m, [1], SamplerConfig(temp=0), 40, ["end"])
        found = compare(run, Drafting(DraftOptions()))
    assert painted(found).plain == found.text == "a\u00e9 \U0001f30a "


def test_convert_and_quantize_write_what_loads(model: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    source = TINY / "eagle3_for_llama_tied"
    assert ggraph_here("convert", source, "--target", model, "-o", head, "--type", "q8_0")[0] == 0
    small = tmp_path / "q8.gguf"
    status, out, err = ggraph_here("quantize", model, small, "--type", "Q8_0")
    assert status == 0, err
    assert out == f"{small}: q8_0, {small.stat().st_size:,} bytes\n"
    asked = ("eagle3", "-m", small, "--head", head, "--json", "-n", "8", "Hello")
    status, out, err = ggraph_here(*asked)
    assert status == 0, err
    assert json.loads(out)["identical"] is True


def test_plan_in_all_its_forms(tmp_path: Path) -> None:
    tiny = TINY / "qwen3_moe"
    status, out, _ = ggraph_here("plan", tiny, "--full")
    assert status == 0
    for word in ("split 0 on cpu", "place ", "buffer arena@cpu", "verified:", "live-bytes bound"):
        assert word in out
    facts = json.loads(ggraph_here("plan", tiny, "--json")[1])
    assert facts["certificate"]["reads_proved"] > 0
    assert ggraph_here("plan", tiny, "--dot")[1].startswith('digraph "qwen3moe step"')
    page = tmp_path / "plan.html"
    split = ["--device", "sim0,sim1,cpu", "--layers", "sim0=3,sim1=3", "--streams", "2"]
    assert ggraph_here("plan", tiny, *split, "--html", page)[0] == 0
    assert "<svg" in page.read_text()
    given = ["--device", "sim0,cpu", "--streams", "3", "--memory", "ggml", "--html", page]
    status, _, err = ggraph_here("plan", tiny, *given)
    assert status != 0 and "race" in err, "list-order reuse on three streams"
    assert "verify refuses this plan" in page.read_text()
    assert ggraph_here("plan", tiny, "--layers", f"cpu={10**18}")[0] == 0  # more than there are


def test_plan_prints_what_concurrency_buys_and_costs() -> None:
    """Speed-up over one stream, the table of both prices, and upstream's forced split."""
    tiny, gpu = TINY / "llama_tied", ["--device", "sim0,cpu"]
    one = json.loads(ggraph_here("plan", tiny, *gpu, "--json")[1])
    three = json.loads(ggraph_here("plan", tiny, *gpu, "--streams", "3", "--json")[1])
    assert three["speedup_over_one_stream"] > 1.1 > one["speedup_over_one_stream"]
    assert three["critical_path_seconds"] < one["critical_path_seconds"]
    _, out, _ = ggraph_here("plan", tiny, *gpu, "--streams", "3")
    assert f"{three['speedup_over_one_stream']:.2f}x of one stream" in out
    rows = json.loads(ggraph_here("plan", tiny, *gpu, "--trade", "--json")[1])
    assert rows[0]["streams"] == 1 and rows[0]["nbytes"] == arena_bytes(one)
    assert any(r["streams"] > 1 and r["critical_path_s"] < rows[0]["critical_path_s"] for r in rows)
    assert "orderings added" in ggraph_here("plan", tiny, *gpu, "--trade")[1]
    flag = ["--forced-sync", "blk.1.attn_norm.rms"]
    forced = json.loads(ggraph_here("plan", tiny, *gpu, *flag, "--json")[1])
    assert len(forced["splits"]) == len(one["splits"]) + 1
    assert sum("host_sync  sim0.0" in c for c in forced["commands"]) == 1
    rotated = json.loads(ggraph_here("plan", tiny, *gpu, "--copies", "2", "--overlap", "--json")[1])
    assert len(rotated["regions"]["tokens"]["offsets"]) == 2
    status, _, err = ggraph_here("plan", tiny, *gpu, "--forced-sync", "nobody")
    assert status != 0 and "has no node nobody" in err


def arena_bytes(facts: dict[str, Any]) -> int:
    """Bytes of the plan's own buffers."""
    return sum(b["bytes"] for b in facts["buffers"].values() if not b["external"])


def test_plan_explains_a_tensor() -> None:
    status, out, _ = ggraph_here("plan", TINY / "qwen3_moe", "--explain", "blk.1.attn")
    assert status == 0
    for word in ("place     cpu:", "split     0 on cpu", "allocate  arena@cpu [", "after %"):
        assert word in out
    asked = ("plan", TINY / "qwen3_moe", "--explain", "blk.1.attn", "--json")
    facts = json.loads(ggraph_here(*asked)[1])
    assert facts["tensor"] == facts["value"] == "blk.1.attn" and facts["stream"] == "cpu.0"


@pytest.mark.skipif(os.name == "nt", reason="signals differ on Windows")
def test_interrupt_keeps_what_was_printed(model: Path) -> None:
    process = start("generate", "-m", model, "-n", "4000", "-c", "512", "--temp", "0", "Hello")
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first + out
    assert "Traceback" not in err
    assert process.returncode in (0, 130)
    assert "ended by" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "nothing.gguf", "Hi"], "no model at nothing.gguf"),
        (["-m", "MODEL", " "], "the prompt is empty"),
        (["-m", "MODEL", "-c", "16", "a long prompt that cannot fit"], "context holds 16"),
        (["-m", "MODEL", "-c", "100000", "Hi"], "was trained for 1 to 512"),
        (["-m", "MODEL", "-n", "-7", "Hi"], "--n-predict -7"),
        (["-m", "MODEL", "--draft", "magic", "Hi"], "--draft 'magic'"),
        (["-m", "MODEL", "--draft", "eagle3", "Hi"], "needs a head"),
        (["-m", "MODEL", "--draft", "model", "--compare", "Hi"], "needs a model"),
        (["-m", "MODEL", "--draft-min", "9", "Hi"], "--draft-min 9, --draft-max 8"),
        (["-m", "MODEL", "--accept", "all", "Hi"], "known: match, reject"),
        (["-m", "MODEL", "--head", "nothing", "Hi"], "nothing"),
        (["-m", "MODEL", "--stop", "", "Hi"], "stop strings"),
        (["-m", "MODEL", "--temp", "nan", "Hi"], "temp: expected a finite number"),
        (["-m", "/dev/zero", "Hi"], "no GGUF file"),
        (["-m", "MODEL", "--device", "tpu0", "Hi"], "unknown device 'tpu0'"),
        (["-m", "MODEL", "--device", ",", "Hi"], "names no device"),
        (["-m", "MODEL", "--device", "sim0, sim0", "Hi"], "names a device twice"),
        (["-m", "MODEL", "--top-p", "-1", "Hi"], "top_p"),
        (["-m", "MODEL", "--repeat-penalty", "0", "Hi"], "repeat_penalty"),
    ],
)
def test_bad_requests_are_one_clear_line(model: Path, arguments: list[str], says: str) -> None:
    given = [str(model) if a == "MODEL" else a for a in arguments]
    err = refused_here("generate", *given)
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_bad_files_are_one_clear_line(model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04" + bytes(100))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:5000])
    loops = small_model(
        tmp_path / "loops.gguf",
        {"tokenizer.chat_template": "{% for i in range(10**9) %}{% for j in range(10**9) %}x"
         "{% endfor %}{% endfor %}"},
    )  # fmt: skip
    reach = small_model(
        tmp_path / "reach.gguf",
        {"tokenizer.chat_template": "{{ ().__class__.__bases__[0].__subclasses__() }}"},
    )
    alien = small_model(tmp_path / "alien.gguf", {"general.architecture": "alien"})
    nan = small_model(tmp_path / "nan.gguf", {"llama.rope.freq_base": float("nan")})
    for path, says in (
        (wrong, "begins with"), (cut, "cut.gguf"), (loops, "template"), (reach, "template"),
        (alien, "architecture 'alien'"), (nan, "not finite"), (tmp_path, "config.json"),
    ):  # fmt: skip
        err = refused_here("generate", "-m", path, "Hi")
        assert says in err, (path.name, err)
        assert len(err.strip().splitlines()) == 1, err


def test_bad_options_of_other_commands(model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments, says in (
        (["plan", model, "--memory", "best"], "--memory 'best'"),
        (["plan", model, "--layers", "sim0"], "expected DEVICE=COUNT"),
        (["plan", model, "--streams", "0"], "--streams 0"),
        (["plan", model, "--explain", "blk.0.atn"], "no tensor 'blk.0.atn' in this plan; is it"),
        (["plan", model, "--pin", "nomatch.*=cpu"], "nomatch"),
        (["plan", model, "--device", "sim0,tpu0"], "unknown device 'tpu0'"),
        (["plan", model, "--pin", "attn_q=sim9"], "unknown device 'sim9'; known: cpu"),
        (["plan", model, "--pin", "(=cpu"], "not a regular expression"),
        (
            ["plan", model, "--device", "sim0,cpu", "-ot", "attn_q=sim0", "-ot", "attn_q=cpu"],
            "contradictory pins for %blk.0.attn_q.weight: attn_q=sim0 and attn_q=cpu",
        ),
        (["plan", model, "--device", "sim0,cpu", "--layers", "sim7=3"], "known devices are sim0"),
        (["plan", model, "--capacity", "cpu=all"], "--capacity 'cpu=all': expected DEVICE=BYTES"),
        (["plan", model, "--capacity", "cpu=64"], "cpu has 64"),
        (["plan", model, "--capacity", "cpu=1500"], "placed on cpu: "),
        (["plan", model, "--html", tmp_path / "no" / "x.html"], "cannot write"),
        (["eagle3", "-m", model, "--draft", "magic", "Hi"], "--draft 'magic'"),
        (["eagle3", "-m", model, "--draft", "eagle3", "Hi"], "needs a head"),
        (["eagle3", "-m", model, "--tree", "x", "Hi"], "expected TOTAL,DEPTH,TOP_K"),
        (["eagle3", "-m", model, "--tree", "99,4,4", "Hi"], "expected 2 to 69 tokens"),
        (["eagle3", "-m", model, "--tree", "64,100,8", "Hi"], "may not exceed 512"),
        (["eagle3", "-m", model, "--tree", "9,1,1000", "Hi"], "may not exceed 512"),
        (["eagle3", "-m", model, "--head", HEAD, "--tree", "9,1,200", "Hi"], "knows 128 tokens"),
        (["eagle3", "-m", model, "--draft-max", "900", "Hi"], "expected 0 to 64"),
        (["eagle3", "-m", model, "--draft", "", "Hi"], "--draft ''"),
        (["eagle3", "-m", model, "--model-draft", "nothing.gguf", "Hi"], "no model at"),
        (["eagle3", "-m", model, "--draft-p-min", "nan", "Hi"], "a chance from 0 to 1"),
        (["eagle3", "-m", model, "--accept", "all", "Hi"], "known: match, reject"),
        (["eagle3", "-m", model, "-n", "-7", "Hi"], "--n-predict -7"),
        (["eagle3", "-m", model, " "], "the prompt is empty"),
        (["quantize", model, tmp_path / "x.gguf", "--type", "q9"], "--type 'q9'"),
        (["quantize", model, tmp_path / "no" / "x.gguf"], "cannot write"),
        (["quantize", model, pipe], "no regular file"),
    ):
        assert says in refused_here(*arguments)  # type: ignore[arg-type]


def test_usage_errors_and_help() -> None:
    status, _, err = ggraph("generate")
    assert status == 2 and "Traceback" not in err
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"]).output
        prose = [line.strip() for line in shown.splitlines() if "│" not in line]
        assert "Usage" in shown and "--install-completion" not in shown
        assert not [line for line in prose if "   " in line], command  # lines of the source
        found = get_command(app).get_command(None, command)  # type: ignore[attr-defined]
        for one in (found, *getattr(found, "commands", {}).values()):
            broken = [p for p in one.help.split("\n\n") if "\n" in p and not p.startswith(" ")]
            assert not broken, command  # the source's lines are longer than a terminal's
    assert ggraph("--version")[1].startswith("ggraph ")


def test_an_end_that_is_typed_beneath_an_answer_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"more\n\x04")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("builtins.input", lambda _: terminal.readline())
        assert list(islice(_lines(), 2)) == ["more"]
    os.close(ours)


@pytest.mark.skipif(importlib.util.find_spec("readline") is None, reason="no readline")
def test_a_line_of_a_chat_can_be_edited_and_said_again(model: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "models", "chat", "-m", model, "--temp", "0", "-n", "1"]
    env = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)

        def answered(typed: bytes) -> bytes:
            os.write(ours, typed)
            return prompted()

        def prompted() -> bytes:
            shown = b""
            while not re.search(rb"\n(\x1b\[\?2004h)?> $", shown):
                assert select.select([ours], [], [], 120)[0], shown
                shown += os.read(ours, 4096)
            return shown

        assert b"/reset forgets" in prompted()
        assert b"nothing was said yet" in answered(b"/stas\x1b[Dt\r")
        assert b"nothing was said yet" in answered(b"\x1b[A\r"), "the line before"
        assert b"^[" not in answered("/\u00fc\x1b[D\r".encode())
        os.write(ours, b"\x04")
    os.close(ours)
