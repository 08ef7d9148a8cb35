"""`ggraph bench`: what is measured, the peer, and one clear line where something is missing."""

import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from mtp_kit import TINY2
from small_model import small_model

from ggraph import InputError
from ggraph.decode.sampler import Sampler, SamplerConfig
from models.bench.cpu import CASES, Case, Ours, file_of, fitting, measure
from models.bench.install import ORIGINS, Built, Origin, built, fetched, home_of, install
from models.bench.peer import MISSING, LogprobPeer, Peer
from models.bench.rounds import OURS, Measured, Round, changed, row, steadiest
from models.bench.serve import Heard, Load, figures
from models.bench.serve import measure as measure_server
from models.cli.common import model_path

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
    found = list(measure(model, 1, 3, 2, (), SMALL))
    assert [case for case, _, _ in found] == list(SMALL)
    for case, measured, versions in found:
        assert versions == {}
        rates = sorted(r.rates[OURS] for r in measured.rounds)
        assert len(rates) == 3
        assert rates[0] > 0
        looks = {"decode": 2, "prompt": 1, "verify": 0}[case.kind]
        assert {len(r.gave) for r in measured.rounds} == {looks}
        line = row(case.name, case.unit, measured)
        assert line["fastest"] is line["ratio"] is line["their_share"] is None
        assert line["peers"] == {}
        assert rates[1] == line["ours"]
        assert (line["of_ceiling"] is None) == (case.kind == "verify")


def test_rounds_in_which_memory_changed_do_not_count() -> None:
    """Of a side that ran while memory gave half as much, nothing is to be learnt."""

    def made(ours: float, theirs: float, *gave: float) -> Round:
        return Round({OURS: ours, "other": theirs}, {OURS: 1.0, "other": 1.0}, None, gave)

    quick, slow = made(100, 50, 80e9, 82e9, 78e9), made(60, 40, 50e9, 50e9, 49e9)
    mixed = [made(100, 30, 80e9, 48e9, 47e9), made(55, 50, 50e9, 79e9, 80e9)]
    assert changed([quick, mixed[0], slow], 3)
    assert not changed([*mixed, quick, quick, slow], 3)
    assert steadiest([mixed[0], quick, mixed[1], slow], 2) == [quick, slow]
    line = row("decode at 64", "tokens/s", Measured([quick, quick, slow], 2, needs=0.4e9))
    assert line["ratio"] == 2.0
    assert line["ceiling"] == 80e9
    assert line["of_ceiling"] == pytest.approx(0.4e9 * 100 / 80e9)
    assert line["steady"] == pytest.approx(78 / 82)
    assert line["left_out"] == 2
    prompts = [made(100, 50), made(110, 40)]
    assert not changed(prompts, 2)
    assert row("prompt of 128", "tokens/s", Measured(prompts))["ceiling"] is None


def test_measuring_leaves_the_cache_where_the_case_put_it(model: Path) -> None:
    ours = Ours(model, 1, tokens=3, context=64)
    for case, past in zip(SMALL, (8 + 3, 8, 9), strict=True):
        ours.rate(case)
        assert ours.m.runner.past == past, case
    made = ours.m.session.plans_made
    again = Case("decode", "decode", 1, 7)  # what the prompt left in the cache is its text
    ours.rate(again)
    with closing(Ours(model, 1, tokens=3, context=64).m) as fresh:
        fresh.runner.text(ours.ids[:7])
        fresh.runner.past = 6
        wanted = fresh.runner.text(ours.ids[6:7]).logits
    ours.m.runner.past = 6
    assert np.array_equal(ours.m.runner.text(ours.ids[6:7]).logits, wanted)
    for case in SMALL:
        ours.rate(case)
    assert ours.m.session.plans_made == made, "a second measurement plans nothing"
    ours.m.close()


def test_the_share_of_the_ceiling_of_a_model_that_cannot_go_back(tmp_path: Path) -> None:
    """Its state is that of all it has read: a share is measured where a case begins again."""
    path = small_model(tmp_path / "small.gguf", source=TINY2 / "lfm2")
    ours = Ours(path, 1, tokens=3, context=64)
    for case in (SMALL[0], Case("decode", "decode", 1, 7)):
        ours.rate(case)
        assert ours.needs(case) > 0
    ours.m.close()


def test_cases_that_the_context_cannot_hold_are_left_out(model: Path) -> None:
    assert "decode at 4096" not in {c.name for c in fitting(model, CASES, 32)}
    assert [c.name for c in fitting(model, CASES, 32)][-1] == "prompt of 2048"
    assert fitting(model, SMALL, 4096) == [SMALL[2]]


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
    assert [r["case"] for r in rows][-1] == "prompt of 2048"
    assert "its context is too short for decode at 4096" in err


