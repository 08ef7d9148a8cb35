"""Tokenizers as released folders have them: the ids of the `tokenizers` engine, from the folder and
from the GGUF keys that are made of it."""

import json
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ggraph
from hf_folders import SAID, TEMPLATE, byte_level, hf_folder, sentence_piece
from hypothesis import given
from hypothesis import strategies as st
from test_text_gguf_keys import LLAMA3, QWEN2
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from ggraph.errors import FormatError, FormatWarning
from ggraph.formats import open_checkpoint
from ggraph.text.gguf_keys import gguf_keys
from ggraph.text.tokenizer import Tokenizer as Ours
from models.bench.peer import LogprobPeer
from models.registry import open_model
from models.run.convert import model_to_gguf

SIZE = 320
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s"
    r"\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text: str, **asked: Any) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **asked)


def metaspace(scheme: str) -> Tokenizer:
    """As Mistral's v0.3 ("first") or early v0.1 ("always") are read by newer converters."""
    engine = sentence_piece(lead="" if scheme == "never" else "▁")
    engine.normalizer = None
    engine.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, False)
    engine.add_special_tokens([special("[INST]"), special("[/INST]")])
    engine.add_tokens([AddedToken("<b>", normalized=False)])
    return engine


def stripping(*added: AddedToken) -> Tokenizer:
    engine = byte_level([LLAMA3])
    engine.add_special_tokens([special("[INST]"), *added])
    return engine


def beginning_with(engine: Tokenizer, *texts: str) -> Tokenizer:
    engine.add_special_tokens([special(t) for t in texts])
    ids = [(t, engine.token_to_id(t)) for t in texts]
    engine.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False),
         processors.TemplateProcessing(single=[*texts, "$A"], special_tokens=ids)]
    )  # fmt: skip
    return engine


def normalising(form: Any) -> Tokenizer:
    engine = byte_level([QWEN2])
    engine.normalizer = form
    engine.add_tokens(["<think>", "</think>"])
    return engine


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "first": (lambda: metaspace("first"), PIECES),
    "always": (lambda: metaspace("always"), PIECES),
    "never": (lambda: metaspace("never"), PIECES),
    "phi-4": (
        lambda: stripping(*(special(t, lstrip=True, rstrip=True) for t in ("<|a|>", "<|b|>"))),
        {},
    ),
    "phi-4-mini": (lambda: stripping(special("<|a|>", rstrip=True), special("<|b|>")), {}),
    "mask": (lambda: stripping(special("<mask>", lstrip=True)), {}),
    "glm-4": (lambda: beginning_with(byte_level([LLAMA3]), "[gMASK]", "<sop>"), {}),
    "qwen": (lambda: normalising(normalizers.NFC()), {}),
    "nfkc": (lambda: normalising(normalizers.NFKC()), {}),
}  # fmt: skip
WORDS = (
    "the sea", " ", "  ", "\n\n", "\u00a0", "\u3000", "▁", " the", "\t", "é", "e\u0301", "ﬁ",
    "각", "12345", "\u0301", "<s>", "\x1c",
)  # fmt: skip
MADE: dict[str, tuple[Tokenizer, Ours, Ours]] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def made(root: Path, name: str) -> tuple[Tokenizer, Ours, Ours]:
    """The engine, and ours by the folder and by the keys made of it."""
    if name not in MADE:
        make, config = KINDS[name]
        engine = make()
        folder = hf_folder(root / name, engine, **config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FormatWarning)
            again = Ours.from_gguf(gguf_keys(folder, SIZE))
        MADE[name] = engine, Ours.from_hf(folder, SIZE), again
    return MADE[name]


