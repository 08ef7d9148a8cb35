"""From a path to a model that can run: architecture by name, weights under one naming.

Weights carry the GGUF names (`blk.0.attn_q.weight`) whatever the file; `sanitize` maps the
Hugging Face names to them, and is the only place that knows both.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Graph, InputError, ModelError, Tensor, dtypes
from ggraph.decode.model import StepShape
from ggraph.decode.rows import Chunk
from ggraph.errors import FormatWarning
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.lazy_array import Storage
from ggraph.tensor import Kind

from . import vectors
from .architecture import (
    LAYER_NAMES,
    NEXT_NAMES,
    TOP_NAMES,
    Architecture,
    Tensors,
    halves,
    scales_apart,
    stack,
)
from .config import LONG_FACTORS, SHORT_FACTORS, DecoderConfig, Keys
from .door import FOUND, load_installed, register_architecture, unknown
from .families import FAMILIES
from .gguf_config import from_gguf
from .hf_config import check_fixed, from_hf
from .pooling import dense_of
from .rotation import YARN, axes_of, yarn_factors
from .step import AXES, Step

for _a in FAMILIES:
    register_architecture(_a)
ARCHITECTURES = FOUND  # by name in GGUF files: those built in, and those that came through the door


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint ready to be built: implements `ggraph.decode.model.CausalModel`.

    `prefix` stands before the names of its weights and caches; models of one session need
    different ones, for a session knows both by name.
    """

    name: str
    config: DecoderConfig
    catalogue: Mapping[str, RawTensor]
    checkpoint: Checkpoint = field(repr=False)
    prefix: str = ""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """Most positions that the model was trained for."""
        return self.config.max_position_embeddings

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def width(self) -> int:
        """E, the width of the residual stream."""
        return self.config.hidden_size

    @property
    def given_width(self) -> int:
        """Numbers of a row in the place of a token: E, and E for each layer that adds to it."""
        return self.width * (1 + self.config.n_deepstack_layers)

    @property
    def turns_by_place(self) -> bool:
        """Whether rows of an image are turned by line and column, too."""
        return AXES[0] in self.catalogue

    @property
    def causal(self) -> bool:
        """Whether it goes on with texts; else it is an encoder, which makes vectors of them."""
        return self.config.causal

    @property
    def scores(self) -> bool:
        """Whether it makes a score of two texts in place of a vector."""
        return f"{vectors.SCORE}.weight" in self.catalogue

    @property
    def vector_width(self) -> int:
        """Numbers of a text's vector."""
        return vectors.width(self.catalogue, self.width)

    @property
    def sliding_window(self) -> int | None:
        """Positions that a sliding layer sees, None where no layer slides; of an encoder those on
        both sides."""
        size = self.config.sliding_window
        return Chunk(size) if size and self.config.chunked else size

    @property
    def recurrent(self) -> bool:
        """Whether some layers have a state, which a text cannot take back."""
        return any(self.config.recurrent_layers)

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step (see `ggraph.decode.model` for inputs and outputs)."""
        step = Step(self.config, self.catalogue, shape, self.prefix)
        graph = ARCHITECTURES[self.config.architecture].build(step)
        self.check_used(t.name.removeprefix(self.prefix) for t in graph.leaves(Kind.WEIGHT))
        if shape.given and "given" not in {t.name for t in graph.leaves(Kind.INPUT)}:
            raise ModelError(
                f"{self.config.architecture}: the graph takes no rows in the place of tokens"
            )
        return graph

    def check_used(self, names: Iterable[str]) -> None:
        """ModelError where the checkpoint has a weight that the graph leaves out: what it computes
        is another model then. Layers that only draft are read by their head."""
        drafting = tuple(
            f"blk.{self.layer_count + i}." for i in range(self.config.num_nextn_predict_layers)
        )
        known = {*names, *AXES}  # of which steps without images know nothing
        if self.config.rope.factors in known:
            known |= {SHORT_FACTORS, LONG_FACTORS}
        left = [n for n in self.catalogue if n not in known and not n.startswith(drafting)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"{self.config.architecture}: no place for tensor {left[0]!r}{more} in this model"
            )

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight."""
        return self.catalogue[t.name.removeprefix(self.prefix)].storage

    def reaching(self, context: int) -> "Model":
        """The same model for texts of up to `context` positions. LongRoPE turns all of a text that
        may be longer than those of the training by other factors. InputError for more positions
        than those of the training where dynamic NTK gives each length a base of its own."""
        c = self.config
        if c.rope.dynamic and context > c.max_position_embeddings:
            raise InputError(
                f"context of {context} tokens: {self.name} has a dynamic (NTK) rope, known for "
                f"contexts of its training alone, 1 to {c.max_position_embeddings}"
            )
        if LONG_FACTORS not in self.catalogue:
            return self
        long = context > (c.rope.n_ctx_orig or c.max_position_embeddings)
        rope = replace(c.rope, factors=LONG_FACTORS if long else SHORT_FACTORS)
        return replace(self, config=replace(c, rope=rope))

    def beside(self, prefix: str) -> "Model":
        """The same model for a session that holds another one already."""
        return replace(self, name=f"{prefix}{self.name}", prefix=prefix)


def open_model(path: Path) -> Model:
    """The model in a GGUF file or a Hugging Face folder, for texts as long as those that it was
    trained with: see `Model.reaching`.

    Raises FormatError for a damaged file, ModelError for an architecture or shape we do not know.
    """
    checkpoint = open_checkpoint(path)
    read = _read_gguf if checkpoint.format == "gguf" else _read_hf
    config, catalogue = read(path, checkpoint)
    name = path.stem if path.is_file() else path.name
    return Model(name, config, completed(catalogue, config), checkpoint).reaching(0)


def completed(catalogue: Tensors, config: DecoderConfig) -> Tensors:
    """A checkpoint's tensors with those that its config tells of, all as they are computed with.
    A rotation by which no layer turns has none."""
    found, rope = dict(catalogue), config.rope
    turns = any(config.rope_of(i) is rope for i in range(config.num_hidden_layers))
    if turns and rope.freq_factors is not None and rope.factors not in found:
        found[rope.factors] = _vector(rope.factors, rope.freq_factors)
    if turns and rope.long_factors is not None:
        found[LONG_FACTORS] = _vector(LONG_FACTORS, rope.long_factors)
    if turns and rope.ext_factor and rope.truncate is False:
        found[YARN] = _vector(YARN, yarn_factors(rope))
    found |= {name: _vector(name, factors) for name, factors in axes_of(config).items()}
    return {name: t.widened() for name, t in scales_apart(found).items()}


def architecture_of(path: Path, checkpoint: Checkpoint) -> Architecture:
    """Of which family a checkpoint is. ModelError where that is not known."""
    if checkpoint.format != "gguf":
        return _hf_architecture(path, checkpoint)
    if checkpoint.architecture not in ARCHITECTURES:
        load_installed()
    a = ARCHITECTURES.get(checkpoint.architecture)
    if a is None:
        raise unknown(path, checkpoint.architecture, list(ARCHITECTURES))
    return a


def _read_gguf(path: Path, checkpoint: Checkpoint) -> tuple[DecoderConfig, Tensors]:
    a = architecture_of(path, checkpoint)
    unsaid = {f"{a.name}.{key}": value for key, value in a.gguf_defaults.items()}
    bare = {f"{a.name}.{k}": v for k, v in checkpoint.metadata.items() if k in a.bare}
    told = {**unsaid, **checkpoint.metadata, **bare}
    config = from_gguf(told, a.name, a.rope_mode, causal=a.causal)
    scaling = told.get(f"{a.name}.rope.scaling.type")
    if scaling == "longrope" and LONG_FACTORS not in checkpoint.tensors:
        raise ModelError(f"{path}: LongRoPE without its factors, {LONG_FACTORS!r}")
    own = a.read(Keys(told, "GGUF metadata", f"{a.name}."), config.num_hidden_layers)
    config = _drafting(a.complete(replace(config, **own)), checkpoint.tensors)
    parts = applied(a, a.parted, dict(checkpoint.tensors), config)
    return config, applied(a, a.load, parts, config)


