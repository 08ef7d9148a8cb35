"""Gemma 3n: Gemma 4's attention and inputs of layers around streams of which a layer computes one.

Of S streams a layer foretells all, computes the first, and corrects all by what came of it (AltUp);
beside its attention goes a product of low rank (LAuReL), and of its gates only those far above
their mean may open.

Legend: T rows, E width, S streams, R rank of LAuReL, F width of the feed-forward.
Sources: Google 2025, the Gemma 3n release; Baykal et al. 2023 (arXiv 2301.13310), for AltUp;
Menghani et al. 2024 (arXiv 2411.07501), for LAuReL; transformers `modeling_gemma3n`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph import Graph, ModelError, Tensor, ops
from ggraph.errors import shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.lazy import lazy

from .. import blocks
from ..architecture import Architecture, Tensors, changed, stack
from ..config import LARGEST, DecoderConfig, Keys, Rope, layer_range
from ..gguf_config import every, types_every
from ..step import Step
from . import gemma2, gemma3, gemma4

if TYPE_CHECKING:
    import statistics
else:
    statistics = lazy("statistics")

STREAMS = 4
PERIOD = 5
OPEN = -LARGEST  # deviations above the mean where every gate opens
SPARSE, SPARSITY = 10, 0.95  # the first layers, and the share of their gates that stays shut
OWN = 20  # layers with keys and values of their own, where a GGUF file does not say
SMALLEST = 1e-5  # mean square that a stream is divided by
PROJECTIONS = "altup_proj", "altup_unembd_proj"


def build(s: Step) -> Graph:
    """The step graph of a Gemma 3n text model."""
    x = blocks.embed(s)  # [T, E]
    own, seen = gemma4.layer_inputs(s, x), gemma4.Seen()
    streams = [x, *(projected(s, x, x, "altup_proj", j) for j in range(STREAMS - 1))]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, streams[0], i)
        streams = layer(s, streams, own, i, seen)
    first, *others = streams
    for j, other in enumerate(others):
        first += projected(s, other, streams[0], "altup_unembd_proj", j)
    return blocks.head(s, first * (1 / STREAMS))


def projected(s: Step, x: Tensor, like: Tensor, name: str, j: int) -> Tensor:
    """x times the j-th of these matrices, made as long as `like`: [T, E]."""
    y = blocks.linear(s, x, f"{name}.{j}", x.shape[1])
    lengths = ops.sqrt(ops.div(ops.mean(ops.sqr(like)), square_of(y)))  # [T, 1]
    return ops.mul(y, lengths)


def square_of(x: Tensor) -> Tensor:
    """Mean square of each row, never 0: [T, 1]."""
    return ops.clamp(ops.mean(ops.sqr(x)), SMALLEST, LARGEST)


def layer(
    s: Step, streams: Sequence[Tensor], own: Tensor, i: int, seen: gemma4.Seen
) -> list[Tensor]:
    """Layer i: S times [T, E] to the same, of the last layer as `Step.asked` says."""
    blk = f"blk.{i}"
    first, *others = foretold(s, streams, i)
    made = computed(s, first, i, seen)
    first = s.asked(first, i)
    shares = blocks.linear(s, modalities(s, made, i), f"{blk}.altup_correct_coef", STREAMS) + 1.0
    change = (made - first).reshape(-1, 1, made.shape[1])
    corrected = [
        stream + ops.moe_mix(change, ops.columns(shares, j, 1))
        for j, stream in enumerate((first, *others))
    ]
    scaled = ops.mul(corrected[0], s.w(f"{blk}.altup_correct_scale.weight", made.shape[1]))
    fed = gemma4.fed_own(s, scaled, own, i)
    return [corrected[0], *(stream + fed for stream in corrected[1:])]


def foretold(s: Step, streams: Sequence[Tensor], i: int) -> list[Tensor]:
    """What layer i expects of each stream: the first for all T rows, others for those asked for."""
    shares = blocks.linear(
        s, modalities(s, streams[0], i), f"blk.{i}.altup_predict_coef", STREAMS**2
    )
    found = []
    for j, stream in enumerate(streams):
        asked = [s.asked(x, i) if j else x for x in (*streams, shares, stream)]
        (*held, share, x), (rows, e) = asked, asked[-1].shape
        wide = ops.concat(held).reshape(rows, STREAMS, e)
        found.append(x + ops.moe_mix(wide, ops.columns(share, j * STREAMS, STREAMS)))
    return found


def modalities(s: Step, x: Tensor, i: int) -> Tensor:
    """What the shares of layer i's streams are made of: [T, S]."""
    e, blk = x.shape[1], f"blk.{i}"
    even = ops.rms_norm(x, eps=s.config.rms_norm_eps)
    normed = ops.mul(even, s.w(f"{blk}.altup_router_norm.weight", e)) * (1 / e)
    return ops.tanh(blocks.product(s, normed, f"{blk}.altup_router.weight", STREAMS))


