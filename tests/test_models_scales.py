"""Matrices whose values have one scale beside them, as NVFP4 needs it, mean what they mean without.

Scales here are powers of two, by which nothing is rounded: a file that has them, whose matrices
are divided by them, is the file without.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from golden_kit import GOLDEN, TOLERANCE, spread_error
from identity_kit import calm_pair
from mtp_kit import EXPERTS, GLM, QWEN, with_draft_layer
from test_models_eagle1 import first_head
from test_sharded import CUT, IDS, World

from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from ggraph.tensor import Array
from models.heads.assistant import AssistantHead
from models.heads.dflash import BlockHead
from models.heads.layouts import Head, open_head
from models.lora import adapted
from models.registry import Model, open_model
from models.run.convert import head_to_gguf, model_to_gguf
from models.run.load import open_session

ALIKE = 2e-5  # of a row's spread: other ops are fused, whose sums run otherwise
NAMES = (  # matrices in one, experts with biases, states, latent vectors, scales of the model's own
    "tiny/llama_tied", "tiny/qwen3_moe", "tiny2/deepseek_v3", "tiny2/gemma4_moe", "tiny2/glm4",
    "tiny2/gpt_oss", "tiny2/granite_hybrid", "tiny2/phi3", "tiny2/qwen3_5_moe", "tiny2/qwen3_next",
)  # fmt: skip
OTHERS = ("norm", "conv1d", "rope", "altup", "per_layer", "ffn_gate_inp.", "output_scale")


def scaled(source: Path, out: Path, seed: int = 0) -> Path:
    """A GGUF file of a model, with a scale for each matrix and each expert's."""
    if source.is_dir():
        model_to_gguf(open_model(source), out, "f32")
    held, rng = open_checkpoint(out if source.is_dir() else source), np.random.default_rng(seed)
    tensors = []
    for t in held.tensors.values():
        if _is_matrix(t):
            values = t.float32()
            count = t.shape[0] if len(t.shape) == 3 else 1
            scale = np.exp2(rng.integers(-4, 5, count)).astype(np.float32)
            values /= scale.reshape(-1, *[1] * (values.ndim - 1))
            tensors.append(RawTensor(t.name, F32, t.shape, values, scale))
            assert np.array_equal(tensors[-1].float32(), t.float32())
        else:
            tensors.append(t)
    write_gguf(out, held.metadata, tensors)
    return out


def _is_matrix(t: RawTensor) -> bool:
    whole = len(t.shape) in (2, 3) and t.name.endswith(".weight")
    return whole and not any(o in t.name for o in OTHERS)


def logits(model: Model, ids: list[int], *, exact: bool = True) -> Array:
    """Of every position."""
    session = open_session(threads=1, exact=exact)
    found: Array = Runner(model, session, 64, cache_dtype=F32).text(ids, every=True).logits.copy()
    session.close()
    return found


def golden_ids(name: str) -> list[int]:
    found: list[int] = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()
    return found[:24]


@pytest.mark.filterwarnings("ignore:.*llama.cpp passes over scales")
@pytest.mark.parametrize("name", NAMES)
def test_products_are_multiplied_by_their_scales(name: str, tmp_path: Path) -> None:
    """And again where the file is written anew, with its scales."""
    model_to_gguf(open_model(GOLDEN / name), tmp_path / "plain.gguf", "f32")
    path, ids = scaled(GOLDEN / name, tmp_path / "scaled.gguf"), golden_ids(name)
    wanted, model = logits(open_model(tmp_path / "plain.gguf"), ids), open_model(path)
    assert sum(n.endswith(".scale") for n in model.catalogue) >= 6
    assert spread_error(logits(model, ids), wanted) < ALIKE
    model_to_gguf(model, tmp_path / "again.gguf", "f32")
    assert spread_error(logits(open_model(tmp_path / "again.gguf"), ids), wanted) < ALIKE


def test_a_scale_that_no_product_knows_is_refused(tmp_path: Path) -> None:
    """And two of a matrix; for it would be another model without."""
    path = scaled(GOLDEN / "tiny/llama_tied", tmp_path / "scaled.gguf")
    held = open_checkpoint(path)
    for name, shape in (("blk.0.attn_norm.scale", 1), ("blk.0.attn_q.weight.scale", 1)):
        more = RawTensor(name, F32, (shape,), np.ones(shape, np.float32))
        write_gguf(tmp_path / "more.gguf", held.metadata, [*held.tensors.values(), more])
        with pytest.raises(ModelError, match=f"no place for tensor '{name}'"):
            logits(open_model(tmp_path / "more.gguf"), [3])


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny2/phi3"])
def test_adapters_are_not_scaled(name: str, tmp_path: Path) -> None:
    adapter = GOLDEN / "lora" / name.partition("/")[2]
    path, ids = scaled(GOLDEN / name, tmp_path / "scaled.gguf"), golden_ids(name)
    found = [
        logits(adapted(open_model(p), [(adapter / "whole", 1.0)]), ids)
        for p in (path, GOLDEN / name)
    ]
    assert spread_error(*found) < ALIKE  # rows of Llama's queries lie otherwise in the folder


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny/qwen3_moe"])
def test_matrices_over_devices_keep_their_scales(name: str, tmp_path: Path) -> None:
    assert name in CUT
    model_to_gguf(open_model(GOLDEN / name), tmp_path / "plain.gguf", "f32")
    path = scaled(GOLDEN / name, tmp_path / "scaled.gguf")
    got, wanted = (
        World(open_model(p), 2).runner.text(list(IDS), every=True).logits
        for p in (path, tmp_path / "plain.gguf")
    )
    assert spread_error(got, wanted) < ALIKE