def _read_hf(path: Path, checkpoint: Checkpoint) -> tuple[DecoderConfig, Tensors]:
    a = _hf_architecture(path, checkpoint)
    values, tensors = text_part(checkpoint)
    config = config_from_hf(a, values)
    renamed = sanitize(tensors, config, a)
    told = [v.get(TIED) for v in (values, checkpoint.metadata)]
    if a.causal and "output.weight" not in renamed and False in told and True not in told:
        said = f"{path}: {TIED} is false, but there is no lm_head.weight"
        if "embed_tokens.weight" not in checkpoint.tensors:
            raise ModelError(said)
        warnings.warn(f"{said}: only its embeddings mean anything", FormatWarning, stacklevel=3)
    if not a.causal:
        renamed |= dense_of(checkpoint)
    config = _drafting(a.learn(renamed, config), renamed)
    return config, applied(a, a.loaded, applied(a, a.sanitize, renamed, config), config)


def config_from_hf(a: Architecture, values: Mapping[str, Any]) -> DecoderConfig:
    """A config.json as the architecture reads it."""
    check_fixed(values, {**a.fixed, "is_causal": (a.causal,)}, a.name)
    config = from_hf(a.translate({**a.hf_defaults, **values}), a.name)
    return a.complete(replace(config, causal=a.causal))


def applied(
    a: Architecture,
    change: Callable[[Tensors, DecoderConfig], Tensors],
    tensors: Tensors,
    config: DecoderConfig,
) -> Tensors:
    """The architecture's own change of its tensors. ModelError where NumPy cannot shape them."""
    try:
        return change(tensors, config)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{a.name}: a tensor does not fit the config: {error}") from error


def _drafting(c: DecoderConfig, tensors: Mapping[str, RawTensor]) -> DecoderConfig:
    """The config with as many layers that only draft as the file holds: some are left out."""
    told = range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers)
    held = sum(f"blk.{i}.nextn.eh_proj.weight" in tensors for i in told)
    return replace(c, num_nextn_predict_layers=held)


TIED = "tie_word_embeddings"
_TEXT = re.compile(
    r"model\.(?:language|text)_model\.|language_model\.model\.|language_model\.(?=lm_head)"
)
_OTHERS = (
    "vision", "visual", "audio", "multi_modal", "embed_vision", "embed_audio", "connector"
)  # fmt: skip


def text_part(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], Mapping[str, RawTensor]]:
    """The model of text inside one that also sees and hears."""
    values, own = checkpoint.metadata, checkpoint.metadata.get("text_config")
    nested = isinstance(own, Mapping)
    found: dict[str, RawTensor] = {}
    for name, t in checkpoint.tensors.items():
        short = name.removeprefix("model.") if nested else name
        if short.startswith(_OTHERS):
            continue
        found[_TEXT.sub(lambda m: _stem(m[0]), name)] = t
    if "embed_tokens.weight" in found:  # saved without the class that has the output matrix
        found = {f"model.{name}": t for name, t in found.items()}
    return ({**values, **own} if isinstance(own, Mapping) else values), found


_HEADLESS = re.compile(r"(Text)?Model$")
"""How a class is called that has layers and no output matrix, as embedding models are saved."""


def _stem(prefix: str) -> str:
    """What stands before a text model's tensors instead."""
    return "" if prefix == "language_model." else "model."


def _hf_architecture(path: Path, checkpoint: Checkpoint) -> Architecture:
    named = checkpoint.metadata.get("architectures") or [checkpoint.architecture]
    for again in (False, True):
        fit = (
            a for a in ARCHITECTURES.values() if a.told_by.items() <= checkpoint.metadata.items()
        )
        ordered = sorted(fit, key=lambda a: len(a.told_by))  # who is told apart goes before
        known = {name: a for a in ordered for name in a.hf}
        whole = (
            n for given in named for n in (str(given), _HEADLESS.sub("ForCausalLM", str(given)))
        )
        found = next((known[n] for n in whole if n in known), None)
        if found is not None:
            return found
        if not again:
            load_installed()
    raise unknown(path, str(named[0]), list(known))


def _vector(name: str, values: tuple[float, ...]) -> RawTensor:
    data = np.asarray(values, np.float32)
    return RawTensor(name, dtypes.F32, data.shape, data)


