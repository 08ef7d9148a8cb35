"""Every switch of an EAGLE-3 head against a loop in float64, true rows and fed-back rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ggraph.decode.eagle import DraftRunner
from ggraph.decode.rows import Rows
from ggraph.dtype import F32
from ggraph.errors import ModelError
from models.eagle3 import Head
from models.heads import open_head
from models.load import open_session
from models.registry import open_model

TINY = Path(__file__).parent / "golden" / "tiny"
E, HEADS, KV, EPS = 64, 4, 2, 1e-5
Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
TOKENS = [13, 259, 130, 208, 233, 290, 263]
COUNT = len(TOKENS)


def features(width: int = 192) -> Array:
    return np.random.default_rng(8).standard_normal((COUNT, width)).astype(np.float32)


def base() -> Weights:
    weights = load_file(TINY / "eagle3_for_llama_tied" / "model.safetensors")
    return {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in weights.items()}


def grown(seed: int, *shape: int, around: float = 0.0) -> Array:
    noise = np.random.default_rng(seed).standard_normal(shape) * 0.2
    return (around + noise).astype(np.float32)


def layer(prefix: str, seed: int, width: int) -> Weights:
    """A plain layer's tensors, whose attention reads `width` values."""
    return {
        f"{prefix}.self_attn.q_proj.weight": grown(seed, 64, width),
        f"{prefix}.self_attn.k_proj.weight": grown(seed + 1, 32, width),
        f"{prefix}.self_attn.v_proj.weight": grown(seed + 2, 32, width),
        f"{prefix}.self_attn.o_proj.weight": grown(seed + 3, 64, 64),
        f"{prefix}.mlp.gate_proj.weight": grown(seed + 4, 96, 64),
        f"{prefix}.mlp.up_proj.weight": grown(seed + 5, 96, 64),
        f"{prefix}.mlp.down_proj.weight": grown(seed + 6, 64, 96),
        f"{prefix}.input_layernorm.weight": grown(seed + 7, 64, around=1.0),
        f"{prefix}.post_attention_layernorm.weight": grown(seed + 8, 64, around=1.0),
    }


def norm(x: Array, w: Array) -> Array:
    return x / np.sqrt((x * x).mean() + EPS) * w


