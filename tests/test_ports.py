"""Four models ported from outside, with the public face alone: every op compiled, planned for two
simulated accelerators as well, and held against NumPy written from the papers.

GPT-2 (Radford et al. 2019), Gemma 3 (arXiv 2503.19786), a gated delta net (arXiv 2412.06464) and a
residual network (arXiv 1512.03385), all tiny and with random weights.
"""

import numpy as np

from ggraph import Array, Graph, Options, Session, Tensor, input, open_backend, ops, scope, weight
from ggraph.testing import check_plan

T, E, H, V = 7, 32, 4, 50
D = E // H
RNG = np.random.default_rng(1)


class Net:
    """Weights by name, made when first asked for, in both worlds."""

    def __init__(self) -> None:
        self.held: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        t = weight(name, shape)
        self.held[t.name] = (RNG.standard_normal(shape) * 0.3).astype(np.float32)
        return t


def computed(y: Tensor, net: Net, **feeds: Array) -> Array:
    """The output on the CPU, strict, after the plan for two accelerators was run in two orders."""
    graph = Graph.of({"y": y})
    assert check_plan(graph, {**feeds, **net.held}, orders=2) == 2
    session = Session({"cpu": open_backend("cpu", threads=2)}, Options(strict=True))
    session.prepare("net", graph, net.held)
    found = session.run("net", feeds)["y"]
    session.close()
    return found


def close(got: Array, want: Array) -> bool:
    return got.shape == want.shape and bool(np.abs(got - want).max() < 2e-5 * np.abs(want).max())


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


CAUSAL = np.where(np.tri(T), 0, -np.inf).astype(np.float32)
IDS = RNG.integers(0, V, T).astype(np.int32)


def heads(x: Tensor, count: int = H) -> Tensor:
    return x.reshape(T, count, D).permute(1, 0, 2)  # [H, T, D]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float = D**-0.5) -> Tensor:
    scores = ops.soft_max(q @ k.T, mask, scale=scale)  # [H, T, T]
    return ops.cont((scores @ v).permute(1, 0, 2)).reshape(T, E)


def gpt2(net: Net) -> Tensor:
    ids, mask = input("ids", (T,), "i32"), input("mask", (T, T))
    x = ops.get_rows(net("wte", V, E), ids) + net("wpe", T, E)
    for i in range(2):
        with scope(f"h.{i}"):
            a = ops.norm(x) * net("ln_1.w", E) + net("ln_1.b", E)
            qkv = a @ net("attn.w", E, 3 * E) + net("attn.b", 3 * E)  # Conv1D keeps [in, out]
            parts = [heads(ops.cont(qkv[:, j * E : (j + 1) * E])) for j in range(3)]
            x = x + (attention(*parts, mask) @ net("proj.w", E, E) + net("proj.b", E))
            a = ops.norm(x) * net("ln_2.w", E) + net("ln_2.b", E)
            up = ops.gelu(a @ net("fc.w", E, 4 * E) + net("fc.b", 4 * E))
            x = x + (up @ net("fc2.w", 4 * E, E) + net("fc2.b", E))
    return (ops.norm(x) * net("ln_f.w", E)) @ weight("wte", (V, E)).T


def gpt2_in_numpy(w: dict[str, Array]) -> Array:
    def norm(x: Array) -> Array:
        c = x - x.mean(-1, keepdims=True)
        result: Array = c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-5)
        return result

    x = w["wte"][IDS].astype(np.float64) + w["wpe"]
    for i in range(2):
        p = f"h.{i}."
        a = norm(x) * w[p + "ln_1.w"] + w[p + "ln_1.b"]
        qkv = (a @ w[p + "attn.w"] + w[p + "attn.b"]).reshape(T, 3, H, D).transpose(1, 2, 0, 3)
        weights = softmax(qkv[0] @ qkv[1].swapaxes(1, 2) * D**-0.5 + CAUSAL)
        mixed = (weights @ qkv[2]).transpose(1, 0, 2).reshape(T, E)
        x = x + mixed @ w[p + "proj.w"] + w[p + "proj.b"]
        a = norm(x) * w[p + "ln_2.w"] + w[p + "ln_2.b"]
        up = a @ w[p + "fc.w"] + w[p + "fc.b"]
        up = 0.5 * up * (1 + np.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up**3)))
        x = x + up @ w[p + "fc2.w"] + w[p + "fc2.b"]
    return (norm(x) * w["ln_f.w"]) @ w["wte"].T