_EXPERT = re.compile(r"(?:mlp|feed_forward|block_sparse_moe|mixer)\.experts\.(\d+)\.(\w+)")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down",
          "w1": "gate", "w3": "up", "w2": "down"}  # fmt: skip
_STACKED = {  # modules that hold all experts' parts in one tensor
    "mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",),
    "feed_forward.experts.gate_up_proj": ("gate", "up"),
    "feed_forward.experts.down_proj": ("down",),
    "experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",),
    "block_sparse_moe.input_linear": ("gate", "up"), "block_sparse_moe.output_linear": ("down",),
    "mixer.experts.up_proj": ("up",), "mixer.experts.down_proj": ("down",),
}  # fmt: skip
_NEXT = re.compile(r"mtp\.(?:layers\.(\d+)\.(.+)|(.+)\.weight)")
_NEXT_TOP = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm", "embed_tokens": "embed_tokens", "lm_head": "shared_head.head",
}  # fmt: skip
_USELESS = re.compile(
    r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)|model\.mtp_\w+\.\d+\..+"
)


def sanitize(tensors: Mapping[str, RawTensor], config: DecoderConfig, a: Architecture) -> Tensors:
    """Hugging Face tensors under GGUF names; experts stacked; unknown names are refused."""
    found: Tensors = {}
    stacks: dict[str, dict[int, RawTensor]] = {}
    layer = re.compile(a.layer_prefix + r"(\d+)\.(.+?)(?:\.(weight|bias))?")
    tops, inner = {**TOP_NAMES, **a.top_names}, {**LAYER_NAMES, **a.layer_names}
    last = config.num_hidden_layers + config.num_nextn_predict_layers
    for given, t in tensors.items():
        name = _in_line(given, config.num_hidden_layers)
        match = layer.fullmatch(name)
        drafts = match is not None and int(match[1]) >= config.num_hidden_layers
        if match is not None and int(match[1]) >= last:
            continue  # layers that only draft, of which the config does not tell
        if match is not None and drafts and match[2] in NEXT_NAMES:
            title = f"blk.{match[1]}.{NEXT_NAMES[match[2]]}.{match[3]}"
            found[title] = replace(t, name=title)
        elif name in tops:
            found[tops[name]] = replace(t, name=tops[name])
        elif match is not None and match[2] in inner:
            title = ".".join(p for p in ("blk", match[1], inner[match[2]], match[3]) if p)
            found[title] = replace(t, name=title)
        elif match is not None and match[2] in _STACKED:
            found |= halves(f"blk.{match[1]}.ffn", _STACKED[match[2]], t)
        elif match is not None and (expert := _EXPERT.fullmatch(match[2])) and expert[2] in _PARTS:
            title = f"blk.{match[1]}.ffn_{_PARTS[expert[2]]}_exps.{match[3]}"
            stacks.setdefault(title, {})[int(expert[1])] = t
        elif not _USELESS.fullmatch(name):
            raise ModelError(f"{config.architecture}: unknown tensor {given!r} in the checkpoint")
    for title, each in stacks.items():
        found[title] = _stack(title, each, config.num_experts)
    return found


def _in_line(name: str, layers: int) -> str:
    """Layers that only draft under the numbers behind the others, where they stand apart."""
    match = _NEXT.fullmatch(name)
    if match is None or (match[1] is None and match[3] not in _NEXT_TOP):
        return name
    if match[1] is None:
        return f"model.layers.{layers}.{_NEXT_TOP[match[3]]}.weight"
    return f"model.layers.{layers + int(match[1])}.{match[2]}"


def _stack(title: str, parts: Mapping[int, RawTensor], count: int) -> RawTensor:
    """Experts as one tensor [X, n, k]; all must be present and alike."""
    if sorted(parts) != list(range(count)):
        raise ModelError(f"{title}: experts {sorted(parts)} of {count}")
    first = parts[0]
    if any((p.shape, p.dtype) != (first.shape, first.dtype) for p in parts.values()):
        raise ModelError(f"{title}: the experts differ in shape or dtype")
    return stack(title, [parts[i] for i in range(count)])
