"""FP8 with a scale for each tile of 128 x 128, row or tensor: `quant_method` fp8 and fbgemm_fp8.

Legend: [.., n, k] the weight, tiles of r x c of it.

As Qwen3's, DeepSeek-V3's and MiniMax-M2's releases in FP8, and Meta's of Llama 3.1 405B. A value is
`weight * weight_scale_inv` in spite of that name. Source: transformers `finegrained_fp8`,
`fbgemm_fp8`; DeepSeek-V3's `inference/kernel.py`, weight_dequant.
"""

from collections.abc import Mapping
from math import ceil

from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.weight import Family, Told, fp8_codes, numbers, part, scaled, shaped

INVERSE, ROWS = "_scale_inv", "_scale"


def fp8(told: Told) -> Family:
    """The family of a config. FormatError for tiles that are none."""
    if told["quant_method"] == "fbgemm_fp8":
        return Family((ROWS,), _by_rows, (".input_scale_ub",))
    tile = told.get("weight_block_size")
    if tile is not None and not _is_tile(tile):
        raise FormatError(f"weight_block_size is {shown(tile)}: expected two counts")

    def weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
        codes, table = fp8_codes(part(name, parts, ""))
        scale, (*lead, n, k) = part(name, parts, INVERSE), codes.shape
        if tile is None:
            shaped(scale, (), (1,), (*lead, 1, 1))
            return scaled(
                name, codes, table, numbers(scale).reshape(*scale.shape[:-2], 1, 1), (n, k)
            )
        shaped(scale, (*lead, ceil(n / tile[0]), ceil(k / tile[1])))
        return scaled(name, codes, table, numbers(scale), (tile[0], tile[1]))

    return Family((INVERSE,), weight, (".activation_scale", ".input_scale"))


def _is_tile(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
    )  # fmt: skip


def _by_rows(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    codes, table = fp8_codes(part(name, parts, ""))
    scale, (*lead, n, k) = part(name, parts, ROWS), codes.shape
    shaped(scale, (*lead, n, 1), (*lead, n))
    return scaled(name, codes, table, numbers(scale).reshape(*lead, n, 1), (1, k))
