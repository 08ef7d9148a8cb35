"""Embedding models of 320 tokens for tests, as their makers' folders are laid out."""

import json
import shutil
from pathlib import Path

from ruled_weights import write
from small_model import byte_alphabet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = ("<s>", "</s>", "<|im_end|>", "<|endoftext|>")
FAMILIES = {  # the golden folder; what its tokenizer puts around a text; its pooling; its eos
    "qwen3": ("tiny/qwen3_qknorm", "$A <|endoftext|>", "lasttoken", "<|im_end|>"),
    "gemma3": ("tiny2/gemma3_text", "<s> $A </s>", "mean", "</s>"),
    "llama": ("tiny/llama_tied", "<s> $A </s>", "cls_token", "</s>"),
}
TEXTS = ("", "a", "The sea, by night.", "東京 <|endoftext|>", "one two three " * 12)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def embedding_folder(name: str, out: Path) -> Path:
    """A folder of that family, with its tokenizer and sentence-transformers' files."""
    source, single, mode, eos = FAMILIES[name]
    shutil.copytree(GOLDEN / source, out)
    byte_tokenizer(out, single, eos)
    return pooled(out, {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False})


ENCODERS = (
    "bert", "gemma_embedding", "xlm_roberta", "modern_bert", "nomic_bert", "distil_bert", "mpnet"
)  # fmt: skip
RERANKERS = ("bert_score", "xlm_roberta_score")


def encoder_folder(name: str, out: Path) -> Path:
    """An encoder whose weights are a rule, with a tokenizer."""
    write(GOLDEN / "encoders" / name, out)
    if not (out / "tokenizer.json").exists():
        byte_tokenizer(out, "<s> $A </s>", "</s>")
    return out


def byte_tokenizer(out: Path, single: str, eos: str, pair: str = "$A $B") -> None:
    """A tokenizer of bytes for a model of 320 tokens, which puts that around a text, or two."""
    engine = Tokenizer(models.BPE({c: i for i, c in enumerate(byte_alphabet())}, []))
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    ids = [(t, engine.token_to_id(t)) for t in SPECIAL]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    engine.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    engine.save(str(out / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(told))


def pooled(folder: Path, config: object, *more: str) -> Path:
    """The folder with that pooling and further modules behind it."""
    kinds = ("Transformer", "Pooling", *more)
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{k}" if i else "",
         "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder
