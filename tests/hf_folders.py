"""Hugging Face folders of 320 tokens for tests: the tiny llama with a tokenizer of its own."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from small_model import TINY
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

MARKERS = ["<|im_start|>", "<|im_end|>", "<|stop|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
SAID = (
    "the sea is a vast and mysterious realm that exists beneath the waves and the sand is 12345 "
    "the theory of the others lands in the same place as this\n\n    and then again "
) * 3


def byte_level(patterns: Sequence[str], ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE whose words are cut as Hugging Face files say it."""
    engine = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    engine.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310, special_tokens=MARKERS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    engine.train_from_iterator([SAID], trainer)
    return engine


def sentence_piece(drop: int = 0, lead: str = "▁") -> tokenizers.Tokenizer:
    """BPE over characters with bytes for the others, as Llama 2 has it, or without `lead`, which it
    puts before a text, as Gemma; `drop` leaves out the merges, whose tokens then stand there
    unmade."""
    trained = tokenizers.Tokenizer(models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=55, show_progress=False)
    trained.train_from_iterator([SAID.replace(" ", "▁").replace("\n", "")], trainer)
    table = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *(t for t, _ in table)]
    made = [m for m in json.loads(trained.to_str())["model"]["merges"] if not drop]
    ids = {t: i for i, t in enumerate(names)}
    engine = tokenizers.Tokenizer(
        models.BPE(ids, [tuple(m) for m in made], unk_token="<unk>", byte_fallback=True)
    )
    engine.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(lead)] if lead else []), normalizers.Replace(" ", "▁")]
    )
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         *([decoders.Strip(" ", 1, 0)] if lead else [])]
    )  # fmt: skip
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return engine


def hf_folder(folder: Path, engine: tokenizers.Tokenizer, **config: Any) -> Path:
    """The tiny llama's folder with that tokenizer, and `config` in tokenizer_config.json."""
    shutil.copytree(TINY / "llama_tied", folder)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chatting(folder: Path) -> Path:
    """A folder that answers in a chat."""
    engine = byte_level(["\\p{N}"])
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )  # fmt: skip
    engine.add_tokens(["<think>"])
    found = hf_folder(
        folder, engine, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return found
