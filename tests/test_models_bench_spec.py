"""`ggraph bench spec`: prompts, settings, figures, and the check that texts are equal."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ggraph import InputError
from ggraph.decode.sampler import SamplerConfig
from ggraph.decode.statistics import Statistics
from models.bench.spec import (
    Answer,
    Measured,
    Prompt,
    _close,
    facts,
    measure,
    parse_setting,
    read_prompts,
    summary,
    tables,
)
from models.run.generation import Generation
from models.run.load import load

ROOT = Path(__file__).parent.parent
EVAL = ROOT / "bench" / "data" / "eval"


def test_prompts_come_from_every_group_alike() -> None:
    found = read_prompts(EVAL / "spec_bench.jsonl", 60)
    counts = {g: sum(p.group == g for p in found) for g in {p.group for p in found}}
    assert counts == dict.fromkeys(
        ["multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"], 10
    )
    assert len({p.name for p in found}) == 60
    assert len(read_prompts(EVAL / "mt_bench.jsonl", 1000)) == 80


def test_a_prompt_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    said = "a\x85b\u2028c"
    row = json.dumps({"category": "qa", "turns": [said]}, ensure_ascii=False)
    (tmp_path / "own.jsonl").write_text(f"{row}\n", "utf-8")
    assert [p.text for p in read_prompts(tmp_path / "own.jsonl", 3)] == [said]


@pytest.mark.parametrize("text", ["", "not json\n", '{"category": "x"}\n', '{"turns": ["a"]}\n'])
def test_bad_prompt_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(tmp_path / "bad.jsonl", 3)


def test_settings_are_read() -> None:
    adaptive = parse_setting("suffix", False).drafting.options
    assert (adaptive.fixed, adaptive.most, adaptive.tree) == (False, 8, None)
    chain = parse_setting("suffix+lookup:5", False).drafting.options
    assert (chain.names, chain.fixed, chain.most) == (("suffix", "lookup"), True, 5)
    tree = parse_setting("eagle3:16/4/3", True).drafting.options
    assert tree.tree is not None
    assert (tree.most, tree.tree.depth, tree.tree.top_k) == (15, 4, 3)


@pytest.mark.parametrize("text", ["eagle3", "other", "suffix:x", "suffix:1/2", "suffix:99"])
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_setting(text, False)


def answer(tokens: list[int], ratios: list[float], kept: int) -> Answer:
    did = Statistics(rounds=10, drafted=40, accepted=kept)
    found = Measured(ratios, [50.0] * len(ratios), [1.0], True, did)
    return Answer(Prompt("1", "qa", "qa", "?"), tokens, [40.0], {"s": found})


def test_figures_of_a_summary() -> None:
    some = [answer([1], [0.9, 1.2, 0.96], 10), answer([1], [1.5], 30)]
    found = summary(some, "s")
    assert found["mean_speedup"] == pytest.approx((0.96 + 1.5) / 2)
    assert found["least_speedup"] == 0.96
    assert found["below_floor"] == 1
    assert found["acceptance_length"] == (40 + 20) / 20, "the bonus token counts"
    assert found["acceptance_rate"] == 40 / 80


def test_what_drafters_took_to_read_the_prompt_counts_in_a_figure_of_its_own() -> None:
    some = answer([1], [1.2, 1.3, 1.4], 10)
    assert summary([some], "s")["mean_speedup_with_reading"] == 1.3, "nothing was read"
    some.settings["s"].whole_ratios = [1.1, 1.2, 1.15]
    found = summary([some], "s")
    assert (found["mean_speedup"], found["mean_speedup_with_reading"]) == (1.3, 1.15)
    assert facts(some)["settings"]["s"]["speedup_with_reading"] == 1.15


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        (list(range(100)), False),
        ([1, 2, 3] * 40, True),
        ([*range(64), *range(32)], True),
        ([7] * 32, False),
        ([7] * 33, True),
        ([5, *range(32)], False),
    ],
)
def test_an_answer_that_ends_as_it_went_before_is_a_loop(tokens: list[int], loops: bool) -> None:
    assert answer(tokens, [1.0], 0).loops is loops


def test_answers_that_loop_are_left_out_of_one_part() -> None:
    parts = tables(
        [answer(list(range(60)), [1.0], 0), answer([3] * 60, [3.0], 20)],
        [parse_setting("suffix", False).__class__("s", parse_setting("suffix", False).drafting)],
    )["s"]
    assert parts["all"]["mean_speedup"] == 2.0
    assert parts["without loops"]["mean_speedup"] == 1.0
    assert parts["without loops"]["prompts"] == 1


def test_texts_are_equal_and_every_round_counts(model: Path) -> None:
    m = load(model, threads=1, ctx_size=256)
    prompts = [Prompt(str(i), "g", "c", t) for i, t in enumerate(["abcabcabc", "hello"])]
    ways = [parse_setting(s, False) for s in ("suffix", "suffix:3", "lookup:2")]
    found = list(measure(m, prompts, ways, 24, 2))
    m.close()
    for a in found:
        assert len(a.plain) == 3
        assert len(a.noise) == 1
        assert 1 <= len(a.tokens) <= 24
        for f in a.settings.values():
            assert f.identical
            assert len(f.ratios) == len(f.rates) == 2
            assert f.did is not None
            assert f.did.accepted + f.did.rounds >= len(a.tokens) - 1
            assert sum(f.did.by_rows.values()) == f.did.rounds
            assert sum((n - 1) * count for n, count in f.did.by_rows.items()) == f.did.drafted
    assert not m.engine.remembers


@pytest.mark.parametrize(
    ("ratios", "close"),
    [
        ([1.02, 0.9, 1.2], True),  # few rounds, below CLOSE
        ([1.05, 0.9, 1.2], False),
        ([0.975, 0.985, 0.995] * 4, True),  # 0.015 above, standard error 0.005
        ([0.975, 0.985, 0.995] * 12, False),
        ([0.94, 0.95, 0.96] * 12, False),  # as clearly below
        ([0.97] * 3 + [0.975] * 9, False),
        ([0.9, 1.03, 1.2] * 12, True),
    ],
)
def test_rounds_go_on_until_the_side_of_the_floor_is_clear(
    ratios: list[float], close: bool
) -> None:
    prompt = Prompt("1", "g", "c", "t")
    for text, needs in ("suffix", close), ("suffix:3", False):
        answer = Answer(prompt, [], [], {text: Measured(ratios)})
        assert _close(answer, [parse_setting(text, False)]) is needs


def test_the_error_of_a_median_is_that_of_normal_noise() -> None:
    rng = np.random.default_rng(0)
    medians, errors = [], []
    for _ in range(400):
        found = Measured(list(rng.normal(1.0, 0.03, 41)))
        medians.append(found.ratio)
        errors.append(found.error)
    assert float(np.mean(errors)) == pytest.approx(float(np.std(medians)), rel=0.15)
    assert Measured([0.9]).error == 0.0


@pytest.mark.parametrize(("close", "further"), [(1e9, 2), (0.0, 0)])
def test_free_lengths_near_the_floor_get_further_rounds(
    model: Path, monkeypatch: pytest.MonkeyPatch, close: float, further: int
) -> None:
    monkeypatch.setattr("models.bench.spec.CLOSE", close)
    m = load(model, threads=1, ctx_size=256)
    prompts = [Prompt("1", "g", "c", "abcabcabc")]
    for text, rounds in ("suffix", 1 + further), ("suffix:3", 1):
        ways = [parse_setting(text, False)]
        (found,) = measure(m, prompts, ways, 16, 1, close_rounds=2)
        assert len(found.settings[text].ratios) == rounds
        assert found.settings[text].identical
    m.close()


def test_a_prompt_is_read_once_and_the_text_stays_what_it_was(model: Path) -> None:
    m = load(model, threads=1, ctx_size=256)
    ids, other = m.prompt_ids("abcabcabc"), m.prompt_ids("hello")
    ways = [None, parse_setting("suffix:3", False).drafting]

    def texts() -> list[list[int]]:
        found = []
        for asked in (ids, ids, other, ids):
            run = Generation(m, asked, SamplerConfig(temp=0.0, seed=0), 20)
            for way in ways:
                "".join(run.run(way))
                found.append(run.tokens)
        return found

    plainly = texts()
    m.engine.remembers = True
    assert texts() == plainly
    m.engine.remembers = False
    m.close()


def test_plain_decoding_is_held_against_itself() -> None:
    steady = Answer(Prompt("1", "qa", "qa", "?"), [1], [50.0] * 4, {})
    assert steady.noise == [1.0, 1.0]
    uneven = Answer(Prompt("1", "qa", "qa", "?"), [1], [50.0, 25.0, 50.0, 50.0], {})
    assert uneven.noise == pytest.approx([0.5, 1.5])
    found = summary([answer([1], [1.0], 0)], "s")
    assert found["plain_against_itself_mean"] is None


def test_the_command_prints_tables_and_writes_json(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "spec.json"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text((json.dumps({"category": "qa", "turns": ["ab ab ab"]}) + "\n") * 2)
    command = [sys.executable, "-m", "models", "bench", "spec", "-m", str(model), "--rounds", "1",
               "-n", "16", "-t", "1", "--minutes", "0", "--prompts", str(prompts),
               "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    facts = json.loads(out.read_text())
    assert set(facts["tables"]) == {"suffix", "suffix:4"}
    assert facts["answers"][0]["settings"]["suffix:4"]["identical"] is True
    assert facts["asked"] == 2
    assert len(facts["answers"]) == 1, "no further prompt after no time"


def test_figures_are_made_of_results_and_made_again_in_place(model: Path, tmp_path: Path) -> None:
    m = load(model, threads=1, ctx_size=256)
    prompts = [Prompt(str(i), g, "c", "ab ab ab") for i, g in enumerate(["qa", "rag"])]
    ways = [parse_setting(s, False) for s in ("suffix", "suffix:3")]
    found = list(measure(m, prompts, ways, 16, 2))
    m.close()
    result = {
        "prompts": "spec_bench", "asked": 2, "new_tokens": 16, "threads": 1, "rounds": 2,
        "head": None, "processor": "one", "date": "2026-01-02 03:04", "tables": tables(found, ways),
        "answers": [facts(a) for a in found],
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(result))
    page, picture = tmp_path / "page.md", tmp_path / "pictures" / "speed.svg"
    page.write_text("# Page\n")
    command = [sys.executable, "scripts/draft_figures.py", str(tmp_path / "r.json"),
               "--page", str(page), "--picture", str(picture)]  # fmt: skip
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("# Page\n") and text.count("| qa | 1 |") == 2, text
    assert text.count("| all | 2 |") == 2
    shown = ElementTree.fromstring(picture.read_text())
    assert len([e for e in shown.iter() if e.tag.endswith("rect")]) >= 2 * 3