def drafted(path: Path, head_path: Path) -> tuple[list[int], list[Array]]:
    """A greedy text, and the logits of all steps of a head along it."""
    model, session = open_model(path), open_session(threads=1, exact=True)
    head = open_head(head_path, model)
    target = Runner(model, session, 96, cache_dtype=F32, taps=head.taps)
    said: list[Array] = []
    runner: DraftRunner
    if isinstance(head, BlockHead):
        runner = BlockRunner(head, session, 96, cache_dtype=F32, target=target)
    elif isinstance(head, AssistantHead):
        runner = SharedRunner(head, target)
    else:
        runner = DraftRunner(head, session, 96, cache_dtype=F32, target=target)
    step = runner.step
    runner.step = lambda *a, **k: said.append(step(*a, **k).copy()) or said[-1]  # type: ignore[func-returns-value,method-assign]
    drafter: Drafter = EagleDrafter(runner, name="head", reads_logits=True)
    if isinstance(runner, BlockRunner):
        assert isinstance(head, BlockHead)
        drafter = BlockDrafter(runner, head.mask, head.block)
    sampler = Sampler(SamplerConfig(temp=0.0), model.vocab_size)
    drafts = Speculation([drafter], Fixed(3))
    text = Engine(target, ends=()).generate(
        list(IDS), sampler.sample, sampler.accept, limit=12, drafts=drafts
    )
    found = list(text), said
    session.close()
    return found


HEADS = ("eagle1", "eagle3_for_llama_tied", "dflash", "assistant", QWEN, EXPERTS, GLM)


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_know_of_scales(kind: str, tmp_path: Path) -> None:
    """Of the head's own matrices, of the draft layer's, and of those that the target lends."""
    sources = {
        "eagle1": "tiny/llama_tied", "eagle3_for_llama_tied": "tiny/llama_tied",
        "dflash": "tiny/qwen3_qknorm",
    }  # fmt: skip
    source, head = GOLDEN / sources.get(kind, ""), GOLDEN / "tiny" / kind
    if kind == "assistant":
        source, head = calm_pair(tmp_path / "pair")
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "num_kv_shared_layers": 3}))
    elif kind == "dflash":
        head = GOLDEN / kind
    elif kind == "eagle1":
        (tmp_path / "head").mkdir()
        head = first_head(tmp_path / "head")
    elif kind not in sources:
        source = with_draft_layer(kind, tmp_path / "hf")
    plain = tmp_path / "plain.gguf"
    model_to_gguf(open_model(source), plain, "f32")
    path = scaled(source, tmp_path / "scaled.gguf")
    own = kind not in sources and kind != "assistant"
    (text, got), (same, wanted) = (drafted(p, p if own else head) for p in (path, plain))
    assert text == same and len(got) == len(wanted) > 3
    for a, b in zip(got, wanted, strict=True):  # of what is fed back, too
        assert spread_error(a, b) < TOLERANCE


def test_heads_in_gguf_files_have_scales_of_their_own(tmp_path: Path) -> None:
    source, folder = GOLDEN / "tiny/llama_tied", GOLDEN / "tiny/eagle3_for_llama_tied"
    head = open_head(folder, open_model(source))
    assert isinstance(head, Head)
    head_to_gguf(head, open_model(source), tmp_path / "head.gguf", "f32")
    path = scaled(tmp_path / "head.gguf", tmp_path / "scaled.gguf")
    (text, got), (same, wanted) = (drafted(source, p) for p in (path, tmp_path / "head.gguf"))
    assert text == same
    for a, b in zip(got, wanted, strict=True):
        assert spread_error(a, b) < ALIKE
    again = open_head(path, open_model(source))
    assert isinstance(again, Head)
    head_to_gguf(again, open_model(source), tmp_path / "again.gguf", "f32")
    rewritten = open_checkpoint(tmp_path / "again.gguf").tensors
    for name, t in open_checkpoint(tmp_path / "head.gguf").tensors.items():
        assert np.array_equal(rewritten[name].float32(), t.float32()), name
