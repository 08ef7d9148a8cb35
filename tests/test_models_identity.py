"""Byte identity on every tiny target: adversarial drafts, every length, chains and trees.

The text with drafts must be the text without them, greedy and seeded, with penalties and filters.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from identity_kit import CONFIGS, CONTEXT, SEEDED, Scripted, Target, adversaries
from small_model import padded, small_model

from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.lookup import PromptLookup
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import SamplerConfig
from ggraph.dtype import F32
from ggraph.errors import InputError
from models.registry import open_model
from models.run.drafting import DraftOptions, make_drafters, tree_shape
from models.run.generation import Drafting, Generation
from models.run.load import load

TINY = Path(__file__).parent / "golden" / "tiny"
TARGETS = ("llama_tied", "llama3_rope_scaled", "qwen2_bias", "qwen3_qknorm", "qwen3_moe",
           "mistral_sliding")  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS)
def bench(request: pytest.FixtureRequest) -> Iterator[Target]:
    made = Target(TINY / request.param)
    yield made
    made.session.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("length", range(1, 9))
def test_no_draft_changes_a_token(bench: Target, config: str, length: int) -> None:
    plain = bench.plain[config]
    truth, vocabulary = bench.prompt + plain, bench.model.vocab_size
    for name, guess in adversaries(truth, vocabulary, length).items():
        nodes = 4 * length if name == "forked" else length  # trees of up to 32 nodes
        assert bench.text(config, [Scripted(guess)], nodes) == plain, name


@pytest.mark.parametrize("config", CONFIGS)
def test_an_end_inside_a_draft_ends_the_text(bench: Target, config: str) -> None:
    whole = bench.plain[config]
    for at in (0, 1, 5, 20):
        end = whole[at]
        expected = whole[: whole.index(end) + 1]
        truth = bench.prompt + whole
        for name, guess in adversaries(truth, bench.model.vocab_size, 1).items():
            got = bench.text(config, [Scripted(guess)], 7, ends=[end])
            assert got == expected, (name, at)


@pytest.mark.parametrize("config", CONFIGS)
def test_another_model_as_drafter_changes_no_token(bench: Target, config: str) -> None:
    """Two models in one session, with different weights under the same names."""
    plain = bench.plain[config]
    for i, name in enumerate(TARGETS[:4]):
        other = open_model(TINY / name).beside(f"{i}.")
        runner = Runner(other, bench.session, CONTEXT, cache_dtype=F32)
        inner = PromptLookup(least=1) if i % 2 else None
        assert bench.text(config, [ModelDrafter(runner, inner=inner)], 4) == plain, name


def test_the_inner_drafter_changes_no_draft(bench: Target) -> None:
    """Staged: a draft model that drafts with lookup proposes what it proposes without."""

    def drafter(inner: Drafter | None) -> ModelDrafter:
        apart = Runner(bench.model.beside("apart."), bench.session, CONTEXT, cache_dtype=F32)
        made = ModelDrafter(apart, p_min=0.004, inner=inner)
        made.begin(bench.prompt[0])
        return made

    repeating = (bench.prompt[:5] * 9)[:40]
    bare, staged = drafter(None), drafter(PromptLookup(least=1))
    seen = set()
    for i in range(1, 40, 3):
        for made in (bare, staged):
            made.begin(repeating[0])
            made.observe(repeating[1:i], None)
        drafts = [made.propose(6) for made in (bare, staged)]
        assert drafts[0] == drafts[1]
        seen.add(len(drafts[0]))
    assert max(seen) > 0


DRAFTERS = (
    DraftOptions(("suffix",), fixed=True),
    DraftOptions(("lookup", "suffix"), most=5),
    DraftOptions(("eagle3",), most=4, fixed=True),
    DraftOptions(("suffix", "eagle3"), tree=tree_shape("32,4,4"), fixed=True),
    DraftOptions(("eagle3",), tree=tree_shape("9,2,3")),
    DraftOptions(("model",), most=3),
)


def test_stop_strings_and_contexts_end_the_text_alike(model: Path) -> None:
    """Wherever the stop string falls, and when the context ends in the middle of a draft."""
    head = TINY / "eagle3_for_llama_tied"
    m = load(model, head=head, threads=1, ctx_size=64)
    ids = m.prompt_ids("Hi Hi", chat=False)
    whole = "".join(Generation(m, ids, SEEDED, 40).run(None))
    for stops in ([whole[3:5]], [whole[11:13], whole[14:15]], ["never there"], []):
        run = Generation(m, ids, SEEDED, -1, stops)
        plain = "".join(run.run(None)), run.tokens, run.stopped
        assert plain[2] == ("stop string" if stops and stops[0] in whole else "context")
        for options in DRAFTERS:
            made = options if "model" not in options.names else with_model(options, model)
            for rule in ("match", "reject"):
                text = "".join(run.run(Drafting(made, rule)))
                if rule == "match":
                    assert (text, run.tokens, run.stopped) == plain, (options.names, stops)
                assert len(run.tokens) <= 64
    m.close()


OWN_DRAFTER = """
from ggraph.decode.draft.lookup import PromptLookup