def computed(s: Step, x: Tensor, i: int, seen: gemma4.Seen) -> Tensor:
    """What layer i makes of its stream, added to it: [T, E]."""
    blk = f"blk.{i}"
    normed = blocks.norm(s, x, f"{blk}.attn_norm")
    mixed = blocks.norm(s, gemma4.attention(s, normed, i, seen), f"{blk}.post_attention_norm")
    h = s.asked(x, i) + mixed + beside(s, s.asked(normed, i), i)
    return gemma2.second_half(s, h * math.sqrt(0.5), i, feed_forward)


def beside(s: Step, x: Tensor, i: int) -> Tensor:
    """x and a product of low rank: [T, E]."""
    left = f"blk.{i}.laurel_l"
    rank = s.catalogue[f"{left}.weight"].shape[0] if s.has(f"{left}.weight") else 0
    y = blocks.linear(s, blocks.linear(s, x, left, rank), f"blk.{i}.laurel_r", x.shape[1])
    return x + blocks.norm(s, y, f"blk.{i}.laurel_post_norm")


def feed_forward(s: Step, x: Tensor, i: int) -> Tensor:
    """GELU's gated feed-forward, of whose gates few may open: [T, E]."""
    deviations = s.config.multipliers[i]
    if deviations <= OPEN:
        return blocks.geglu(s, x, i)

    def unit(gate: Tensor, up: Tensor, name: str) -> Tensor:
        return ops.geglu(shut(gate, deviations), up, name=name)

    return blocks.gated(s, x, i, unit, s.config.intermediate_size)


def shut(gate: Tensor, deviations: float) -> Tensor:
    """How far each gate is above the row's mean and so many deviations, or 0: [T, F]."""
    beyond = gate - ops.mean(gate)
    return ops.relu(beyond - ops.sqrt(ops.mean(ops.sqr(beyond))) * deviations)


def beyond(share: float) -> float:
    """How many deviations above their mean gates open of which this share stays shut."""
    return statistics.NormalDist().inv_cdf(share) if share else OPEN


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """One width for all layers, which layers slide, and how far above their mean gates open."""
    k = Keys(values, "config.json")
    layers, wide = k.integer("num_hidden_layers"), values.get("intermediate_size")
    if isinstance(wide, list) and wide:
        if any(w != wide[0] for w in wide):
            raise ModelError(f"gemma3n: intermediate_size {wide!r:.60} differs from layer to layer")
        wide = wide[0]
    sparse = [SPARSITY if i < SPARSE < layers else 0.0 for i in layer_range(layers)]
    key = "activation_sparsity_pattern"
    shares = k.reals(key, layers) if k.has(key) else sparse
    if not all(0 <= share < 1 for share in shares):
        raise ModelError(f"config.json: {key} {list(shares)!r:.60}: expected shares from 0 up to 1")
    return {
        **values, "intermediate_size": wide,
        "layer_types": values.get("layer_types") or types_every(PERIOD, layers),
        "multipliers": [beyond(share) for share in shares],
    }  # fmt: skip


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """What a file says of streams, gates and caches; llama.cpp takes the released models' for
    granted. ModelError for other streams."""
    active, count = k.integer("altup.active_idx", 0), k.integer("altup.num_inputs", STREAMS)
    if (active, count) != (0, STREAMS):
        raise ModelError(f"gemma3n: stream {active} of {count} is computed; known: 0 of 4")
    usual = [
        statistics.NormalDist().inv_cdf(SPARSITY) if i < SPARSE else OPEN for i in range(layers)
    ]
    told = np.ravel(k.get("activation_sparsity_scale", usual))
    known = told.dtype.kind in "fi" and len(told) == layers
    gates = [float(v) for v in told] if known else [math.nan]
    if not all(-math.inf <= g <= LARGEST for g in gates):
        raise ModelError(f"GGUF metadata: activation_sparsity_scale {shown(told.tolist())}")
    own = k.integer("attention.shared_kv_layers", max(layers - OWN, 0))
    return {"multipliers": tuple(max(g, OPEN) for g in gates), "num_kv_shared_layers": own}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """The other way."""
    gates = [-math.inf if g <= OPEN else g for g in c.multipliers]
    return {
        **gemma2.keys(c), "altup.active_idx": 0, "altup.num_inputs": STREAMS,
        "activation_sparsity_scale": np.array(gates, np.float32),
        "attention.shared_kv_layers": c.num_kv_shared_layers,
        "attention.sliding_window": c.sliding_window or 0,
        "final_logit_softcapping": c.final_logit_softcapping,
    }  # fmt: skip