def test_a_server_is_measured_beside_texts_without_one(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    status, said, err = ggraph(
        "bench", "serve", "-m", model, "--clients", "1,2", "--prompt", "8", "--shared", "4",
        "--new", "60", "--rounds", "1", "--threads", "1", "--json", out,
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out.read_text())["rows"]
    found = [(r["side"], r["clients"]) for r in rows]
    assert found == [("ggraph", 1), ("generate", 1), ("ggraph", 2)]
    for line in rows:
        assert 0 < line["first_token_p50"] <= line["first_token_p95"]
        seconds = line["clients"] * 2 * line["new_tokens"] / line["tokens_per_second"]
        assert seconds >= line["first_token_p50"], "two answers of each client"
        # A client that had to wait for a processor finds several words at once: none between them
        assert 0 <= line["between_p50"] <= line["between_p95"] < seconds
    assert len(said.splitlines()) == len(rows)


def test_prompts_of_a_load_were_read_by_nobody_before() -> None:
    """A server that keeps what it has read would answer a later number of clients sooner."""
    loads = [Load(clients, prompt=12, shared=4) for clients in (1, 2, 4)]
    asked = [tuple(p) for load in loads for own in load.prompts(500, 0) for p in own]
    assert len({p[4:] for p in asked}) == len(asked) == (1 + 2 + 4) * 3
    assert [
        len({p[:4] for own in load.prompts(500, 0) for p in map(tuple, own)}) for load in loads
    ] == [1, 1, 1]


def test_what_is_told_of_answers_follows_from_when_they_came() -> None:
    """Two clients, two answers each of four tokens; seconds behind 10."""
    texts = [
        (10.0, [10.5, 10.6, 10.8, 11.2]), (10.0, [10.7, 10.8, 10.8, 11.6]),
        (11.2, [11.5, 11.6, 11.7, 11.8]), (11.6, [11.7, 11.9, 13.9, 14.0]),
    ]  # fmt: skip
    found = figures(Load(2, new=4), 10.0, [Heard(asked, times) for asked, times in texts])
    between = [0.1, 0.2, 0.4, 0.1, 0.0, 0.8, 0.1, 0.1, 0.1, 0.2, 2.0, 0.1]
    assert found["tokens_per_second"] == pytest.approx(16 / 4.0)
    assert found["first_token_p50"] == pytest.approx(np.median([0.5, 0.7, 0.3, 0.1]))
    assert found["first_token_p95"] == pytest.approx(np.quantile([0.5, 0.7, 0.3, 0.1], 0.95))
    assert found["between_p50"] == pytest.approx(np.median(between))
    assert found["between_p95"] == pytest.approx(np.quantile(between, 0.95))


def test_a_server_that_keeps_no_connection_is_measured() -> None:
    """As llama-server, whose headers also end as a last chunk does. The fourth has no end."""
    head = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
    )
    said = [{"choices": [{"finish_reason": finish}]} for finish in (None, None, "length")]
    events = b"".join(b"data: %s\n\n" % json.dumps(s).encode() for s in said)
    served = 0

    class Answering(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            nonlocal served
            served += 1
            self.request.recv(1 << 16)
            self.request.sendall(head)
            time.sleep(0.05)
            end = b"\r\n0\r\n\r\n" if served % 4 else b"\r\n"
            self.request.sendall(b"%x\r\n%b%b" % (len(events), events, end))

    with socketserver.TCPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        found = measure_server(url, 500, Load(1, prompt=3, new=2), 0)
        assert served == 3 and found["first_token_p50"] >= 0.05, "one to begin with, and two"
        with pytest.raises(InputError, match="no whole answer"):
            measure_server(url, 500, Load(1, prompt=3, new=2), 0)
        server.shutdown()


def test_a_server_that_is_not_there(model: Path, tmp_path: Path) -> None:
    asked = ("bench", "serve", "-m", model, "--peer", "llama-server")
    status, _, err = ggraph(*asked, GGRAPH_CACHE=str(tmp_path), PATH=str(tmp_path))
    assert status == 2
    assert "ggraph bench install llama.cpp --server" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peer", "other"), "known: llama.cpp, ik_llama.cpp, openvino, none"),
        (("--peer", "ik_llama.cpp"), "ggraph bench install ik_llama.cpp"),
        (("--peer", "none", "--types", "q9"), "--types 'q9'"),
        (("--peer", "none", "--rounds", "0"), "'--rounds'"),
        (("--peer", "none", "--only", "nothing"), "decode at 64"),
    ],
)
def test_what_it_refuses(
    model: Path, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    # an empty cache: nothing is installed there
    asked = ("bench", "cpu", "-m", model, *arguments)
    status, _, err = ggraph(*asked, GGRAPH_CACHE=str(tmp_path))
    assert status == 2
    assert said in err
    assert "Traceback" not in err


def test_an_absent_peer_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = model.parent / "absent"
    broken.mkdir(exist_ok=True)
    (broken / "xllamacpp.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.setenv("GGRAPH_CACHE", str(broken))
    with pytest.raises(InputError) as refused:
        Peer(model, 1)
    assert str(refused.value) == MISSING
    # One that was built says no chances: another is asked.
    monkeypatch.setattr("models.bench.peer.built", lambda name: Built(("no such program",), "1"))
    with pytest.raises(InputError) as refused:
        LogprobPeer(model, 1)
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


@pytest.mark.parametrize("name", list(ORIGINS))
def test_a_peer_built_here_decodes_the_same_file(name: str) -> None:
    """Only where `ggraph bench install` was run. The model: llama.cpp wants a true vocabulary."""
    if built(name) is None:
        pytest.skip(f"{name} is not installed")
    path = model_path(None)
    with closing(Ours(path, 1, 4, 64).m) as m:
        ids = m.tokenizer.encode("The capital of France is", bos=None)
        with closing(Peer(path, 1, 512, name=name)) as peer:
            reply = peer.ask(ids, 4)
            again = peer.ask(ids, 4, keep=True)
        greedy = Sampler(SamplerConfig(temp=0), m.model.vocab_size)
        ours = list(m.engine.generate(ids, greedy.sample, greedy.accept, limit=4))
    assert (reply.prompt_tokens, reply.new_tokens) == (len(ids), 4)
    read = len(ids) if name == "openvino" else 1  # the others use the cache of the request before
    assert again.prompt_tokens == read
    assert reply.raw["ids"] == again.raw["ids"] == ours


def test_sources_are_those_of_the_commit(tmp_path: Path) -> None:
    """From a repository that has gone on since; a second call brings a checkout back to it."""
    theirs, home = tmp_path / "theirs", tmp_path / "home"
    git = ["git", "-C", str(theirs), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", str(theirs)], check=True)
    for text in ("first", "second"):
        (theirs / "llama.h").write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
    first = subprocess.run(
        [*git, "rev-parse", "HEAD~1"], check=True, capture_output=True, text=True
    ).stdout.strip()
    origin = Origin(first, git=theirs.as_uri())
    for _ in range(2):
        assert (fetched(origin, home) / "llama.h").read_text() == "first"
        (home / "llama.h").write_text("changed")
    with pytest.raises(InputError, match="git"):
        fetched(Origin("0" * 40, git=theirs.as_uri()), tmp_path / "other")


def test_what_cannot_be_installed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"known: llama\.cpp, ik_llama\.cpp"):
        install("other", None, None, print)
    (tmp_path / "build").mkdir()
    with pytest.raises(InputError, match="cmake"):
        install("ik_llama.cpp", tmp_path, None, lambda said: None)


def test_peers_with_fewer_units_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    whole = home_of("llama.cpp")
    monkeypatch.setenv("GGRAPH_VECTORS", "avx2")
    assert home_of("llama.cpp") not in (whole, home_of("ik_llama.cpp"))
    with pytest.raises(InputError, match="a wheel"):
        install("openvino", None, None, print)
    monkeypatch.setenv("GGRAPH_VECTORS", "avx512")
    with pytest.raises(InputError, match="or for avx2"):
        install("llama.cpp", None, None, print)
    assert not list(tmp_path.iterdir())


def test_other_types_are_made_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(model.parent / "cache"))
    said: list[str] = []
    assert file_of("f16", model, said.append) == model
    made = file_of("q8_0", model, said.append)
    stamp = made.stat().st_mtime_ns
    assert made.name == "small.Q8_0.gguf"
    assert file_of("q8_0", model, said.append).stat().st_mtime_ns == stamp
    assert len(said) == 1


def test_a_quantised_model_is_made_anew_when_it_or_its_source_has_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "cache"))
    source, said = tmp_path / "small.F16.gguf", list[str]()
    source.write_bytes(model.read_bytes())
    made = file_of("q8_0", source, said.append)
    whole = made.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1] + bytes([whole[-1] ^ 1]), whole[::-1]):
        made.write_bytes(damaged)
        assert file_of("q8_0", source, said.append).read_bytes() == whole
    os.utime(source, ns=(0, 0))
    assert file_of("q8_0", source, said.append).read_bytes() == whole
    assert len(said) == 6