@given(st.data())
@pytest.mark.parametrize("name", KINDS)
def test_ids_and_texts_are_those_of_the_engine(root: Path, name: str, data: st.DataObject) -> None:
    engine, own, again = made(root, name)
    marks = [t.content for t in engine.get_added_tokens_decoder().values()]
    part = st.sampled_from([*WORDS, *marks]) | st.text("the sa12\n", max_size=5)
    text = "".join(data.draw(st.lists(part, max_size=8)))
    whole, inner = engine.encode(text).ids, engine.encode(text, add_special_tokens=False).ids
    engine.encode_special_tokens = True
    typed = engine.encode(text, add_special_tokens=False).ids
    engine.encode_special_tokens = False
    for t in (own, again):
        assert t.encode(text, special=True) == whole
        assert t.encode(text, special=True, bos=False) == inner
        assert t.encode(text, bos=False) == typed
        for skip in (False, True):
            assert t.decode(inner, special=not skip) == engine.decode(inner, skip)
    seam = "\U0010fffd"
    sewn = f"{text}{marks[0]} the sea{marks[-1][0]}{seam}{marks[-1][1:]} the{marks[0]} a"
    assert own.encode_sewn(sewn, seam) == again.encode_sewn(sewn, seam)


def test_what_only_ggraph_reads_is_said(root: Path) -> None:
    said = {
        "first": "'first'", "always": "'always'", "phi-4": "white space beside them: '<|a|>', '<|b",
        "phi-4-mini": "beside them: '<|a|>'", "mask": "'<mask>'", "glm-4": "begin with '[gMASK]<s",
        "qwen": "NFC", "nfkc": "NFKC",
    }  # fmt: skip
    for name in KINDS:
        made(root, name)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            gguf_keys(root / name, SIZE)
        assert [said.get(name, "") in str(w.message) for w in seen] == [True] * (name in said)


def test_convert_says_it_on_a_line_of_its_own(root: Path, tmp_path: Path) -> None:
    made(root, "glm-4")
    status, _, err = ggraph("convert", root / "glm-4", "-o", tmp_path / "m.gguf", "--type", "f32")
    lines = [line for line in err.splitlines() if "[gMASK]<sop>" in line]
    assert status == 0 and len(lines) == 1 and lines[0].startswith("ggraph: ")
    again = Ours.from_gguf(open_checkpoint(tmp_path / "m.gguf").metadata)
    assert again.decode(again.encode("the sea")) == "[gMASK]<sop>the sea"


def test_what_would_change_chats_is_refused(tmp_path: Path) -> None:
    """No key of ours for it: a chat's markers stand beside words, where it says that they do not
    count."""
    source = hf_folder(tmp_path / "hf", stripping(special("<b>", single_word=True)))
    with pytest.raises(FormatError, match="no form for its tokenizer: 'a<b>a"):
        gguf_keys(source, SIZE)


def test_every_prompt_begins_as_the_folder_says(root: Path, tmp_path: Path) -> None:
    _, own, again = made(root, "glm-4")
    begins = own.encode("")
    assert again.encode("") == begins == [own.id_of("[gMASK]"), own.id_of("<sop>")]
    assert own.encode("a", bos=True)[:2] == again.encode("a", bos=True)[:2] == begins
    assert own.encode("", bos=False) == again.encode("", bos=False) == []
    engine, several = byte_level([LLAMA3]), beginning_with(byte_level([LLAMA3]), "<s>", "<sop>")
    closing_too = byte_level([LLAMA3])
    closing_too.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    cases = (
        (engine, {"bos_token": "<|stop|>", "add_bos_token": True}, ["<|stop|>"]),
        (engine, {"bos_token": "<|stop|>"}, []),
        (several, {"bos_token": "<s>"}, ["<s>", "<sop>"]),
        (several, {"bos_token": "<s>", "add_bos_token": False}, ["<sop>"]),
        (closing_too, {"bos_token": "<|im_start|>"}, ["<|im_start|>"]),
    )
    for i, (made_of, config, texts) in enumerate(cases):
        folder = hf_folder(tmp_path / str(i), made_of, **config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FormatWarning)
            keys = gguf_keys(folder, SIZE)
        for t in (Ours.from_hf(folder), Ours.from_gguf(keys)):
            assert [t.vocabulary.tokens[i] for i in t.encode("")] == texts
        assert keys["tokenizer.ggml.add_bos_token"] is (texts[:1] == [config["bos_token"]])


