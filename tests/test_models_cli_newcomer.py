"""What newcomers do to the runner: interrupt it, pipe it, fill the disk, type other options."""

import fcntl
import importlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import HEAD, ROOT, ggraph, ggraph_here, refused_here, start
from small_model import TINY, byte_alphabet, small_model

from ggraph import InputError
from models.bench.spec import read_prompts
from models.cli.common import CompilingLine, write_text
from models.cli.interrupt import answering

sys.path.insert(0, str(ROOT / "scripts"))
dev: Any = importlib.import_module("dev")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell makes what it starts in the background deaf to Ctrl-C, and all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def python(*arguments: str | Path, before: Callable[[], None] | None = None, **how: Any) -> Any:
    """One run of the interpreter that serves the tests, from the project's root."""
    given = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 300, **how}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, preexec_fn=before, check=False, **given)


def test_an_interrupt_ends_the_answer_once() -> None:
    ends = signal.getsignal(signal.SIGINT)
    with answering() as state:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with answering() as state:
        state.done()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is ends
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("module", ["models", "models.eagle3"])
@pytest.mark.parametrize("at", ["numpy", "ggraph.pipeline"])
def test_an_interrupt_amid_the_imports_says_nothing(module: str, at: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == at:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err and not out


def test_an_interrupt_amid_the_answer_keeps_the_figures(tmp_path: Path) -> None:
    tokens = [*byte_alphabet(), "<|im_start|>", *(f"<|unused{i}|>" for i in range(62)), "ab"]
    endless = small_model(
        tmp_path / "endless.gguf",
        {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": None,
         "llama.context_length": 8192},
    )  # fmt: skip
    process = start("generate", "-m", endless, "-n", "8000", "-c", "8192", "--temp", "0", "Hello")
    assert process.stdout is not None and process.stderr is not None
    # the answer is longer than what an unread pipe takes: it is not through when Ctrl-C comes
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    process.stdout.read(1)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err
    assert "ended by interrupt" in err and err.count("peak memory") == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = start("plan", TINY / "qwen3_moe", "--full", "--streams", "2")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("plan of")
    process.stdout.close()
    assert process.stderr.read() in ("", "compiling kernels for this processor\n")
    assert process.wait(timeout=300) == 0


def test_a_closed_standard_input_is_one_line(model: Path) -> None:
    for asked in (("generate", "-m", model, "-"), ("verify", "-")):
        done = python("-m", "models", *asked, before=lambda: os.close(0))
        assert done.returncode == 2
        assert done.stderr.splitlines() == ["ggraph: standard input is closed"]


def test_a_closed_standard_output_is_no_fault(model: Path) -> None:
    done = python("-m", "models", "generate", "-m", model, "Hi", before=lambda: os.close(1))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "peak memory" in done.stderr


def test_a_thread_that_cannot_start_is_one_line(model: Path) -> None:
    code = (
        "import runpy, sys, threading\n"
        'def start(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = start\n"
        "sys.argv[1:] = ['generate', '-m', sys.argv[1], '-t', '2', 'Hi']\n"
        "runpy.run_module('models', run_name='__main__', alter_sys=True)\n"
    )
    done = python("-c", code, model)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "thread" in done.stderr


def full_disk() -> None:
    """No file may grow over 4 KiB: writing fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_full_disk_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    for asked in (
        ("plan", model, "--export", tmp_path / "plan.json"),
        ("plan", model, "--html", tmp_path / "plan.html"),
        ("quantize", model, tmp_path / "small.gguf"),
    ):
        # -B: bytecode would be cut off as well, and stay (the interpreter does not look)
        done = python("-B", "-m", "models", *asked, before=full_disk)
        assert done.returncode == 2, done.stderr
        said = [x for x in done.stderr.splitlines() if x != "compiling kernels for this processor"]
        assert len(said) == 1 and said[0].startswith("ggraph: "), done.stderr
        assert said[0].endswith("File too large")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_signal_cuts_off_leaves_nothing_behind(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "import runpy, signal, sys\n"
        "from ggraph.formats import gguf\n"
        "gguf.pieces = lambda *_: (print('writing', flush=True), signal.pause())\n"
        "sys.argv[1:] = ['quantize', *sys.argv[1:]]\n"
        "runpy.run_module('models', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", code, model, tmp_path / "small.gguf"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while process.stdout.readline() != "writing\n":
            assert process.poll() is None
        assert [f.suffix for f in tmp_path.iterdir()] == [".part"]
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in err, err
    assert not list(tmp_path.iterdir())


def test_what_was_there_stays_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_text(path, "old")
    with pytest.raises(InputError, match="cannot write"):
        write_text(tmp_path / "no" / "such.json", "x")
    write_text(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["kept.json"]


def test_what_training_writes_is_whole_or_not_there(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from models.run.outputs import write_whole\n"
        "write_whole(pathlib.Path(sys.argv[1]), bytes(5000))\n"
    )
    (tmp_path / "kept").write_bytes(b"old")
    for name in ("new", "kept"):
        done = python("-c", code, tmp_path / name, before=full_disk)
        assert f"cannot write {tmp_path / name}: File too large" in done.stderr.splitlines()[-1]
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize(
    "line",
    ["[1]", "3", '"text"', "null", "{}", '{"category": "a"}', '{"category": "a", "turns": []}',
     '{"category": "a", "turns": [3]}', '{"category": "a", "turns": "text"}', "{"],
)  # fmt: skip
def test_wrong_lines_of_prompts_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "a", "turns": ["Hi"]}\n' + line + "\n")
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(path, 5)


def test_the_line_about_compiling_fits_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in (("COLUMNS", "80"), ("TERM", "xterm"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    line = CompilingLine()
    for i in range(30):
        line(f"a_kernel_with_a_name_that_is_longer_than_all_the_others_{i}")
    for shown in terminal.getvalue().split("\r\x1b[K")[1:]:
        assert len(shown.removeprefix("\x1b[2m").removesuffix("\x1b[0m")) < 80 and "\n" not in shown
    line.mute()
    assert terminal.getvalue().endswith("\r\x1b[K"), "nothing is left of it"
    line("another")
    assert terminal.getvalue().endswith("\r\x1b[K"), "and nothing more comes"


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_first_run_compiles_before_its_answer(verb: str, model: Path, tmp_path: Path) -> None:
    """Kernels of rounds too: on a terminal, who reads must not wait amid a word."""
    asked = (verb, "-m", model, "-n", "8", "--temp", "0", *(("Hi",) if verb == "generate" else ()))
    status, out, err = ggraph(*asked, stdin="Hi\n/stats\n", env={"GGRAPH_CACHE": str(tmp_path)})
    assert status == 0 and out.strip() and "prompt" in err
    assert "compiling kernels for this processor" in err
    assert "behind the first token" not in err


def test_dev_runs_in_the_folder_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    wanted = "\n".join(dev.requirements(None)) + "\n"
    (tmp_path / "venv" / "installed-run.txt").write_text(wanted)
    work = tmp_path / "work"
    (work / "models").mkdir(parents=True)
    (work / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')\n")
    command = [ROOT / "scripts" / "dev.py", "--venv", folder.parent, "run"]
    done = python(*command, "plan", TINY / "llama_tied", "--export", "plan.json", cwd=work)
    assert done.returncode == 0, done.stderr
    assert (work / "plan.json").is_file()
    shown = python(*command, "--help", cwd=work).stdout
    assert all(name in shown for name in dev.COMMANDS)


def test_dev_installs_what_a_command_needs() -> None:
    assert dev.extra("run", ["serve", "--port", "0"]) == "serve" == dev.extra("run", ["batch"])
    assert dev.extra("run", ["serve", "--ray"]) == "ray"
    assert dev.extra("test", ["-q", "tests/test_serve_ray.py"]) == "ray-dev"
    with_ray = set(dev.requirements("ray-dev"))
    assert with_ray > {*dev.requirements("dev"), *dev.requirements("serve")}
    assert {r.partition("[")[0] for r in with_ray if "ggraph" in r or "ray" in r} == {"ray"}
    assert dev.extra("run", ["generate", "serve"]) is None
    assert dev.extra("run", []) is None and dev.extra("test", []) == "dev"
    assert set(dev.requirements("serve")) > set(dev.requirements(None))


def test_dev_hands_on_what_follows_the_verb() -> None:
    bin_folder = Path("bin")
    assert dev.split(["--venv", "run", "run", "--help"]) == (["--venv", "run", "run"], ["--help"])
    assert dev.steps("run", ["--version"], bin_folder)[0][-2:] == ["models", "--version"]
    assert dev.steps("run", [], bin_folder)[0][-1] == "models"
    assert dev.steps("run", ["Hi"], bin_folder)[0][-2:] == ["generate", "Hi"]
    whole = dev.steps("test", ["--help"], bin_folder)[0]
    assert whole[1:3] == ["-m", "pytest"] and whole[3] == "-n" and whole[-1] == "--help"
    named = dev.steps("test", ["-q", "tests/test_graph.py::test_it"], bin_folder)[0]
    assert named[1:] == ["-m", "pytest", "-q", "tests/test_graph.py::test_it"], "no workers for one"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--system", "Be brief", "--no-chat", "Hi"], "--no-chat leaves out"),
        (["--fixed", "Hi"], "--fixed without drafts"),
        (["--draft-max", "3", "--accept", "reject", "Hi"], "--draft-max, --accept without drafts"),
        (["--draft", "suffix", "--tree", "8,2,3", "Hi"], "--tree is for the eagle3 or mtp drafter"),
        (["--draft", "suffix", "--head", HEAD, "Hi"], "--head is for the eagle3 or mtp or dflash"),
        (["--draft", "suffix", "-md", "MODEL", "Hi"], "--model-draft is for the model drafter"),
        (["--compare", "--tree", "8,-1,0", "Hi"], "expected TOTAL,DEPTH,TOP_K"),
        (["--compare", "--tree", "8,1,0", "Hi"], "expected at least depth 0, top_k 1"),
        (["--parse-special", "Hi"], "--parse-special is for --no-chat"),
        (["-c", "16", "a long prompt that cannot fit"], "(-c sets another)"),
        (["-p", "Hi", "Hi"], "expected one prompt"),
        ([], "expected one prompt"),
        (["-f", "nothing.txt"], "cannot read nothing.txt"),
        (["-hf", "a/model:Q4_0", "Hi"], "-hf a/model:Q4_0: expected one model"),
        (["-ctk", "f16", "-ctv", "q8_0", "Hi"], "keys and values have one type"),
    ],
)
def test_options_are_never_ignored(model: Path, arguments: list[Any], says: str) -> None:
    given = [model if a == "MODEL" else a for a in arguments]
    err = refused_here("generate", "-m", model, *given)
    assert says in err and len(err.splitlines()) == 1


def test_options_of_llama_cpp_are_understood(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    asked = ("generate", "-m", model, "-n", "4", "--temp", "0", "--json")
    texts = [
        json.loads(ggraph_here(*asked, *more)[1])["text"]
        for more in (
            ["Hello"], ["-p", "Hello"], ["-f", file, "-c", "0"], ["-p", "Hello", "-md", model],
        )
    ]  # fmt: skip
    assert len(set(texts)) == 1
    for kept in (["-ctk", "F16"], ["-ctk", "f32", "-ctv", "F32"]):
        assert ggraph_here(*asked, "-sys", "Be brief", *kept, "Hi")[0] == 0
    assert ggraph_here(*asked, "-sys", "Be brief", "--cache-type", "F16", "Hi")[0] == 0
    assert ggraph_here("quantize", model, tmp_path / "q8.gguf", "--type", "Q8_0")[0] == 0


def test_special_tokens_are_meant_where_that_is_asked(model: Path) -> None:
    """The small model puts no bos token in front; its markers are one token each then."""
    given = ("generate", "-m", model, "-n", "2", "--json", "--no-chat", "<|im_start|>ab<|im_end|>")
    plain, meant = (json.loads(ggraph_here(*given, *more)[1]) for more in ([], ["--parse-special"]))
    assert (plain["prompt_tokens"], meant["prompt_tokens"]) == (23, 3)


@pytest.mark.parametrize("threads", ["0", "-1", "257"])
@pytest.mark.parametrize("verb", ["generate Hi", "eagle3 Hi", "bench spec", "plan"])
def test_threads_are_bounded_alike(verb: str, threads: str) -> None:
    status, _, err = ggraph_here(*verb.split(), "-t", threads)
    said = f"{threads} is not in the range 1<=x<=256"
    assert status == 2 and said in " ".join(err.replace("│", "").split())


def test_plan_begins_with_its_verdict() -> None:
    status, out, _ = ggraph("plan", TINY / "qwen3_moe")
    assert status == 0 and out.splitlines()[1].startswith("verified:")
    assert len(out.splitlines()) < 40 and "place " not in out
    err = refused_here("plan", TINY / "qwen3_moe", "--context", "4096")
    assert "expected 1 to 1024 (-c)" in err


def test_one_token_has_no_speed(model: Path) -> None:
    """Its time is the prompt's."""
    err = ggraph_here("generate", "-m", model, "-n", "1", "--temp", "0", "Hello")[2]
    assert "decode 1 token ·" in err


def test_nothing_drafted_is_no_speed_up(model: Path) -> None:
    status, _, err = ggraph(
        "generate", "-m", model, "-n", "2", "--compare", "--draft-max", "0", "H"
    )
    assert status == 0 and "nothing was drafted" in err and "x\n" not in err
    asked = ("eagle3", "-m", model, "-n", "2", "--draft-max", "0", "--json", "--profile", "H")
    made = ggraph_here(*asked)
    facts = json.loads(made[1])
    assert facts["drafted"] == 0 and facts["speedup"] is None
    assert facts["profile"]["ops"] and len(made[1].splitlines()) == 1


@pytest.mark.parametrize("command", ["generate", "plan", "serve"])
@pytest.mark.parametrize("option", ["-ngl", "-no-cnv", "-cb", "-tb", "-ub"])
def test_an_option_of_llama_cpp_is_told_by_its_whole_name(command: str, option: str) -> None:
    assert f"No such option: {option}" in refused_here(command, option, "99", "hi")
    assert "'gl' is not a valid int" in refused_here("generate", "-n", "gl", "hi")


@pytest.mark.parametrize("module", ["models", "models.eagle3"])
def test_a_python_without_the_packages_is_told_where_they_are(module: str) -> None:
    code = f"import runpy, sys; sys.modules['typer'] = None; runpy.run_module({module!r}, "
    done = python("-c", code + "run_name='__main__', alter_sys=True)")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "typer is not installed here: `python3 scripts/dev.py run ..`" in done.stderr


def test_help_keeps_its_brackets() -> None:
    assert "ggraph-runtime[train]" in ggraph("train-eagle3", "--help")[1]


def test_names_of_files_are_no_markup(model: Path, tmp_path: Path) -> None:
    """What rich takes for a tag would vanish from the line."""
    odd = tmp_path / "m[red]x.gguf"
    odd.symlink_to(model)
    done = python("-m", "models", "eagle3", "-m", odd, "-n", "2", "--temp", "0", "a")
    assert "no EAGLE-3 head for m[red]x: drafting with suffix" in done.stderr


@pytest.mark.parametrize("name", ["a:snake:b.gguf", "a[b]c.gguf", "a\\[b.gguf", "1.5e3 'x'"])
def test_an_error_names_a_file_as_it_is_called(name: str) -> None:
    """rich makes pictures of `:snake:`, and does so without its markup, too."""
    assert refused_here("generate", "-m", name, "hi") == f"ggraph: no model at {name}\n"