def test_gpt2() -> None:
    net = Net()
    y = gpt2(net)
    assert close(computed(y, net, ids=IDS, mask=CAUSAL), gpt2_in_numpy(net.held))


WINDOW = np.where(np.tri(T) - np.tri(T, k=-3) > 0, 0, -np.inf).astype(np.float32)


def gemma3(net: Net) -> Tensor:
    """Norms before and after, 1 + w; queries and keys normed; a sliding window; logits capped."""
    ids, mask, at = input("ids", (T,), "i32"), input("mask", (T, T)), input("at", (T,), "i32")
    x = ops.get_rows(net("embed", V, E), ids) * E**0.5

    def norm(x: Tensor, name: str, n: int = E) -> Tensor:
        return ops.rms_norm(x) * (net(name, n) + 1)

    with scope("layers.0"):
        a = norm(x, "input_norm")
        q = norm((a @ net("q", E, E)).reshape(T, H, D), "q_norm", D)
        k = norm((a @ net("k", E, D)).reshape(T, 1, D), "k_norm", D)
        v = (a @ net("v", E, D)).reshape(T, 1, D)
        q, k = (ops.rope(t, at, mode="neox", freq_base=1e4) for t in (q, k))
        mixed = ops.flash_attn(q, k, v, mask, scale=D**-0.5).reshape(T, E)
        x = x + norm(mixed @ net("o", E, E), "post_norm")
        a = norm(x, "pre_ffw")
        gated = ops.geglu(a @ net("gate", E, 2 * E), a @ net("up", E, 2 * E))
        x = x + norm(gated @ net("down", 2 * E, E), "post_ffw")
    logits = norm(x, "final") @ weight("embed", (V, E)).T
    return 30 * ops.tanh(logits / 30)


