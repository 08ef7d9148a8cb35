"""A draft head in float64, one position after another, and its variants, for the tests of heads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ggraph.decode.draft.hidden import held
from ggraph.decode.draft.runner import DraftRunner
from ggraph.session import Session

TINY = Path(__file__).parent / "golden" / "tiny"
E, HEADS, KV, EPS = 64, 4, 2, 1e-5
Q_RANK, RANK, PLAIN, TURNED, VALUE = 24, 40, 12, 8, 10  # of heads with latent attention
Array = np.ndarray[Any, Any]
Weights = dict[str, Array]


def hidden(runner: DraftRunner, first: int, count: int) -> Array:
    """What a step left behind rows, f32 [count, E]: from 0 on true ones, from 1 on others."""
    assert isinstance(runner.session, Session)
    name = held(runner.model.name, runner.model.width).name
    return runner.session.read_rows(name, range(first, first + count)).view(np.float32)


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
    even: Array = x / np.sqrt((x * x).mean() + EPS)
    return even * w


def rotated(x: Array, position: int, turns: list[float] | None = None) -> Array:
    half = len(x) // 2
    angle = position * np.array(turns or plain_turns(len(x)))
    a, b, cos, sin = x[:half], x[half:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def plain_turns(width: int) -> list[float]:
    """Radians per position of each pair."""
    return [float(10000.0 ** (-2 * j / width)) for j in range(width // 2)]


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

    def latent(self, prefix: str, i: int, x: Array, p: int) -> Any:
        """Latent attention, head by head, with the keys and values of every position regrown."""
        w = {k.removeprefix(f"{prefix}.self_attn."): v for k, v in self.w.items()}
        if "q_a_proj.weight" in w:
            q = w["q_b_proj.weight"] @ norm(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"])
        else:
            q = w["q_proj.weight"] @ x
        small = w["kv_a_proj_with_mqa.weight"] @ x
        held = self.cache.setdefault(i, [])
        held.append((small[:RANK], self.turned(small[RANK:], p)))
        mixed = []
        for h, query in enumerate(q.reshape(HEADS, PLAIN + TURNED)):
            grow = w["kv_b_proj.weight"].reshape(HEADS, PLAIN + VALUE, RANK)[h]
            grown = [grow @ norm(c, w["kv_a_layernorm.weight"]) for c, _ in held[: p + 1]]
            turned = self.turned(query[PLAIN:], p)
            scores = np.array(
                [
                    query[:PLAIN] @ g[:PLAIN] + turned @ k
                    for g, (_, k) in zip(grown, held, strict=False)
                ]
            )
            share = np.exp(scores * self.options.get("by_hand_scale", (PLAIN + TURNED) ** -0.5))
            mixed.append(
                sum(s * g[PLAIN:] for s, g in zip(share / share.sum(), grown, strict=True))
            )
        return w["o_proj.weight"] @ np.concatenate(mixed)

    def turned(self, x: Array, p: int) -> Array:
        """Neighbouring pairs rotated by the angles of position p, one pair after another."""
        out = np.empty(len(x))
        for j in range(len(x) // 2):
            angle = p * self.options.get("by_hand_turns", plain_turns(len(x)))[j]
            a, b = x[2 * j], x[2 * j + 1]
            out[2 * j] = a * np.cos(angle) - b * np.sin(angle)
            out[2 * j + 1] = b * np.cos(angle) + a * np.sin(angle)
        return out * float(self.options.get("by_hand_magnitude", 1.0))

    def attention(self, prefix: str, i: int, x: Array, p: int) -> Any:
        if f"{prefix}.self_attn.kv_b_proj.weight" in self.w:
            return self.latent(prefix, i, x, p)
        q = self.linear(f"{prefix}.self_attn.q_proj", x).reshape(HEADS, -1)
        k = self.linear(f"{prefix}.self_attn.k_proj", x).reshape(KV, -1)
        v = self.linear(f"{prefix}.self_attn.v_proj", x).reshape(KV, -1)
        if f"{prefix}.self_attn.q_norm.weight" in self.w:
            q = np.array([norm(h, self.w[f"{prefix}.self_attn.q_norm.weight"]) for h in q])
            k = np.array([norm(h, self.w[f"{prefix}.self_attn.k_norm.weight"]) for h in k])
        held = self.cache.setdefault(i, [])
        turns = self.options.get("by_hand_turns")
        held.append(([rotated(h, p, turns) for h in k], v))
        first = max(0, p + 1 - self.options.get("sliding_window", 10**9))
        mixed = []
        for h in range(HEADS):
            g, query = h // (HEADS // KV), rotated(q[h], p, turns)
            seen = held[first : p + 1]
            scale = self.options.get("by_hand_scale", q.shape[1] ** -0.5)
            scores = np.array([query @ keys[g] for keys, _ in seen]) * scale
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


def latent_layer(prefix: str, seed: int, width: int, small_queries: bool) -> Weights:
    """The tensors of a latent attention that reads `width` values."""
    key = HEADS * (PLAIN + TURNED)
    queries = {"q_proj.weight": grown(seed, key, width)}
    if small_queries:
        queries = {
            "q_a_proj.weight": grown(seed, Q_RANK, width),
            "q_a_layernorm.weight": grown(seed + 1, Q_RANK, around=1.0),
            "q_b_proj.weight": grown(seed + 2, key, Q_RANK),
        }
    made = {
        **queries,
        "kv_a_proj_with_mqa.weight": grown(seed + 3, RANK + TURNED, width),
        "kv_a_layernorm.weight": grown(seed + 4, RANK, around=1.0),
        "kv_b_proj.weight": grown(seed + 5, HEADS * (PLAIN + VALUE), RANK),
        "o_proj.weight": grown(seed + 6, E, HEADS * VALUE),
    }
    return {f"{prefix}.self_attn.{n}": v for n, v in made.items()}


def with_latent_attention(w: Weights, small_queries: bool) -> Weights:
    """The same head with latent attention in its first layer."""
    others = {k: v for k, v in w.items() if ".self_attn." not in k}
    return others | latent_layer("midlayer", 40, 2 * E, small_queries)


YARN = {
    "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip


def yarn_by_hand(width: int, whole: bool = True) -> dict[str, Any]:
    """What YaRN makes of the angles, their magnitude and the scores, as DeepSeek's code says. Its
    bounds are `whole` pairs, or as gpt-oss has them."""

    def pair(turns: float) -> float:
        """Index of the pair that makes so many turns over the trained length."""
        return float(width * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(10000.0)))

    low, high = pair(32.0), pair(1.0)
    if whole:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    turns = []
    for j, plain in enumerate(plain_turns(width)):
        stretched = min(1.0, max(0.0, (j - low) / max(high - low, 0.001)))
        turns.append(plain / 16.0 * stretched + plain * (1 - stretched))

    def magnitude(m: float) -> float:
        return float(0.1 * m * np.log(16.0) + 1.0)

    return {
        "by_hand_turns": turns,
        "by_hand_magnitude": magnitude(0.7) / magnitude(1.2),
        "by_hand_scale": (PLAIN + TURNED) ** -0.5 * magnitude(1.2) ** 2,
    }


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama3_by_hand() -> list[float]:
    """Radians per position of each of the 8 pairs, as Llama 3.1's release scales them."""
    turns = []
    for j in range(8):
        plain = float(500.0 ** (-2 * j / 16))
        wave = 2 * np.pi / plain
        if wave < 64 / 4:
            turns.append(plain)
        elif wave > 64 / 1:
            turns.append(plain / 8)
        else:
            smooth = (64 / wave - 1) / (4 - 1)
            turns.append((1 - smooth) * plain / 8 + smooth * plain)
    return turns


