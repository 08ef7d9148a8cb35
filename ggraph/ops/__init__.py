"""The op set: one file per family, one record per op.

Importing this package fills the registry of `ggraph.tensor`. Every function here builds a tensor;
what an op means is its `reference`, kept beside it. `rules.py` says how optional sources are
marked. The promise of `inplace_ok` holds where the source has the result's shape, dtype and
strides. `evaluate.py` runs whole graphs in NumPy.
"""

from typing import TYPE_CHECKING

from ggraph.door import checked
from ggraph.errors import ShapeError
from ggraph.ops.activations import (
    mul_mat_gated_quantise,
    quantise,
    rms_norm_quantise,
    swiglu_quantise,
)
from ggraph.ops.attention import (
    diag_mask_inf,
    diag_mask_zero,
    flash_attn,
    soft_max,
)
from ggraph.ops.chain import (
    chain,
)
from ggraph.ops.conv import (
    conv_1d,
    conv_2d,
    conv_2d_dw,
    conv_transpose_2d,
    im2col,
    pool_1d,
    pool_2d,
)
from ggraph.ops.copies import (
    cast,
    cont,
    copy,
    cpy,
    dup,
)
from ggraph.ops.copies import (
    set_ as set,
)
from ggraph.ops.create import (
    arange,
    fill,
    tri,
)
from ggraph.ops.draw import (
    draw,
)
from ggraph.ops.elementwise import (
    add,
    clamp,
    div,
    equal,
    maximum,
    minimum,
    mul,
    pow,
    scale,
    sub,
    where,
)
from ggraph.ops.fused import (
    mul_mat_add,
    mul_mat_gated,
    mul_mats,
    rms_norm_mul,
    rope_set_rows,
)
from ggraph.ops.glu import (
    geglu,
    geglu_erf,
    geglu_quick,
    reglu,
    swiglu,
    swiglu_oai,
)
from ggraph.ops.images import upscale
from ggraph.ops.join import (
    concat,
    pad,
    repeat,
    roll,
)
from ggraph.ops.matmul import (
    mul_mat,
    mul_mat_id,
    out_prod,
)
from ggraph.ops.moe import (
    add_id,
    moe_mix,
    moe_route,
    moe_shares,
)
from ggraph.ops.norm import (
    group_norm,
    l2_norm,
    norm,
    rms_norm,
)
from ggraph.ops.recurrent import (
    delta_net,
    delta_net_next,
    ssm_conv,
    ssm_conv_next,
)
from ggraph.ops.reduce import (
    cumsum,
    mean,
    reduce,
    sum_rows,
)
from ggraph.ops.reduce import (
    sum_ as sum,
)
from ggraph.ops.rope import (
    rope,
)
from ggraph.ops.rows import (
    get_rows,
    set_rows,
)
from ggraph.ops.rules import WORDS
from ggraph.ops.scan import ssm_scan
from ggraph.ops.shape import (
    columns,
    narrow,
    permute,
    reshape,
    rows,
    transpose,
    view,
)
from ggraph.ops.shape import (
    slice_ as slice,
)
from ggraph.ops.solve import solve_tri
from ggraph.ops.sort import (
    argmax,
    argsort,
    top_k,
)
from ggraph.ops.unary import (
    abs,
    ceil,
    cos,
    elu,
    exp,
    expm1,
    floor,
    gelu,
    gelu_erf,
    gelu_quick,
    hardsigmoid,
    hardswish,
    log,
    neg,
    relu,
    round,
    sgn,
    sigmoid,
    silu,
    sin,
    softplus,
    sqr,
    sqrt,
    step,
    tanh,
    trunc,
)

__all__ = [
    "abs",
    "add",
    "add_id",
    "arange",
    "argmax",
    "argsort",
    "cast",
    "ceil",
    "chain",
    "clamp",
    "columns",
    "concat",
    "cont",
    "conv_1d",
    "conv_2d",
    "conv_2d_dw",
    "conv_transpose_2d",
    "copy",
    "cos",
    "cpy",
    "cumsum",
    "delta_net",
    "delta_net_next",
    "diag_mask_inf",
    "diag_mask_zero",
    "div",
    "draw",
    "dup",
    "elu",
    "equal",
    "exp",
    "expm1",
    "fill",
    "flash_attn",
    "floor",
    "geglu",
    "geglu_erf",
    "geglu_quick",
    "gelu",
    "gelu_erf",
    "gelu_quick",
    "get_rows",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "im2col",
    "l2_norm",
    "log",
    "maximum",
    "mean",
    "minimum",
    "moe_mix",
    "moe_route",
    "moe_shares",
    "mul",
    "mul_mat",
    "mul_mat_add",
    "mul_mat_gated",
    "mul_mat_gated_quantise",
    "mul_mat_id",
    "mul_mats",
    "narrow",
    "neg",
    "norm",
    "out_prod",
    "pad",
    "permute",
    "pool_1d",
    "pool_2d",
    "pow",
    "quantise",
    "reduce",
    "reglu",
    "relu",
    "repeat",
    "reshape",
    "rms_norm",
    "rms_norm_mul",
    "rms_norm_quantise",
    "roll",
    "rope",
    "rope_set_rows",
    "round",
    "rows",
    "scale",
    "set",
    "set_rows",
    "sgn",
    "sigmoid",
    "silu",
    "sin",
    "slice",
    "soft_max",
    "softplus",
    "solve_tri",
    "sqr",
    "sqrt",
    "ssm_conv",
    "ssm_conv_next",
    "ssm_scan",
    "step",
    "sub",
    "sum",
    "sum_rows",
    "swiglu",
    "swiglu_oai",
    "swiglu_quantise",
    "tanh",
    "top_k",
    "transpose",
    "tri",
    "trunc",
    "upscale",
    "view",
    "where",
]

_PEERS = {
    "softmax": "ops.soft_max(x)",
    "matmul": "x @ y, or ops.mul_mat(w, x) for a stored w [outputs, inputs]",
    "linear": "ops.mul_mat(w, x)", "dot": "x @ y", "layer_norm": "ops.norm(x)",
    "power": "ops.pow", "negative": "ops.neg", "absolute": "ops.abs", "sign": "ops.sgn",
    "square": "ops.sqr", "subtract": "ops.sub", "multiply": "ops.mul", "divide": "ops.div",
    "clip": "ops.clamp", "concatenate": "ops.concat", "take": "ops.get_rows",
    "embedding": "ops.get_rows", "gather": "ops.get_rows", "full": "ops.fill", "max": "x.max()",
    "min": "x.min()", "prod": "no op multiplies along an axis", "stack": "ops.concat",
}  # fmt: skip
"""What NumPy or torch call it, and what to write."""
globals().pop("matmul")  # the module of that name, which cannot be called

if not TYPE_CHECKING:  # to which every name would be one

    def __getattr__(name: str) -> object:
        known = f": {_PEERS[name]}" if name in _PEERS else "; docs/library.md lists the ops"
        raise AttributeError(f"ggraph.ops has no {name!r}{known}")


for _name in __all__:
    globals()[_name] = checked(globals()[_name], ShapeError, WORDS)
