"""Every switch of an EAGLE-3 head against a loop in float64, true rows and fed-back rows."""

from pathlib import Path

import numpy as np
import pytest
from head_loop import TINY, Array, ByHand, base, grown, hidden, saved, variant

from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.rows import Rows
from ggraph.dtype import F32
from ggraph.errors import ModelError
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import head_to_gguf
from models.run.load import open_session

TOKENS = [13, 259, 130, 208, 233, 290, 263]
COUNT = len(TOKENS)
LAST = np.array([[COUNT - 1]], np.int32)  # what a row behind all of them follows


def features(width: int = 192) -> Array:
    return np.random.default_rng(8).standard_normal((COUNT, width)).astype(np.float32)


VARIANTS = (
    "plain", "norm_before_residual", "norm_before_fc", "fc_norm and norm_output", "biases",
    "qk_norm", "two layers", "own embedding", "sliding window", "wide heads",
    "own width", "five taps", "own rope", "own yarn", "own yarn, between pairs",
    "latent", "latent, small queries", "latent, two layers, 3.1", "latent with yarn",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_the_loop(name: str, tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    weights, options = variant(name)
    head = open_head(saved(tmp_path / "head", weights, options), target)
    assert isinstance(head, Head)
    table = target.catalogue["token_embd.weight"].float32()
    hand = ByHand(weights, table, options)
    given = features(weights["fc.weight"].shape[1])
    rows = [hand.step(t, hand.fused(f.astype(np.float64)), p)
            for p, (t, f) in enumerate(zip(TOKENS, given, strict=True))]  # fmt: skip
    session = open_session(threads=1, exact=True)
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    logits = runner.step(
        Rows(TOKENS, range(COUNT), range(COUNT)), range(COUNT), given, fed_back=False
    )
    close(hidden(runner, 0, COUNT), np.array([r[0] for r in rows]))
    close(logits, np.array([r[1] for r in rows]))
    runner.past = COUNT
    expected = hand.step(77, rows[-1][0], COUNT)  # a fed-back row behind the true ones
    logits = runner.step(Rows([77], [COUNT], [COUNT]), [0], LAST, fed_back=True)
    close(hidden(runner, 1, 1)[0], expected[0])
    close(logits[0], expected[1])
    session.close()


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_that_were_only_read_leave_what_computed_ones_leave(name: str, tmp_path: Path) -> None:
    """Five rows are read, two are run and one of them wanted: the last row's outputs are those of
    a step that computes all. Layers before the last attend, so that they need what attention does.
    """
    target = open_model(TINY / "llama_tied")
    weights, options = variant(name)
    head = open_head(saved(tmp_path / "head", weights, options), target)
    given, found = features(weights["fc.weight"].shape[1]), []
    for read in (0, 5):
        session = open_session(threads=1, exact=True)
        runner = DraftRunner(head, session, 64, cache_dtype=F32)
        if read:
            runner.read(Rows(TOKENS[:read], range(read), range(read)), given[:read])
            runner.past = read
        slots = range(read, COUNT)
        rows = Rows(TOKENS[read:], slots, slots)
        logits = runner.step(rows, [COUNT - read - 1], given[read:], fed_back=False)
        found.append((logits, hidden(runner, 0, 1)))
        session.close()
    for whole, parts in zip(*found, strict=True):
        close(parts, whole)


def close(got: Array, expected: Array) -> None:
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_variants_that_are_not_built_are_refused(tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    for i, (key, value) in enumerate(
        (("use_input_layernorm_in_first_layer", False), ("mla_use_nope", True))
    ):
        with pytest.raises(ModelError, match="not built here"):
            open_head(saved(tmp_path / f"f{i}", base(), {key: value}), target)


LATENT_DAMAGE = [
    ("midlayer.self_attn.kv_b_proj.weight", None, {}, "without 'blk.0.attn_kv_b.weight'"),
    ("midlayer.self_attn.q_b_proj.weight", None, {}, "no tensor 'blk.0.attn_q_b.weight'"),
    ("midlayer.self_attn.q_b_proj.weight", (80, 23), {}, r"expected \[80, 24\]"),
    ("midlayer.self_attn.kv_a_layernorm.weight", (48,), {}, "latent attention of sizes"),
    ("midlayer.self_attn.g_proj.weight", (8, 8), {}, "unknown tensor"),
    ("midlayer.self_attn.q_proj.weight", (80, 128), {}, "no place for tensor"),
    (None, None, {"v_head_dim": 16}, "v_head_dim = 16, but the tensors give 10"),
    (None, None, {"kv_lora_rank": 512}, "kv_lora_rank = 512, but the tensors give 40"),
]


@pytest.mark.parametrize(
    ("name", "shape", "options", "says"), LATENT_DAMAGE, ids=[d[3] for d in LATENT_DAMAGE]
)
def test_damaged_latent_heads_are_one_clear_line(
    name: str | None,
    shape: tuple[int, ...] | None,
    options: dict[str, int],
    says: str,
    tmp_path: Path,
) -> None:
    weights, _ = variant("latent, small queries")
    if name is not None:
        weights.pop(name, None)
    if name is not None and shape is not None:
        weights[name] = grown(1, *shape)
    with pytest.raises(ModelError, match=says) as caught:
        open_head(saved(tmp_path / "head", weights, options), open_model(TINY / "llama_tied"))
    assert "\n" not in str(caught.value)


def test_gguf_has_no_form_for_latent_heads(tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    head = open_head(saved(tmp_path / "head", *variant("latent")), target)
    assert isinstance(head, Head)
    with pytest.raises(ModelError, match="no form for a head with latent attention"):
        head_to_gguf(head, target, tmp_path / "head.gguf", "f16")


def outputs(head: Head) -> tuple[Array, Array]:
    """Logits and feedback of all true rows, and of a fed-back row behind them."""
    session = open_session(threads=1, exact=True)
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    given = features(len(head.taps) * head.config.target_hidden_size)
    rows = Rows(TOKENS, range(COUNT), range(COUNT))
    first = runner.step(rows, range(COUNT), given, fed_back=False), hidden(runner, 0, COUNT)
    runner.past = COUNT
    logits = runner.step(Rows([77], [COUNT], [COUNT]), [0], LAST, fed_back=True)
    then = logits, hidden(runner, 1, 1)
    session.close()
    return np.concatenate([first[0], then[0]]), np.concatenate([first[1], then[1]])


@pytest.mark.parametrize("name", [n for n in VARIANTS if "latent" not in n and n != "five taps"])
def test_a_variant_survives_gguf(name: str, tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    head = open_head(saved(tmp_path / "head", *variant(name)), target)
    assert isinstance(head, Head)
    head_to_gguf(head, target, tmp_path / "head.gguf", "f32")
    again = open_head(tmp_path / "head.gguf", target)
    assert isinstance(again, Head)
    for got, expected in zip(outputs(again), outputs(head), strict=True):
        close(got, expected)
