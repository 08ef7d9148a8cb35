"""`ggraph bench`: what is measured, the peer, and one clear line where something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import small_model

from ggraph import InputError
from models.bench.cpu import Case, Ours, file_of, measure, row
from models.bench.peer import MISSING, Peer

ROOT = Path(__file__).parent.parent
SMALL = (
    Case("decode", "decode", 1, 8),
    Case("rows", "verify", 5, 8),
    Case("prompt", "prompt", 9, 0),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return small_model(folder / "small.F16.gguf", {"llama.context_length": 4096})


def ggraph(*arguments: str | Path, **extra: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "models", *map(str, arguments)]
    environment = {**os.environ, **extra}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_every_case_is_measured_in_every_round(model: Path) -> None:
    found = measure(model, 1, 3, 2, None, SMALL)
    for case, samples in found.items():
        assert len(samples.ours) == 3
        assert min(samples.ours) > 0
        line = row(case, samples)
        assert line["llama_cpp"] is line["ratio"] is line["their_share"] is None
        assert sorted(samples.ours)[1] == line["ours"]


def test_measuring_leaves_the_cache_where_the_case_put_it(model: Path) -> None:
    ours = Ours(model, 1, tokens=3)
    for case, past in zip(SMALL, (8 + 3, 8, 9), strict=True):
        ours.rate(case)
        assert ours.m.runner.past == past, case
    made = ours.m.session.plans_made
    for case in SMALL:
        ours.rate(case)
    assert ours.m.session.plans_made == made, "a second measurement plans nothing"
    ours.m.close()


def test_the_command_prints_a_table_and_writes_json(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    status, said, err = ggraph(
        "bench", "cpu", "-m", model, "--peer", "none", "--rounds", "1", "--tokens", "2",
        "--threads", "1", "--json", out,
    )  # fmt: skip
    assert status == 0, err
    assert "decode at 1024" in said
    facts = json.loads(out.read_text())
    assert facts["threads"] == 1
    assert {"processor", "date", "numpy", "ggraph"} <= set(facts)
    rows = facts["tables"][model.name]
    assert [r["case"] for r in rows][-1] == "prompt of 512"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peer", "other"), "known: llama.cpp, none"),
        (("--peer", "none", "--types", "q9"), "--types 'q9'"),
        (("--peer", "none", "--rounds", "0"), "--rounds 0"),
        (("--peer", "none", "--only", "nothing"), "decode at 64"),
    ],
)
def test_what_it_refuses(model: Path, arguments: tuple[str, ...], said: str) -> None:
    status, _, err = ggraph("bench", "cpu", "-m", model, *arguments)
    assert status == 2
    assert said in err
    assert "Traceback" not in err


def test_an_absent_peer_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = model.parent / "absent"
    broken.mkdir(exist_ok=True)
    (broken / "xllamacpp.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with pytest.raises(InputError) as refused:
        Peer(model, 1)
    assert str(refused.value) == MISSING


def test_the_peer_decodes_the_same_file(model: Path) -> None:
    pytest.importorskip("xllamacpp")
    peer = Peer(model, 1, 512)
    reply = peer.ask([65, 66, 67, 68], 6)
    assert (reply.prompt_tokens, reply.new_tokens) == (4, 6)
    assert reply.decode_per_second == 5 / reply.decode_seconds
    again = peer.ask([65, 66, 67, 68], 6, keep=True)
    assert again.text == reply.text
    assert again.prompt_tokens == 1, "the cache of the request before was used"
    peer.close()


def test_a_file_that_llama_cpp_refuses(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(InputError, match=r"llama\.cpp"):
        Peer(tmp_path / "bad.gguf", 1)


def test_other_types_are_made_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(model.parent / "cache"))
    said: list[str] = []
    assert file_of("f16", model, said.append) == model
    made = file_of("q8_0", model, said.append)
    stamp = made.stat().st_mtime_ns
    assert made.name == "small.Q8_0.gguf"
    assert file_of("q8_0", model, said.append).stat().st_mtime_ns == stamp
    assert len(said) == 1