def rotated(x: Array, position: int) -> Array:
    half = len(x) // 2
    angle = position * 10000.0 ** (-2 * np.arange(half) / len(x))
    a, b, cos, sin = x[:half], x[half:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


class ByHand:
    """The head in float64, one position after another. `options` are the config's switches."""

    def __init__(self, weights: Weights, table: Array, options: dict[str, Any]) -> None:
        self.w = {k: v.astype(np.float64) for k, v in weights.items()}
        self.table = weights.get("embed_tokens.weight", table).astype(np.float64)
        self.options = options
        self.cache: dict[int, list[tuple[Any, Any]]] = {}

    def fused(self, x: Array) -> Array:
        if "input_norm.weight" in self.w:
            x = norm(x, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            parts = np.split(x, 3)
            x = np.concatenate(
                [norm(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)]
            )
        return self.w["fc.weight"] @ x + self.w.get("fc.bias", 0.0)

    def linear(self, name: str, x: Array) -> Array:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def attention(self, prefix: str, i: int, x: Array, p: int) -> Any:
        q = self.linear(f"{prefix}.self_attn.q_proj", x).reshape(HEADS, -1)
        k = self.linear(f"{prefix}.self_attn.k_proj", x).reshape(KV, -1)
        v = self.linear(f"{prefix}.self_attn.v_proj", x).reshape(KV, -1)
        if f"{prefix}.self_attn.q_norm.weight" in self.w:
            q = np.array([norm(h, self.w[f"{prefix}.self_attn.q_norm.weight"]) for h in q])
            k = np.array([norm(h, self.w[f"{prefix}.self_attn.k_norm.weight"]) for h in k])
        held = self.cache.setdefault(i, [])
        held.append(([rotated(h, p) for h in k], v))
        first = max(0, p + 1 - self.options.get("sliding_window", 10**9))
        mixed = []
        for h in range(HEADS):
            g, query = h // (HEADS // KV), rotated(q[h], p)
            seen = held[first : p + 1]
            scores = np.array([query @ keys[g] for keys, _ in seen]) / np.sqrt(q.shape[1])
            share = np.exp(scores - scores.max())
            mixed.append(
                sum(s * values[g] for s, (_, values) in zip(share / share.sum(), seen, strict=True))
            )
        return self.linear(f"{prefix}.self_attn.o_proj", np.concatenate(mixed))

    def feed_forward(self, prefix: str, x: Array) -> Any:
        n = norm(x, self.w[f"{prefix}.post_attention_layernorm.weight"])
        gate = self.linear(f"{prefix}.mlp.gate_proj", n)
        up = self.linear(f"{prefix}.mlp.up_proj", n)
        return self.linear(f"{prefix}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def step(self, token: int, g: Array, p: int) -> tuple[Any, Any]:
        """Feedback and logits of one row whose fused (or fed-back) feature is g."""
        e = norm(self.table[token], self.w["midlayer.input_layernorm.weight"])
        f = norm(g, self.w["midlayer.hidden_norm.weight"])
        residual = f if self.options.get("norm_before_residual") else g
        h = residual + self.attention("midlayer", 0, np.concatenate([e, f]), p)
        h = h + self.feed_forward("midlayer", h)
        if "layers.1.mlp.up_proj.weight" in self.w:
            n = norm(h, self.w["layers.1.input_layernorm.weight"])
            h = h + self.attention("layers.1", 1, n, p)
            h = h + self.feed_forward("layers.1", h)
        final = norm(h, self.w["norm.weight"])
        return (final if self.options.get("norm_output") else h), self.w["lm_head.weight"] @ final


def variant(name: str) -> tuple[Weights, dict[str, Any]]:
    """Tensors and config keys of one variant."""
    w, options = base(), {}
    if name == "norm_before_residual":
        options["norm_before_residual"] = True
    elif name == "norm_before_fc":
        w["input_norm.weight"] = grown(1, 192, around=1.0)
    elif name == "fc_norm and norm_output":
        options["norm_output"] = True
        w |= {f"fc_norm.{i}.weight": grown(i, 64, around=1.0) for i in range(3)}
    elif name == "biases":
        w |= {"fc.bias": grown(1, 64), "midlayer.self_attn.q_proj.bias": grown(2, 64)}
        w |= {f"midlayer.self_attn.{n}_proj.bias": grown(3, 32) for n in "kv"}
    elif name == "qk_norm":
        w |= {f"midlayer.self_attn.{n}_norm.weight": grown(4, 16, around=1.0) for n in "qk"}
    elif name == "two layers":
        w |= layer("layers.1", 20, 64)
    elif name == "own embedding":
        w["embed_tokens.weight"] = grown(9, 320, 64)
    elif name == "sliding window":
        options["sliding_window"] = 3
    elif name == "wide heads":
        w["midlayer.self_attn.q_proj.weight"] = grown(1, 128, 128)
        w["midlayer.self_attn.k_proj.weight"] = grown(2, 64, 128)
        w["midlayer.self_attn.v_proj.weight"] = grown(3, 64, 128)
        w["midlayer.self_attn.o_proj.weight"] = grown(4, 64, 128)
    return w, options


def saved(folder: Path, weights: Weights, options: dict[str, Any]) -> Path:
    folder.mkdir()
    config = json.loads((TINY / "eagle3_for_llama_tied" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **options}))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors"
    )
    return folder


VARIANTS = (
    "plain", "norm_before_residual", "norm_before_fc", "fc_norm and norm_output", "biases",
    "qk_norm", "two layers", "own embedding", "sliding window", "wide heads",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_the_loop(name: str, tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    weights, options = variant(name)
    head = open_head(saved(tmp_path / "head", weights, options), target)
    assert isinstance(head, Head)
    table = target.catalogue["token_embd.weight"].float32()
    hand = ByHand(weights, table, options)
    rows = [hand.step(t, hand.fused(f.astype(np.float64)), p)
            for p, (t, f) in enumerate(zip(TOKENS, features(), strict=True))]  # fmt: skip
    session = open_session(threads=1, exact=True)
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    logits, hidden = runner.step(
        Rows(TOKENS, range(COUNT), range(COUNT)), range(COUNT), features(), fed_back=False
    )
    close(hidden, np.array([r[0] for r in rows]))
    close(logits, np.array([r[1] for r in rows]))
    runner.past = COUNT
    expected = hand.step(77, rows[-1][0], COUNT)  # a fed-back row behind the true ones
    logits, hidden = runner.step(Rows([77], [COUNT], [COUNT]), [0], hidden[-1:], fed_back=True)
    close(hidden[0], expected[0])
    close(logits[0], expected[1])
    session.close()


def close(got: Array, expected: Array) -> None:
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_variants_that_are_not_built_are_refused(tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    for i, (key, value) in enumerate(
        (("use_input_layernorm_in_first_layer", False), ("parallel_drafting", True))
    ):
        with pytest.raises(ModelError, match="not built here"):
            open_head(saved(tmp_path / f"f{i}", base(), {key: value}), target)
    weights = base()
    weights["midlayer.self_attn.kv_a_proj_with_mqa.weight"] = grown(1, 8, 8)  # latent attention
    with pytest.raises(ModelError, match="unknown tensor"):
        open_head(saved(tmp_path / "mla", weights, {}), target)
