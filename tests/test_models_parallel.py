"""P-EAGLE heads: one step for the whole draft, against a float64 loop; byte identity; refusals."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from head_loop import TINY, Array, ByHand, Weights, base, grown, layer, saved
from small_model import small_model
from test_models_eagle3 import CONTEXT, IDS, plain, speculative

from ggraph.decode.draft.eagle import TreeShape
from ggraph.decode.draft.head import Masked
from ggraph.decode.draft.parallel import ParallelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.sampler import SamplerConfig
from ggraph.dtype import F32
from ggraph.errors import InputError, ModelError
from ggraph.session import Session
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.convert import head_to_gguf
from models.run.drafting import DraftOptions, make_drafters
from models.run.load import load, open_session

MASK = 310
TOKENS = [13, 259, 130, 208, MASK, 290, 263]
FEATURES = np.random.default_rng(8).standard_normal((len(TOKENS), 192)).astype(np.float32)


@pytest.fixture(scope="module")
def target() -> Model:
    return open_model(TINY / "llama_tied")


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session(threads=1, exact=True)


def parts() -> tuple[Weights, dict[str, Any]]:
    """A head of two layers as the checkpoints in the wild store it: mask_hidden is [1, 1, 3G]."""
    w = base() | layer("layers.1", 20, 64) | {"mask_hidden": grown(5, 1, 1, 192)}
    w["layers.1.hidden_norm.weight"] = grown(6, 64)  # stored for each layer, read by the first only
    return w, {"ptd_token_id": MASK}


@pytest.fixture(scope="module")
def head(target: Model, tmp_path_factory: pytest.TempPathFactory) -> Head:
    found = open_head(saved(tmp_path_factory.mktemp("peagle") / "head", *parts()), target)
    assert isinstance(found, Head)
    return found


def masked_of(head: Head) -> Masked:
    assert head.masked is not None
    return head.masked


def drafter(session: Session, head: Head, **options: Any) -> ParallelDrafter:
    runner = DraftRunner(head, session, CONTEXT, cache_dtype=F32)
    return ParallelDrafter(runner, masked_of(head), **options)


def by_hand(target: Model, masked: int) -> tuple[Array, Array]:
    """Logits of the last true row and of the masked rows behind it, one position at a time."""
    weights, options = parts()
    table = target.catalogue["token_embd.weight"].float32()
    hand = ByHand({k: v for k, v in weights.items() if k != "mask_hidden"}, table, options)
    nothing = weights["mask_hidden"].reshape(-1)
    text = [*zip(TOKENS, FEATURES, strict=True), *[(MASK, nothing)] * masked]
    rows = [hand.step(t, hand.fused(f.astype(np.float64)), p) for p, (t, f) in enumerate(text)]
    logits = np.array([r[1] for r in rows[len(TOKENS) - 1 :]])
    return logits, np.array([r[0] for r in rows])


def test_all_guesses_of_one_step_equal_the_loop(
    session: Session, target: Model, head: Head
) -> None:
    expected, _ = by_hand(target, 5)
    made = drafter(session, head)
    made.begin(1)
    made.observe(TOKENS, FEATURES)
    got = made._run(len(TOKENS), 5)
    assert got.shape == (6, 128)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    again = drafter(session, head)
    again.begin(1)
    again.observe(TOKENS, FEATURES)
    assert list(again.propose(6).tokens) == head.target_ids[expected.argmax(axis=1)].tolist()
    assert again.propose(3).tokens == again.propose(6).tokens[:3]  # proposing changes nothing


def test_after_a_rejection_the_head_drafts_like_a_fresh_one(session: Session, head: Head) -> None:
    random = np.random.default_rng(3)
    tokens, features = random.integers(0, 320, 40).tolist(), random.standard_normal((40, 192))
    features = features.astype(np.float32)
    used = drafter(session, head)
    used.begin(1)
    for start, stop in ((0, 20), (20, 21), (21, 25), (25, 40)):
        used.observe(tokens[start:stop], features[start:stop])
        used.propose(6)
    fresh = drafter(session, head)
    fresh.begin(1)
    fresh.observe(tokens, features)
    assert used.propose(6) == fresh.propose(6)


def test_a_text_longer_than_a_step_is_run_in_parts(head: Head) -> None:
    session = open_session(threads=1, exact=True)
    random = np.random.default_rng(3)
    tokens = random.integers(0, 320, 1030).tolist()
    features = random.standard_normal((1030, 192)).astype(np.float32)
    drafts = []
    for cuts in ((0, 1030), (0, 500, 1030), (0, 511, 512, 1029, 1030)):
        made = ParallelDrafter(DraftRunner(head, session, 1100, cache_dtype=F32), masked_of(head))
        made.begin(1)
        for start, stop in pairwise(cuts):
            made.observe(tokens[start:stop], features[start:stop])
            drafts.append(made.propose(4))
    assert drafts[0] == drafts[2] == drafts[-1]
    session.close()


ADVERSARIAL = {
    "text": IDS[:12],
    "one token": IDS[:1],
    "the masked token": [MASK] * 9,
    "one token over and over": [7] * 20,
    "two in turn": [5, 6] * 10,
    "outside the draft vocabulary": [319, 318, 317, 316],
}


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_text_is_the_same(
    session: Session, target: Model, head: Head, name: str, length: int
) -> None:
    prompt = ADVERSARIAL[name]
    made = drafter(session, head)
    assert speculative(session, target, prompt, 30, made, length) == plain(
        session, target, prompt, 30
    )


def test_unlikely_guesses_end_the_draft(session: Session, head: Head) -> None:
    made = drafter(session, head, p_min=1.0)
    made.begin(1)
    made.observe(TOKENS, FEATURES)
    assert not made.propose(5)
    drawing = drafter(session, head, law=SamplerConfig(seed=1, temp=2.0))
    drawing.begin(1)
    drawing.observe(TOKENS, FEATURES)
    draft = drawing.propose(4)
    assert sorted(draft.laws) == [-1, 0, 1, 2]
    assert all(abs(law.sum() - 1) < 1e-12 for law in draft.laws.values())
    assert all(draft.laws[i - 1][t] > 0 for i, t in enumerate(draft.tokens))


DAMAGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mask_hidden": None}, {"parallel_drafting": True}, "has no 'mask_hidden'"),
    ({"mask_hidden": None}, {"speculators_model_type": "peagle"}, "has no 'mask_hidden'"),
    ({"mask_hidden": np.zeros((1, 64), np.float32)}, {}, "holds 64 values, fc reads 192"),
    ({"mask_hidden": np.full((1, 192), np.nan, np.float32)}, {}, "not finite"),
    ({}, {"ptd_token_id": None}, "for rows that are masked; expected one"),
    ({}, {"pard_token": 3}, "for rows that are masked; expected one"),
    ({}, {"ptd_token_id": 320}, "masked token 320 of 320"),
    ({}, {"ptd_token_id": "310"}, "masked token '310' of 320"),
    ({}, {"ptd_token_id": [310]}, r"masked token \[310\] of 320"),
]


@pytest.mark.parametrize(("weights", "options", "says"), DAMAGE, ids=[str(i) for i in range(9)])
def test_what_cannot_be_known_is_refused(
    weights: Weights, options: dict[str, Any], says: str, target: Model, tmp_path: Path
) -> None:
    good, said = parts()
    made = {k: v for k, v in {**good, **weights}.items() if v is not None}
    with pytest.raises(ModelError, match=says) as caught:
        open_head(saved(tmp_path / "head", made, {**said, **options}), target)
    assert "\n" not in str(caught.value)


def test_other_names_of_the_masked_token(target: Model, tmp_path: Path) -> None:
    weights, _ = parts()
    for i, said in enumerate(
        ({"pard_token": MASK}, {"mask_token_id": MASK}, {"dflash_config": {"mask_token_id": MASK}})
    ):
        found = open_head(saved(tmp_path / str(i), weights, said), target)
        assert isinstance(found, Head)
        assert masked_of(found).token == MASK
        assert np.array_equal(masked_of(found).features, weights["mask_hidden"].reshape(-1))


def test_the_runner_picks_the_drafter_and_refuses_a_tree(tmp_path: Path) -> None:
    from_disk = saved(tmp_path / "head", *parts())
    m = load(small_model(tmp_path / "small.gguf"), head=from_disk, threads=1)
    assert isinstance(make_drafters(m, DraftOptions(("eagle3",)))[0], ParallelDrafter)
    with pytest.raises(InputError, match="makes no tree"):
        make_drafters(m, DraftOptions(("eagle3",), tree=TreeShape(8, 2, 2)))
    assert isinstance(m.head, Head)
    with pytest.raises(ModelError, match="no form for a head with masked rows"):
        head_to_gguf(m.head, m.model, tmp_path / "head.gguf", "f16")
    m.close()