class Echo(PromptLookup):
    def __init__(self, runner):
        super().__init__()
        self.name, self.vocabulary = "echo", runner.model.vocab_size
"""


def test_packages_bring_drafters(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their entry point's name, alone or among others; the text stays what it was."""
    (tmp_path / "someones_drafter.py").write_text(OWN_DRAFTER)
    info = tmp_path / "someones_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-drafter\nVersion: 1.0\n")
    points = "[ggraph.drafters]\necho = someones_drafter:Echo\nhollow = builtins:id\n"
    (info / "entry_points.txt").write_text(points)
    with pytest.raises(InputError, match=r"'echo'; known: eagle3, .*model$"):
        DraftOptions(("echo",))
    monkeypatch.syspath_prepend(str(tmp_path))
    m = load(model, threads=1, ctx_size=64)
    (drafter,) = make_drafters(m, DraftOptions(("echo",)))
    assert (drafter.name, drafter.vocabulary) == ("echo", m.model.vocab_size)  # type: ignore[attr-defined]
    run = Generation(m, m.prompt_ids("Hi Hi", chat=False), SamplerConfig(temp=0), 30)
    plain = "".join(run.run(None))
    for names in (("echo",), ("suffix", "echo")):
        assert "".join(run.run(Drafting(DraftOptions(names, fixed=True), "match"))) == plain
    with pytest.raises(InputError, match="'hollow' of an installed package lacks name, taps"):
        make_drafters(m, DraftOptions(("hollow",)))
    m.close()


def test_rejection_repeats_itself_and_draws_its_drafts(model: Path) -> None:
    """Seeded, the text is the same each time; drawn drafts change it, as the law allows."""
    m = load(model, head=TINY / "eagle3_for_llama_tied", threads=1, ctx_size=64)
    ids = m.prompt_ids("Hi Hi", chat=False)
    run = Generation(m, ids, SamplerConfig(temp=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=4), 40)
    drafting = Drafting(DraftOptions(("eagle3",), most=4, fixed=True), "reject")
    texts = ["".join(run.run(drafting)) for _ in range(2)]
    assert texts[0] == texts[1]
    drafters = make_drafters(m, drafting.options, SamplerConfig(temp=2.0, seed=1))
    assert isinstance(drafters[0], EagleDrafter)
    drafters[0].begin(1)
    drafters[0].observe([5, 6], np.array([[0], [1]], np.int32))  # slots
    draft = drafters[0].propose(3)
    assert sorted(draft.laws) == [-1, 0, 1]
    m.close()


def with_model(options: DraftOptions, path: Path) -> DraftOptions:
    return DraftOptions(options.names, options.most, model_draft=path)


def test_a_draft_model_must_have_the_same_tokens(model: Path, tmp_path: Path) -> None:
    m = load(model, threads=1)
    others = small_model(
        tmp_path / "others.gguf",
        {"tokenizer.ggml.tokens": [f"t{i}" for i in range(320)]},
    )
    with pytest.raises(InputError, match="tokens differ from those of small"):
        make_drafters(m, DraftOptions(("model",), model_draft=others))
    for count in (320 - 129, 320 + 129):
        other = padded(tmp_path / "other.gguf", count)
        with pytest.raises(InputError, match=f"has {count} tokens, small has 320: more than 128"):
            make_drafters(m, DraftOptions(("model",), model_draft=other))
    m.close()


@pytest.mark.parametrize("count", [320 - 128, 318, 322, 320 + 128])
def test_a_draft_model_whose_vocabulary_is_padded_otherwise(
    model: Path, count: int, tmp_path: Path
) -> None:
    """Its markers may be called otherwise. What it has beyond the target it would say at once; what
    the target has beyond it stands in the text."""
    other, law = padded(tmp_path / "other.gguf", count), SamplerConfig(temp=0.0)
    m = load(model, threads=1, ctx_size=128)
    ids = [5, 319, 6, 317, 5, 319, 6, 317, 5]
    plain = "".join(Generation(m, ids, law, 40).run(None))
    options = DraftOptions(("model",), most=4, fixed=True, model_draft=other)
    run = Generation(m, ids, law, 40)
    assert "".join(run.run(Drafting(options, "match"))) == plain
    drafter = make_drafters(m, options)[0]
    drafter.begin(ids[0])
    drafter.observe(ids[1:], None)
    said = drafter.propose(8).tokens
    assert len(said) == 8 and max(said) < min(count, 320)
    m.close()