FIM = {
    "qwen": "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|>",
    "starcoder": "<fim_prefix> <fim_suffix> <fim_middle> <fim_pad> <reponame>",
    "deepseek": "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
    "glm": "<|code_prefix|> <|code_suffix|> <|code_middle|>",
    "falcon": "<|prefix|> <|suffix|> <|middle|>",
    "seed": "<[fim-prefix]> <[fim-suffix]> <[fim-middle]>",
    "codestral": "[PREFIX] [SUFFIX] [MIDDLE]",
}
ROLES = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")


def as_of_old(keys: dict[str, Any]) -> dict[str, Any]:
    """With the names that GGUF had for the first three roles before."""
    old = dict(zip(ROLES, ("prefix", "suffix", "middle"), strict=False))
    named = {f"tokenizer.ggml.{r}_token_id": f"tokenizer.ggml.{o}_token_id" for r, o in old.items()}
    return {named.get(k, k): v for k, v in keys.items()}


@pytest.mark.parametrize("name", FIM)
def test_tokens_for_filling_in_are_markers_wherever_they_come_from(
    name: str, tmp_path: Path
) -> None:
    """Qwen and DeepSeek list theirs as ordinary text. Nobody can type one, and GGUF names them."""
    texts, engine = FIM[name].split(), byte_level([QWEN2])
    engine.add_tokens([AddedToken(t, normalized=False) for t in texts])
    folder = hf_folder(tmp_path / "hf", engine)
    keys = gguf_keys(folder, SIZE)
    ids = [engine.token_to_id(t) for t in texts]
    for role, i in zip(ROLES, ids, strict=False):
        assert keys[f"tokenizer.ggml.{role}_token_id"] == i
    renamed = [f"<{i}>" if t in texts else t for i, t in enumerate(keys["tokenizer.ggml.tokens"])]
    nameless = keys | {"tokenizer.ggml.tokens": renamed}
    by_id, by_old = Ours.from_gguf(nameless), Ours.from_gguf(as_of_old(nameless))
    for t in (Ours.from_hf(folder), Ours.from_gguf(keys), by_id, by_old):
        assert t.vocabulary.fim == dict(zip(ROLES, ids, strict=False))
        shown = [t.vocabulary.tokens[i] for i in ids]
        assert (
            t.special_ids >= set(ids) and t.eos_ids >= set(ids[3:]) and not t.eos_ids & {*ids[:3]}
        )
        assert t.encode("a".join(shown), special=True)[::2] == ids
        assert not {*t.encode(" ".join(shown))} & {*ids}
        assert t.decode(ids, special=False) == ""


def test_merges_may_count_where_the_name_says_otherwise(tmp_path: Path) -> None:
    """Mistral Nemo's file says nothing of it: the same ids, as long as merges make every word."""
    engine = byte_level([TEKKEN])
    keys = gguf_keys(hf_folder(tmp_path / "hf", engine), SIZE)
    assert keys["tokenizer.ggml.pre"] == "tekken"
    assert Ours.from_gguf(keys).encode(SAID, bos=False) == engine.encode(SAID).ids
    parsed = json.loads(engine.to_str())
    parsed["model"]["vocab"]["realm"] = len(parsed["model"]["vocab"])
    with pytest.raises(FormatError, match="'realm' is a token that no merges make"):
        gguf_keys(hf_folder(tmp_path / "more", Tokenizer.from_str(json.dumps(parsed))), SIZE)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_llama_cpp_agrees_on_chats(scheme: str, tmp_path: Path) -> None:
    """Where a marker begins the prompt and, for "always", where no text begins with a space."""
    pytest.importorskip("xllamacpp")
    engine = metaspace(scheme)
    source = hf_folder(tmp_path / "hf", engine, chat_template=TEMPLATE, **PIECES)
    out = tmp_path / "made.gguf"
    with pytest.warns(FormatWarning, match=f"Metaspace's '{scheme}'"):
        model_to_gguf(open_model(source), out, "f32")
    said = ["[INST]the sea[/INST]and", "[INST]\n é東京[/INST]the [INST]a"]
    with closing(LogprobPeer(out, 1, 512)) as peer:
        for text in [*said, *([t.replace("]", "] ") for t in said] if scheme == "first" else [])]:
            assert peer.ask(text, 1).prompt_tokens == len(engine.encode(text).ids)


