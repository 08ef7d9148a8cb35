"""FP8 with a scale for each tile of 128 x 128, row or tensor: `quant_method` fp8 and fbgemm_fp8.

Legend: [.., n, k] the weight, tiles of r x c of it.

As Qwen3's, DeepSeek-V3's and MiniMax-M2's releases in FP8, those that AutoFP8 made, and Meta's of
Llama 3.1 405B. A value is `weight * weight_scale_inv` in spite of that name. Source: transformers
`finegrained_fp8`, `fbgemm_fp8`; DeepSeek-V3's `inference/kernel.py`, weight_dequant.
"""

from collections.abc import Mapping
from math import ceil

from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.weight import Family, Told, fp8_codes, numbers, part, scaled, shaped

PLAIN, INVERSE, SCALE = ".weight", "_scale_inv", "_scale"
ENDS = (PLAIN + INVERSE, PLAIN + SCALE, PLAIN, INVERSE)  # the last one of experts in one tensor
UNUSED = (
    ".input_scale_ub",
    *(f".{what}_scale" for what in ("activation", "input", "output", "k", "v", "kv")),
)


def fp8(told: Told) -> Family:
    """The family of a config. FormatError for tiles that are none."""
    by_rows, tile = told["quant_method"] == "fbgemm_fp8", told.get("weight_block_size")
    if tile is not None and not _is_tile(tile):
        raise FormatError(f"weight_block_size is {shown(tile)}: expected two counts")

    def weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
        own = "" if INVERSE in parts else PLAIN
        codes, table = fp8_codes(part(name, parts, own))
        if {own + SCALE, own + INVERSE} <= parts.keys():
            raise FormatError(f"{name + own!r}: two scales, {SCALE!r} and {INVERSE!r}")
        end = own + (SCALE if own + SCALE in parts else INVERSE)  # the former is AutoFP8's, too
        scale, (*lead, n, k) = part(name, parts, end), codes.shape
        whole, kinds, (rows, columns) = (1, 1), [(), (1,)], (n, k)
        if by_rows:
            whole, kinds, rows = (n, 1), [(*lead, n)], 1
        elif tile is not None:
            rows, columns = tile
            whole, kinds = (ceil(n / rows), ceil(k / columns)), []
        lone = shaped(scale, (*lead, *whole), *kinds).shape in ((), (1,))
        grid = numbers(scale).reshape(whole if lone else (*lead, *whole))
        return scaled(name + own, codes, table, grid, (rows, columns))

    return Family(ENDS, weight, UNUSED, PLAIN)


def _is_tile(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
    )  # fmt: skip
