"""Unigram tokenizers (XLM-R's): of folders as released, and of the GGUF files made of them.

The vocabulary is of SentencePiece, with a map of letters of its own; transformers gave the ids.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_kit import GOLDEN, byte_tokenizer
from encoder_kit import said

from ggraph.errors import FormatError, FormatWarning
from ggraph.text.gguf_keys import gguf_keys
from ggraph.text.tokenizer import Tokenizer

FOLDER = GOLDEN / "encoders" / "xlm_roberta"
KEY = "tokenizer.ggml."
ROWS = 320  # of the model: more than there are tokens
TEXTS = (
    "The sea,\tby  night.\n", "  a b ", "Ａﬁ½… e\u0301 ｶﾞ\u200b\u3000x", "ﷺ🙂🙂 東京 q",
    "<s> </s><unk> <pad>",
    "a<mask> b <mask>c", "[PAD190] <0x41>", "▁the", "\u0130\u0085\u2028", "", " ",
)  # fmt: skip


def spoilt(out: Path, spoil: Callable[[Any], object]) -> Path:
    """The folder with its tokenizer.json changed."""
    shutil.copytree(FOLDER, out)
    parsed = json.loads((out / "tokenizer.json").read_text())
    spoil(parsed)
    (out / "tokenizer.json").write_text(json.dumps(parsed))
    return out


def released(parsed: Any, normalizers: list[Any], pre_tokenizer: Any) -> None:
    """How a converter of some year wrote the same tokenizer."""
    own = parsed["normalizer"]
    every = [own, *normalizers]
    parsed["normalizer"] = {"type": "Sequence", "normalizers": every} if normalizers else own
    parsed["pre_tokenizer"] = pre_tokenizer


META = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
SPLIT = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, META]}
RUNS = {"type": "Replace", "pattern": {"Regex": " {2,}"}}
STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}
FORMS = {
    "2020": ([], SPLIT),
    "2023": ([STRIP, {**RUNS, "content": "▁"}], {**META, "prepend_scheme": "always"}),
}
KEEPING = {"2021": ([{**RUNS, "content": " "}], META), "none": ([], META)}


def test_ids_are_those_of_transformers() -> None:
    """Of a folder and of a GGUF file's keys, markers among them."""
    texts = json.loads((FOLDER / "texts.json").read_text())
    for t in (Tokenizer.from_hf(FOLDER, ROWS), Tokenizer.from_gguf(gguf_keys(FOLDER, ROWS))):
        v = t.vocabulary
        assert (v.prefix, v.suffix, v.between) == ((0,), (2,), (2,))
        for text, ids in zip(texts, said("xlm_roberta")["ids"], strict=True):
            assert [*t.encode(text, special=True), *v.suffix] == ids[ids >= 0].tolist()
        assert t.decode(t.encode("The\u3000sea ﬁ")[1:]) == "The sea fi"


@pytest.mark.parametrize("form", FORMS)
def test_a_file_reads_as_the_folder_of_any_year(form: str, tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "hf", lambda t: released(t, *FORMS[form]))
    with warnings.catch_warnings(action="error"):
        keys = gguf_keys(folder, ROWS)
    own, again = Tokenizer.from_hf(folder, ROWS), Tokenizer.from_gguf(keys)
    for text in TEXTS:
        if form == "2023" and "\x85" in text:  # white space that SentencePiece knows nothing of
            continue
        for special in (False, True):
            assert again.encode(text, special=special) == own.encode(text, special=special), text


@pytest.mark.parametrize("form", KEEPING)
def test_a_folder_that_keeps_spaces_is_written_with_a_warning(form: str, tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "hf", lambda t: released(t, *KEEPING[form]))
    with pytest.warns(FormatWarning, match="spaces at the ends"):
        again = Tokenizer.from_gguf(gguf_keys(folder, ROWS))
    own = Tokenizer.from_hf(folder, ROWS)
    assert again.encode("the sea, by") == own.encode("the sea, by")
    assert len(own.encode("the ")) == len(again.encode("the ")) + 1