def own_width(w: Weights) -> Weights:
    """A head 48 wide for a target 64 wide: it must bring embedding and output matrix along."""
    made = {k.replace("layers.9", "midlayer"): v for k, v in layer("layers.9", 30, 96).items()}
    for name, shape in (("o_proj", (48, 64)), ("q_proj", (64, 96))):
        made[f"midlayer.self_attn.{name}.weight"] = grown(31, *shape)
    for name, shape in (("gate_proj", (96, 48)), ("up_proj", (96, 48)), ("down_proj", (48, 96))):
        made[f"midlayer.mlp.{name}.weight"] = grown(len(name), *shape)
    for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        made[f"midlayer.{name}.weight"] = grown(len(name), 48, around=1.0)
    top = {
        "fc.weight": grown(32, 48, 192), "norm.weight": grown(33, 48, around=1.0),
        "lm_head.weight": grown(34, 128, 48), "embed_tokens.weight": grown(35, 320, 48),
    }  # fmt: skip
    return {**{k: w[k] for k in ("d2t", "t2d")}, **made, **top}


def variant(name: str) -> tuple[Weights, dict[str, Any]]:
    """Tensors and config keys of one variant."""
    w = base()
    options: dict[str, Any] = {}
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
    elif name == "own width":
        w, options = own_width(w), {"hidden_size": 48, "head_dim": 16}
    elif name == "five taps":
        w["fc.weight"] = grown(3, 64, 320)
        options["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3, 4, 5]
    elif name == "own rope":
        options |= {"rope_theta": 500.0, "rope_scaling": LLAMA3, "by_hand_turns": llama3_by_hand()}
    elif name.startswith("own yarn"):
        whole = name == "own yarn"
        given = yarn_by_hand(16, whole)
        given["by_hand_scale"] = (
            given["by_hand_magnitude"] ** 2 / 4
        )  # of rotated q and k: all of it
        options |= {"rope_scaling": {**YARN, "truncate": whole}, **given}
    elif name.startswith("latent"):
        w = with_latent_attention(w, small_queries=name != "latent")
        if name == "latent, two layers, 3.1":
            options["norm_output"] = True
            w |= {f"fc_norm.{i}.weight": grown(i, 64, around=1.0) for i in range(3)}
            plain = {k: v for k, v in layer("layers.1", 20, 64).items() if "self_attn" not in k}
            w |= plain | latent_layer("layers.1", 60, E, small_queries=True)
        if name == "latent with yarn":
            options |= {"rope_scaling": YARN, **yarn_by_hand(TURNED)}
    elif name == "wide heads":
        w["midlayer.self_attn.q_proj.weight"] = grown(1, 128, 128)
        w["midlayer.self_attn.k_proj.weight"] = grown(2, 64, 128)
        w["midlayer.self_attn.v_proj.weight"] = grown(3, 64, 128)
        w["midlayer.self_attn.o_proj.weight"] = grown(4, 64, 128)
    return w, options


def saved(folder: Path, weights: Weights, options: dict[str, Any]) -> Path:
    folder.mkdir()
    config = json.loads((TINY / "eagle3_for_llama_tied" / "config.json").read_text())
    said = {k: v for k, v in options.items() if not k.startswith("by_hand")}
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors"
    )
    return folder