def complete(c: DecoderConfig) -> DecoderConfig:
    """As in Gemma 4; what a file may not say of sliding layers."""
    slides = c.windowed_layers or every(PERIOD, c.num_hidden_layers)
    local = Rope(c.rope.mode, c.rope.n_rot, gemma3.LOCAL_BASE, factors="")
    return gemma4.complete(
        replace(
            c,
            windowed_layers=slides if c.sliding_window else (),
            window_rope=(c.window_rope or local) if c.sliding_window else None,
        )
    )


def learn(tensors: Tensors, c: DecoderConfig) -> DecoderConfig:
    """Tokens without an input of layers stand for images and sounds, and are none of a text."""
    table = tensors.get(gemma4.TABLE)
    return c if table is None else replace(c, vocab_size=min(c.vocab_size, table.shape[0]))


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The embeddings of the other tokens."""
    named = "token_embd.weight", "output.weight"
    found = dict(tensors)
    for name in named:
        if name in found and found[name].shape[0] > c.vocab_size:
            found[name] = changed(found[name], found[name].data[: c.vocab_size])
    return found


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Matrices of streams one by one; keys and values where they are made."""
    found: Tensors = {}
    for name, t in gemma4.load(tensors, c).items():
        lead = name.removesuffix(".weight")
        if lead not in PROJECTIONS:
            found[name] = t
            continue
        for j, data in enumerate(t.data):
            title, scale = f"{lead}.{j}.weight", None if t.scale is None else t.scale[j : j + 1]
            found[title] = RawTensor(title, t.dtype, t.shape[1:], data, scale)
    return found


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """As llama.cpp's files have them: matrices of streams in one, and keys and values for every
    layer: those that share some, and read none of their own, get what makes the shared ones."""
    found = dict(tensors)
    for lead in PROJECTIONS:
        parts = [found.pop(f"{lead}.{j}.weight") for j in range(STREAMS - 1)]
        found[f"{lead}.weight"] = stack(f"{lead}.weight", parts)
    for i in range(c.num_hidden_layers - c.num_kv_shared_layers, c.num_hidden_layers):
        for part in ("attn_k", "attn_v", "attn_k_norm"):
            title = f"blk.{i}.{part}.weight"
            found[title] = replace(found[f"blk.{gemma4.made_by(c, i)}.{part}.weight"], name=title)
    return found


NAMES = {
    **gemma2.NAMES, **gemma4.OWN_INPUT,
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}  # fmt: skip
TOPS = {
    **gemma4.TOPS,
    **{f"altup_projections.{j}": f"altup_proj.{j}" for j in range(STREAMS - 1)},
    **{f"altup_unembed_projections.{j}": f"altup_unembd_proj.{j}" for j in range(STREAMS - 1)},
}
GEMMA3N = Architecture(
    "gemma3n", build, ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    layer_names=NAMES, top_names={f"model.{a}.weight": f"{b}.weight" for a, b in TOPS.items()},
    translate=translate, complete=complete, learn=learn, sanitize=sanitize, load=load,
    store=store, keys=keys, read=read,
    gguf_defaults={
        "final_logit_softcapping": 30.0, "embedding_length_per_layer_input": 256,
        "attention.sliding_window": 512,
    },
    fixed={
        **gemma2.FIXED, "attention_bias": (False,), "altup_active_idx": (0,),
        "altup_correct_scale": (True,), "altup_num_inputs": (STREAMS,),
    },
    hf_defaults={
        "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384,
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512,
        "rope_theta": 1e6, "rope_local_base_freq": gemma3.LOCAL_BASE,
        "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
    },
)  # fmt: skip