def test_nobody_types_a_marker() -> None:
    """Markers are among the tokens, the likeliest of all: of plain text they are letters."""
    for t in (Tokenizer.from_hf(FOLDER, ROWS), Tokenizer.from_gguf(gguf_keys(FOLDER, ROWS))):
        for marker, i in (("</s>", 2), ("<s>", 0), ("<mask>", 184)):
            plain = t.encode(f"a {marker}a")[1:]
            assert i not in plain and len(plain) > 4
            assert i in t.encode(f"a {marker}a", special=True)[1:]
        assert not set(t.encode("[PAD190]", special=True)) & set(range(185, ROWS))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda t: t["model"].update(byte_fallback=True), "has no form"),
        (lambda t: t.update(post_processor=None), r"Unigram between \(\) and \(\)"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "would become"),
        (lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}), "would become"),
        (lambda t: t["normalizer"].update(precompiled_charsmap="AAAA"), "tokenizer.json: "),
    ],
)
def test_what_gguf_cannot_say_is_refused(
    spoil: Callable[[Any], object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=text):
        gguf_keys(spoilt(tmp_path / "hf", spoil), ROWS)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("unknown_token_id", None, "unknown_token_id: Unigram needs"),
        ("scores", None, "scores: expected 320 numbers, got None"),
        ("scores", [0.5], "scores: 1 entries for 320 tokens"),
        ("remove_extra_whitespaces", None, "remove_extra_whitespaces: expected true"),
        ("add_space_prefix", False, "add_space_prefix: expected true"),
        ("precompiled_charsmap", "AAA", "precompiled_charsmap: expected bytes"),
        ("precompiled_charsmap", np.zeros(3, np.uint8), "precompiled_charsmap: "),
        ("seperator_token_id", "x", "seperator_token_id: expected a whole number"),
    ],
)
def test_damaged_keys_are_refused(key: str, value: Any, text: str) -> None:
    keys = {**gguf_keys(FOLDER, ROWS), f"{KEY}{key}": value}
    if value is None:
        del keys[f"{KEY}{key}"]
    if key == "unknown_token_id":  # which is found by its text, too
        keys[f"{KEY}tokens"] = [t.replace("<unk>", "<u>") for t in keys[f"{KEY}tokens"]]
    with pytest.raises(FormatError, match=text):
        Tokenizer.from_gguf(keys)


@pytest.mark.parametrize(
    ("single", "pair", "between"),
    [
        ("<s> $A </s>", "<s> $A </s> </s> $B </s>", (257,)),
        ("<s> $A </s>", "<s> $A </s> $B </s>", ()),
        ("<s> $A", "<s> $A <s> $B", ()),  # as of decoders
        ("$A", "$A $B", ()),
    ],
)
def test_what_stands_between_two_texts(
    single: str, pair: str, between: tuple[int, ...], tmp_path: Path
) -> None:
    byte_tokenizer(tmp_path, single, "</s>", pair)
    keys = gguf_keys(tmp_path, ROWS)
    for t in (Tokenizer.from_hf(tmp_path), Tokenizer.from_gguf(keys)):
        assert t.vocabulary.between == between
    assert (f"{KEY}add_sep_token" in keys) == bool(between)


def test_a_file_without_a_map_of_letters_reads_them_as_they_are(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "hf", lambda t: t.update(normalizer=None))
    keys = gguf_keys(folder, ROWS)
    assert f"{KEY}precompiled_charsmap" not in keys
    own, again = Tokenizer.from_hf(folder, ROWS), Tokenizer.from_gguf(keys)
    assert again.encode("Ａﬁ sea") == own.encode("Ａﬁ sea")


def test_a_text_ends_with_eos_unless_a_file_says_otherwise() -> None:
    keys = gguf_keys(FOLDER, ROWS)
    for name in ("add_eos_token", "add_bos_token", "add_sep_token"):
        del keys[f"{KEY}{name}"]
    v = Tokenizer.from_gguf(keys).vocabulary
    assert (v.prefix, v.suffix, v.between) == ((), (2,), (2,))
    v = Tokenizer.from_gguf({**keys, f"{KEY}add_sep_token": False}).vocabulary
    assert v.between == ()
