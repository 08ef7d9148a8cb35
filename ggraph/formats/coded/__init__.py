"""Folders whose weights are codes and scales: each weight as one tensor that a graph computes with.

`quantization_config` in config.json says by what method the codes were made. A family of methods is
a module here: a function from that config to a `Family`, which says under what endings the parts
of a weight are stored and makes one tensor of them (`weight`). What is coded is said by the parts
that stand there, not by the config's lists of modules: a weight without codes is read as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ggraph.dtype import FP8
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.bits_and_bytes import bits_and_bytes
from ggraph.formats.coded.compressed import compressed
from ggraph.formats.coded.fp4 import modelopt
from ggraph.formats.coded.fp8 import fp8
from ggraph.formats.coded.packed import awq, gptq
from ggraph.formats.coded.weight import Family, Told, unscaled

CODES = "quantization_config"  # the key of config.json
AS_STORED = ("mxfp4",)  # gpt-oss's release: blocks of our type, which its family puts together
FAMILIES: dict[str, Callable[[Told], Family]] = {
    "fp8": fp8, "fbgemm_fp8": fp8, "compressed-tensors": compressed, "awq": awq, "gptq": gptq,
    "bitsandbytes": bits_and_bytes, "modelopt": modelopt,
}  # fmt: skip


def decoded(
    config: Mapping[str, Any], tensors: Mapping[str, RawTensor], where: str
) -> dict[str, RawTensor]:
    """A folder's tensors with each coded weight as one. FormatError for methods and for parts that
    are not as expected, which it names."""
    told = codes_of(config)
    method = told.get("quant_method") if isinstance(told, Mapping) else told
    if method is None or (isinstance(method, str) and method in AS_STORED):
        return {name: unscaled(t) for name, t in tensors.items()}
    if not isinstance(told, Mapping) or not isinstance(method, str) or method not in FAMILIES:
        known = ", ".join((*AS_STORED, *FAMILIES))
        raise FormatError(
            f"{where}: weights quantised by {shown(method)} are not read; known: {known}. Take the "
            "folder of the unquantised model, or a GGUF file"
        )
    try:
        return _joined(FAMILIES[method](told), tensors)
    except FormatError as error:
        raise FormatError(f"{where}: {method}: {error}") from None


def codes_of(config: Mapping[str, Any]) -> object:
    """What config.json says of codes, of the model or of the text's part of it."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for key in (CODES, "compression_config"):
            if holder.get(key) is not None:
                return holder[key]
    return None


def _joined(family: Family, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Weights of their parts, in the order of the first of these."""
    groups: dict[str, dict[str, RawTensor]] = {}
    for name, t in tensors.items():
        if name.endswith(family.unused):
            continue
        end = next((e for e in family.ends if name.endswith(e)), "")
        groups.setdefault(name.removesuffix(end), {})[end] = t
    found: dict[str, RawTensor] = {}
    for name, parts in groups.items():
        coded = parts.keys() not in ({""}, {family.plain})
        for t in parts.values() if coded else ():
            if not t.data.size:  # whose other sides may be any number
                raise FormatError(f"{t.name!r}: {t.dtype}{list(t.shape)} holds no numbers")
        t = family.weight(name, parts) if coded else next(iter(parts.values()))
        if t.dtype in FP8 or (t.name.endswith(".weight") and not t.dtype.is_float):
            raise FormatError(f"{t.name!r}: codes of type {t.dtype} without a scale")
        if t.name in found:
            raise FormatError(f"{t.name!r} stands there twice, in codes and without")
        found[t.name] = t
    return found
