"""Fourteen small graphs, ours and the same in PyTorch, for `scripts/bench_graphs.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph import Array, Tensor, input, ops, weight

RNG = np.random.default_rng(0)
Build = Callable[[], tuple[Tensor, dict[str, Array], dict[str, Array]]]


def normal(*shape: int, scale: float = 0.05) -> Array:
    """Random float32 values."""
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A graph: ours with feeds and weights by name, and the same over PyTorch tensors by name."""

    name: str
    build: Build
    torch: Callable[[Any, Mapping[str, Any]], Any]


def leaves(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], dict[str, Array]]:
    """Weights by name, with values."""
    return {n: weight(n, s) for n, s in shapes.items()}, {n: normal(*s) for n, s in shapes.items()}


def mlp() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """Two layers with biases, [in, out] weights, 32 rows."""
    w, held = leaves({"a": (512, 2048), "b": (2048,), "c": (2048, 512), "d": (512,)})
    x = input("x", (32, 512))
    y = ops.relu(x @ w["a"] + w["b"]) @ w["c"] + w["d"]
    return y, {"x": normal(32, 512, scale=1)}, held


def mlp_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    return t.relu(v["x"] @ v["a"] + v["b"]) @ v["c"] + v["d"]


GPT = {"n": (768,), "qkv": (768, 2304), "o": (768, 768), "up": (768, 3072), "down": (3072, 768)}


def gpt2_block(dtype: str) -> Build:
    """A block of GPT-2 124M, 64 rows, weights of a type."""

    def build() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
        rows, heads = 64, 12
        shapes = {n: s[::-1] for n, s in GPT.items()}  # [out, in], as files keep them
        w = {n: weight(n, s, dtype if len(s) > 1 else "f32") for n, s in shapes.items()}
        held = {n: normal(*s) for n, s in shapes.items()}
        x, mask = input("x", (rows, 768)), input("mask", (rows, rows))
        a = ops.norm(x) * w["n"]
        qkv = ops.mul_mat(w["qkv"], a)
        q, k, v = (
            ops.cont(qkv[:, i * 768 : i * 768 + 768]).reshape(rows, heads, 64) for i in range(3)
        )
        mixed = ops.flash_attn(q, k, v, mask, scale=0.125).reshape(rows, 768)
        x = x + ops.mul_mat(w["o"], mixed)
        y = x + ops.mul_mat(w["down"], ops.gelu(ops.mul_mat(w["up"], ops.norm(x) * w["n"])))
        causal = np.where(np.tri(rows), 0, -np.inf).astype(np.float32)
        return y, {"x": normal(rows, 768, scale=1), "mask": causal}, held

    return build