def ending_as(engine: Tokenizer, single: str) -> Tokenizer:
    """An engine that puts tokens around a text as `single` has it."""
    texts = [t for t in single.split() if t != "$A"]
    engine.add_special_tokens([special(t) for t in texts if engine.token_to_id(t) is None])
    ids = [(t, engine.token_to_id(t)) for t in dict.fromkeys(texts)]
    engine.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return engine


ENDED = ("$A <|endoftext|>", "$A </s>", "<s> $A </s>", "<s> $A", "$A", "$A [SEP]", "$A [SEP] </s>")


@pytest.mark.parametrize("single", ENDED)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_complete_text_ends_as_the_engine_ends_it(single: str, kind: str, tmp_path: Path) -> None:
    """By the folder and by GGUF, whose eos llama.cpp puts there: but no prompt that is to go on,
    and no end of an answer is lost. What is no end has a key of ours, and a warning."""
    bare = byte_level([QWEN2]) if kind == "bytes" else sentence_piece(lead="")
    engine = ending_as(bare, single)
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>" if kind == "bytes" else "</s>"}
    folder = hf_folder(tmp_path / "hf", engine, **config)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FormatWarning)
        keys = gguf_keys(folder, SIZE)
    own, again = Ours.from_hf(folder), Ours.from_gguf(keys)
    whole = engine.encode("the sea", add_special_tokens=True).ids
    for t in (own, again):
        assert [*t.encode("the sea"), *t.vocabulary.suffix] == whole
        assert t.encode("the sea") == whole[: len(whole) - len(t.vocabulary.suffix)]
        assert len(t.vocabulary.suffix) == len(single.partition("$A")[2].split())
    assert own.eos_ids == again.eos_ids
    standard = single.endswith(("A </s>", "<|endoftext|>"))
    assert keys.get("tokenizer.ggml.add_eos_token", False) is standard
    assert not standard or keys["tokenizer.ggml.eos_token_id"] == whole[-1]
    assert any("texts to embed end with" in str(w.message) for w in heard) is ("[SEP]" in single)


def test_the_config_s_word_on_eos_counts(tmp_path: Path) -> None:
    """As that on bos: models whose own class puts eos behind a text leave it out of the file."""
    cases = (
        ("$A", True, ["</s>"]), ("$A", None, []), ("$A </s>", False, []),
        ("$A </s>", True, ["</s>"]), ("$A <|endoftext|>", True, ["<|endoftext|>"]),
        ("$A <|endoftext|>", False, ["<|endoftext|>"]),
    )  # fmt: skip
    for i, (single, asked, texts) in enumerate(cases):
        config = {"eos_token": "</s>", "add_eos_token": asked}
        engine = ending_as(sentence_piece(lead=""), single)
        folder = hf_folder(tmp_path / str(i), engine, **config)
        for t in (Ours.from_hf(folder), Ours.from_gguf(gguf_keys(folder, SIZE))):
            assert [t.vocabulary.tokens[i] for i in t.vocabulary.suffix] == texts


def test_a_file_s_cut_and_padding_do_not_count(tmp_path: Path) -> None:
    """They are of its training: a prompt is neither cut nor filled up, as by transformers."""
    engine = byte_level([QWEN2])
    meant = engine.encode("the sea and the sand").ids
    engine.enable_truncation(3)
    engine.enable_padding(length=16, pad_token="<|stop|>", pad_id=2)
    t = Ours.from_hf(hf_folder(tmp_path / "hf", engine))
    assert t.encode("the sea and the sand") == t.encode("the sea and the sand", special=True)
    assert t.encode("the sea and the sand") == meant and len(meant) > 3
    assert t.vocabulary.prefix == t.vocabulary.suffix == ()