def gemma3_in_numpy(w: dict[str, Array]) -> Array:
    def norm(x: Array, name: str) -> Array:
        result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w[name])
        return result

    def turned(x: Array) -> Array:
        angle = np.arange(T)[:, None] * 1e4 ** (-np.arange(D // 2) * 2 / D)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * c - b * s, a * s + b * c], -1)

    x, p = w["embed"][IDS].astype(np.float64) * E**0.5, "layers.0."
    a = norm(x, p + "input_norm")
    q = turned(norm((a @ w[p + "q"]).reshape(T, H, D), p + "q_norm"))
    k = turned(norm((a @ w[p + "k"]).reshape(T, 1, D), p + "k_norm"))
    scores = np.einsum("thd,sd->hts", q, k[:, 0]) * D**-0.5 + WINDOW
    mixed = np.einsum("hts,sd->thd", softmax(scores), a @ w[p + "v"]).reshape(T, E)
    x = x + norm(mixed @ w[p + "o"], p + "post_norm")
    a = norm(x, p + "pre_ffw")
    gate = a @ w[p + "gate"]
    gate = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    x = x + norm((gate * (a @ w[p + "up"])) @ w[p + "down"], p + "post_ffw")
    return 30 * np.tanh(norm(x, "final") @ w["embed"].T / 30)


def test_gemma3() -> None:
    net = Net()
    y = gemma3(net)
    at = np.arange(T, dtype=np.int32)
    got = computed(y, net, ids=IDS, mask=WINDOW, at=at)
    assert close(got, gemma3_in_numpy(net.held))


def delta_net(net: Net) -> Tensor:
    """S = a S - b k (k^T a S - v)^T, y = S^T q, step by step: a recurrence unrolled."""
    x = input("x", (T, E))
    q, k, v = (ops.silu(x @ net(n, E, E)).reshape(T, H, D) for n in "qkv")
    q, k = (ops.l2_norm(t) for t in (q, k))
    fade = ops.exp(-ops.softplus(x @ net("a", E, H)))  # [T, H]
    beta = ops.sigmoid(x @ net("b", E, H))
    s, rows = ops.fill((H, D, D), 0.0), []
    for t in range(T):
        s = s * fade[t].reshape(H, 1, 1)
        key, value = k[t].reshape(H, D, 1), v[t].reshape(H, 1, D)
        known = (s * key).sum(1, keepdims=True)  # [H, 1, D]
        s = s + key * ((value - known) * beta[t].reshape(H, 1, 1))
        rows.append((s * q[t].reshape(H, D, 1)).sum(1).reshape(1, E))
    return ops.concat(rows, 0) @ net("o", E, E)


def test_gated_delta_net() -> None:
    net = Net()
    y = delta_net(net)
    x, w = RNG.standard_normal((T, E)).astype(np.float32), net.held

    def silu(x: Array) -> Array:
        return x / (1 + np.exp(-x))

    def unit(x: Array) -> Array:
        result: Array = x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-6)
        return result

    wide = x.astype(np.float64)
    q, k, v = (silu(wide @ w[n]).reshape(T, H, D) for n in "qkv")
    q, k, s, rows = unit(q), unit(k), np.zeros((H, D, D)), []
    for t in range(T):
        a, b = 1 / (1 + np.exp(wide[t] @ w["a"])), 1 / (1 + np.exp(-wide[t] @ w["b"]))
        s = s * a[:, None, None]
        known = np.einsum("hdv,hd->hv", s, k[t])
        s = s + np.einsum("hd,hv->hdv", k[t], (v[t] - known) * b[:, None])
        rows.append(np.einsum("hdv,hd->hv", s, q[t]).reshape(E))
    assert close(computed(y, net, x=x), np.array(rows) @ w["o"])


def block(net: Net, x: Tensor, name: str, inside: int, out: int, stride: int) -> Tensor:
    """Two convolutions with biases, and the way round them."""
    with scope(name):
        step, one = (stride, stride), (1, 1)
        y = ops.conv_2d(net("1.w", out, inside, 3, 3), x, step, one) + net("1.b", out, 1, 1)
        y = ops.conv_2d(net("2.w", out, out, 3, 3), ops.relu(y), one, one) + net("2.b", out, 1, 1)
        way = x if stride == 1 else ops.conv_2d(net("down", out, inside, 1, 1), x, step)
        return ops.relu(y + way)


def conv_in_numpy(w: Array, x: Array, stride: int, padding: int) -> Array:
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    shown = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))
    result: Array = np.einsum("nihwkl,oikl->nohw", shown[:, :, ::stride, ::stride], w)
    return result


def test_residual_network() -> None:
    net, image = Net(), RNG.standard_normal((2, 3, 20, 20)).astype(np.float32)
    x = input("x", image.shape)
    stem = ops.relu(ops.conv_2d(net("stem", 8, 3, 7, 7), x, (2, 2), (3, 3)))
    pooled = ops.pool_2d(stem, "max", (3, 3), (2, 2), (1, 1))
    y = block(net, block(net, pooled, "a", 8, 8, 1), "b", 8, 16, 2)
    y = y.mean((2, 3)) @ net("head", 16, 10)
    got, w = computed(y, net, x=image), net.held
    z = np.maximum(conv_in_numpy(w["stem"], image, 2, 3), 0)
    wide = np.pad(z, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
    z = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (2, 3))[:, :, ::2, ::2].max((-1, -2))
    for name, stride in (("a", 1), ("b", 2)):
        inner = np.maximum(conv_in_numpy(w[f"{name}.1.w"], z, stride, 1) + w[f"{name}.1.b"], 0)
        inner = conv_in_numpy(w[f"{name}.2.w"], inner, 1, 1) + w[f"{name}.2.b"]
        way = z if stride == 1 else conv_in_numpy(w[f"{name}.down"], z, stride, 0)
        z = np.maximum(inner + way, 0)
    assert close(got, z.mean((2, 3)) @ w["head"])