def gpt2_block_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same with float weights."""
    f, x = t.nn.functional, v["x"]
    a = f.layer_norm(x, (768,)) * v["n"]
    q, k, w = (a @ v["qkv"].T).reshape(64, 3, 12, 64).permute(1, 2, 0, 3)
    mixed = f.scaled_dot_product_attention(q, k, w, attn_mask=v["mask"])
    x = x + mixed.permute(1, 0, 2).reshape(64, 768) @ v["o"].T
    up = f.gelu((f.layer_norm(x, (768,)) * v["n"]) @ v["up"].T, approximate="tanh")
    return x + up @ v["down"].T


def residual() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """A block of ResNet-18: 64 channels, 56 x 56."""
    w, held = leaves({"a": (64, 64, 3, 3), "b": (64, 64, 3, 3)})
    x = input("x", (1, 64, 56, 56))
    y = ops.relu(ops.conv_2d(w["a"], x, padding=(1, 1)))
    return ops.relu(ops.conv_2d(w["b"], y, padding=(1, 1)) + x), {"x": normal(1, 64, 56, 56)}, held


def residual_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    f = t.nn.functional
    return t.relu(f.conv2d(t.relu(f.conv2d(v["x"], v["a"], padding=1)), v["b"], padding=1) + v["x"])


def lstm() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """One step of an LSTM, 16 rows of 512."""
    w, held = leaves({"a": (512, 2048), "b": (512, 2048), "c": (2048,)})
    x, h, c = (input(n, (16, 512)) for n in "xhs")
    gates = x @ w["a"] + h @ w["b"] + w["c"]
    i, f, g, o = (gates[:, j * 512 : j * 512 + 512] for j in range(4))
    inside = ops.mul(ops.sigmoid(i), ops.tanh(g))
    y = ops.sigmoid(o) * ops.tanh(ops.sigmoid(f) * c + inside)
    return y, {n: normal(16, 512, scale=1) for n in "xhs"}, held


def lstm_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    i, f, g, o = (v["x"] @ v["a"] + v["h"] @ v["b"] + v["c"]).chunk(4, 1)
    return t.sigmoid(o) * t.tanh(t.sigmoid(f) * v["s"] + t.sigmoid(i) * t.tanh(g))


def norms() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """A layer norm with weight and bias, GELU, and the way round them: 256 rows of 1024."""
    w, held = leaves({"w": (1024,), "b": (1024,)})
    x = input("x", (256, 1024))
    return ops.gelu(ops.norm(x) * w["w"] + w["b"]) + x, {"x": normal(256, 1024, scale=1)}, held


def norms_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    f = t.nn.functional
    return f.gelu(f.layer_norm(v["x"], (1024,), v["w"], v["b"]), approximate="tanh") + v["x"]


def softmax() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """Soft-max over the middle axis of [16, 128, 256]."""
    x = input("x", (16, 128, 256))
    e = ops.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True), {"x": normal(16, 128, 256, scale=3)}, {}


def softmax_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    return t.softmax(v["x"], 1)


def capped() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """Attention with capped scores: 128 rows, 8 heads on 4, heads of 64."""
    q, k, v = input("q", (128, 8, 64)), input("k", (128, 4, 64)), input("v", (128, 4, 64))
    mask = input("mask", (128, 128))
    y = ops.flash_attn(q, k, v, mask, scale=0.125, softcap=50.0)
    causal = np.where(np.tri(128), 0, -np.inf).astype(np.float32)
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    return y, {n: normal(*s, scale=1) for n, s in shapes.items()} | {"mask": causal}, {}


def capped_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    k, w = (v[n].repeat_interleave(2, 1).permute(1, 0, 2) for n in "kv")
    scores = 50 * t.tanh(v["q"].permute(1, 0, 2) @ k.transpose(1, 2) * 0.125 / 50) + v["mask"]
    return (t.softmax(scores, -1) @ w).permute(1, 0, 2)


def delta() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """A step of a gated delta rule: 16 heads of 128 x 128."""
    s, k, v = input("s", (16, 128, 128)), input("k", (16, 128, 1)), input("v", (16, 1, 128))
    q, a, b = input("q", (16, 128, 1)), input("a", (16, 1, 1)), input("b", (16, 1, 1))
    faded = s * a
    new = faded + k * ((v - (faded * k).sum(1, keepdims=True)) * b)
    feeds = {t.name: normal(*t.shape, scale=0.1) for t in (s, k, v, q, a, b)}
    return (new * q).sum(1), feeds, {}


def delta_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    faded = v["s"] * v["a"]
    new = faded + v["k"] * ((v["v"] - (faded * v["k"]).sum(1, keepdim=True)) * v["b"])
    return (new * v["q"]).sum(1)


def mixture() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """8 experts of 512 x 1024, 2 for each of 16 tokens."""
    w, held = leaves({"router": (8, 512), "up": (8, 1024, 512), "down": (8, 512, 1024)})
    x = input("x", (16, 512))
    ids, shares = ops.moe_route(ops.mul_mat(w["router"], x), 2)
    up = ops.silu(ops.mul_mat_id(w["up"], x.reshape(16, 1, 512), ids))
    return ops.moe_mix(ops.mul_mat_id(w["down"], up, ids), shares), {"x": normal(16, 512)}, held


def mixture_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same, by gathered matrices."""
    shares, ids = t.topk(t.softmax(v["x"] @ v["router"].T, -1), 2)
    shares = shares / shares.sum(-1, keepdim=True)
    up = t.nn.functional.silu(t.einsum("tuok,tk->tuo", v["up"][ids], v["x"]))
    return (t.einsum("tuok,tuk->tuo", v["down"][ids], up) * shares[..., None]).sum(1)


