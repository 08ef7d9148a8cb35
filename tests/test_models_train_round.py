"""Rounding while a head learns: what a file holds, and gradients for the exact matrices."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from small_model import learnable_model

from ggraph import InputError
from models.run.load import load
from models.train.data import AnswerOptions, make_answers

torch = pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
rounding = importlib.import_module("models.train.round")
loop = importlib.import_module("models.train.loop")
nets = importlib.import_module("models.train.net")

SMALL = nets.NetConfig(
    width=64, taps=3, heads=2, kv_heads=1, head_dim=32, intermediate=128,
    vocabulary=96, rope_base=1e4, eps=1e-5,
)  # fmt: skip


@pytest.mark.parametrize("kind", list(rounding.KINDS))
def test_rounding_is_what_a_file_gives_back(kind: str) -> None:
    x = np.random.default_rng(3).standard_normal((48, 96)).astype(np.float32)
    x[5, :32] = 0
    x[6, 32:64] = 0.25
    stored = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    read = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(rounding.rounded(torch.from_numpy(x), kind).numpy(), read)


def test_gradients_are_those_of_the_rounded_matrices_and_move_the_exact_ones() -> None:
    torch.manual_seed(1)
    net = nets.DraftNet(SMALL)
    matrix = net.lm_head.weight
    exact, x = matrix.detach().clone(), torch.randn(7, SMALL.width)
    coarse = rounding.Rounding(net, "q4_1")
    coarse.apply()
    coarse.apply()
    assert torch.equal(matrix, rounding.rounded(exact, "q4_1"))
    (matrix @ x.T).square().sum().backward()
    coarse.restore()
    assert torch.equal(matrix, exact)
    again = rounding.rounded(exact, "q4_1").requires_grad_()
    (again @ x.T).square().sum().backward()
    assert torch.equal(matrix.grad, again.grad)
    with pytest.raises(InputError, match="no rounding to 'f16'; known: q4_0"):
        rounding.Rounding(net, "f16")
    with pytest.raises(InputError, match="no rounding to 'q4_k'"):
        loop.TrainOptions(rounding="q4_k")


def test_a_head_that_learns_rounded_is_tested_rounded_and_kept_exact(tmp_path: Path) -> None:
    m = load(learnable_model(tmp_path), ctx_size=128)
    options = AnswerOptions(new_tokens=16, text_tokens=128, lanes=8, own_share=0.0, seed=5)
    prompts = [f"What is {i} and {i * i % 17}?" for i in range(160)]
    make_answers(m, prompts, (0, 1, 2), tmp_path / "data", options)
    target = loop.Target.of(m.model)
    o = loop.TrainOptions(draft_vocab=64, epochs=2, batch_tokens=256, save_seconds=0, seed=1)
    losses = {}
    for kind in (None, "q4_0"):
        out = tmp_path / str(kind)
        net, _ = loop.train(target, tmp_path / "data", out, replace(o, rounding=kind))
        log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
        assert log[-1]["loss"] < log[0]["loss"]
        assert log[-1]["accepted_length"] > 3
        losses[kind] = log[-1]["loss"]
        matrix = net.lm_head.weight.detach()
        assert not torch.equal(matrix, rounding.rounded(matrix, "q4_0"))
    assert losses["q4_0"] != losses[None]
    m.close()