def mel() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """Log Mel spectrum of 8000 samples: windows of 400 every 160, a Fourier matrix, 80 bands."""
    w, held = leaves({"cos": (201, 400), "sin": (201, 400), "mel": (80, 201)})
    held["mel"] = np.abs(held["mel"])
    x = input("x", (1, 1, 1, 8000))
    frames = ops.im2col(x, (1, 400), (1, 160)).reshape(-1, 400)
    power = ops.mul_mat(w["cos"], frames) ** 2 + ops.mul_mat(w["sin"], frames) ** 2
    return ops.log(ops.mul_mat(w["mel"], power) + 1e-6), {"x": normal(1, 1, 1, 8000)}, held


def mel_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    frames = v["x"].reshape(-1).unfold(0, 400, 160)
    power = (frames @ v["cos"].T) ** 2 + (frames @ v["sin"].T) ** 2
    return t.log(power @ v["mel"].T + 1e-6)


def unet() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """Group norm, SiLU, convolution, twice, and the way round them: 64 channels, 32 x 32."""
    w, held = leaves({"a": (64, 64, 3, 3), "b": (64, 64, 3, 3)})
    x = input("x", (1, 64, 32, 32))
    y = ops.conv_2d(w["a"], ops.silu(ops.group_norm(x, 8)), padding=(1, 1))
    y = ops.conv_2d(w["b"], ops.silu(ops.group_norm(ops.cont(y), 8)), padding=(1, 1))
    return y + x, {"x": normal(1, 64, 32, 32, scale=1)}, held


def unet_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    f = t.nn.functional
    y = f.conv2d(f.silu(f.group_norm(v["x"], 8)), v["a"], padding=1)
    return f.conv2d(f.silu(f.group_norm(y, 8)), v["b"], padding=1) + v["x"]


def mixer() -> tuple[Tensor, dict[str, Array], dict[str, Array]]:
    """A Mixer block: 196 patches of 512, mixed over patches, then over channels."""
    w, held = leaves({"a": (196, 256), "b": (256, 196), "c": (512, 1024), "d": (1024, 512)})
    x = input("x", (196, 512))
    over = ops.cont(ops.norm(x).T)  # [512, 196]
    x1 = x + ops.cont((ops.gelu(over @ w["a"]) @ w["b"]).T)
    return x1 + ops.gelu(ops.norm(x1) @ w["c"]) @ w["d"], {"x": normal(196, 512, scale=1)}, held


def mixer_torch(t: Any, v: Mapping[str, Any]) -> Any:
    """The same."""
    f, x = t.nn.functional, v["x"]
    x = x + (f.gelu(f.layer_norm(x, (512,)).T @ v["a"], approximate="tanh") @ v["b"]).T
    return x + f.gelu(f.layer_norm(x, (512,)) @ v["c"], approximate="tanh") @ v["d"]


CASES = (
    Case("MLP", mlp, mlp_torch),
    Case("GPT-2 block f32", gpt2_block("f32"), gpt2_block_torch),
    Case("GPT-2 block f16", gpt2_block("f16"), gpt2_block_torch),
    Case("GPT-2 block q8_0", gpt2_block("q8_0"), gpt2_block_torch),
    Case("ResNet-18 block", residual, residual_torch),
    Case("LSTM cell", lstm, lstm_torch),
    Case("layer norm, GELU", norms, norms_torch),
    Case("soft-max over axis 1", softmax, softmax_torch),
    Case("attention, capped", capped, capped_torch),
    Case("delta-net step", delta, delta_torch),
    Case("mixture of experts", mixture, mixture_torch),
    Case("Mel spectrum", mel, mel_torch),
    Case("U-Net block", unet, unet_torch),
    Case("Mixer block", mixer, mixer_torch),
)
