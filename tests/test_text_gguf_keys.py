"""A folder's tokenizer in GGUF: the same ids, the same ends, and a refusal where that is not so."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from cli_kit import ggraph, ggraph_here, refused
from hf_folders import MARKERS, SAID, byte_level, chatting, hf_folder, sentence_piece
from hypothesis import given
from hypothesis import strategies as st
from small_model import TINY

from ggraph.decode.sampler import SamplerConfig
from ggraph.errors import FormatError
from ggraph.formats import open_checkpoint
from ggraph.text.gguf_keys import gguf_keys, neighbours, pre_name
from ggraph.text.hf import HfEncoder
from ggraph.text.pre import PRE_TOKENIZERS
from ggraph.text.tokenizer import Tokenizer
from models.bench.peer import LogprobPeer
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.generation import Generation
from models.run.load import load

# As the models' own files write them, not as pre.py does.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
FOLDERS = {
    "gpt-2": ([], False),
    "smollm": ([r"\p{N}", GPT2], False),
    "llama-bpe": ([LLAMA3], True),
    "dbrx": ([LLAMA3], False),
    "qwen2": ([QWEN2], False),
    "seed-coder": ([QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")], False),
}
anything = st.text(st.characters(exclude_categories=["Cs", "Mn", "Mc", "Me"]), max_size=30)
texts = st.lists(anything | st.sampled_from([*MARKERS, SAID[:40]]), max_size=4).map("".join)


def both(folder: Path) -> tuple[Tokenizer, Tokenizer, dict[str, Any]]:
    keys = gguf_keys(folder, 320)
    return Tokenizer.from_hf(folder), Tokenizer.from_gguf(keys), keys


@pytest.mark.parametrize("name", FOLDERS)
def test_pre_tokenisers_are_known_by_what_they_do(name: str, tmp_path: Path) -> None:
    own, again, keys = both(hf_folder(tmp_path / "hf", byte_level(*FOLDERS[name])))
    assert keys["tokenizer.ggml.pre"] == name
    assert len(keys["tokenizer.ggml.tokens"]) == len(set(keys["tokenizer.ggml.tokens"])) == 320
    assert own.encode(SAID) == again.encode(SAID)
    assert len(own.encode(SAID)) < len(SAID) / 1.3, "merges take part"


def test_every_kind_is_told_from_every_other() -> None:
    alphabet = "abcd"
    found = "".join(neighbours(alphabet))
    assert len(found) == 64
    assert len({(found + found[:2])[i : i + 3] for i in range(64)}) == 64
    for kind in dict.fromkeys(PRE_TOKENIZERS.values()):
        if kind.patterns != PRE_TOKENIZERS["default"].patterns:  # no published folder cuts so
            engine = byte_level(kind.patterns, kind.ignore_merges)
            name = pre_name(Path("folder"), HfEncoder(engine.to_str()), kind.ignore_merges)
            assert PRE_TOKENIZERS[name] == kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(tmp_path_factory.mktemp("folder") / "hf")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf_folder(tmp_path_factory.mktemp("pieces") / "hf", sentence_piece(), **config)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = tmp_path_factory.mktemp("gemma") / "hf"
    return hf_folder(folder, sentence_piece(lead=""), **config)


@given(texts)
def test_ids_are_those_of_the_folder(folder: Path, text: str) -> None:
    own, again, _ = known(folder)
    assert again.encode(text) == own.encode(text)
    assert again.encode(text, special=True) == own.encode(text, special=True)


KNOWN: dict[Path, tuple[Tokenizer, Tokenizer, dict[str, Any]]] = {}


def known(folder: Path) -> tuple[Tokenizer, Tokenizer, dict[str, Any]]:
    return KNOWN.setdefault(folder, both(folder)) if folder not in KNOWN else KNOWN[folder]


@given(anything)
def test_scores_merge_as_ranks_do(pieces: Path, text: str) -> None:
    own, again, keys = known(pieces)
    assert keys["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in keys
    for given_text in (text, SAID[: len(text) * 3], "the " + text + " sea"):
        assert again.encode(given_text) == own.encode(given_text)


@given(anything)
def test_gemma_4_keeps_its_ranks(gemma: Path, text: str) -> None:
    """Where its texts begin as its files say: with bos, and no space before them."""
    if gemma not in KNOWN:
        keys = gguf_keys(gemma, 320, ranked=True)
        KNOWN[gemma] = Tokenizer.from_hf(gemma), Tokenizer.from_gguf(keys), keys
    own, again, keys = KNOWN[gemma]
    assert keys["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.scores" not in keys
    for given_text in (text, SAID[: len(text) * 3], " the " + text + " sea"):
        for special in (False, True):
            assert again.encode(given_text, special=special) == own.encode(
                given_text, special=special
            )


def test_other_models_than_gemma_4_have_scores(gemma: Path, pieces: Path, tmp_path: Path) -> None:
    for source in (gemma, pieces):
        assert gguf_keys(source, 320)["tokenizer.ggml.model"] == "llama"
    assert gguf_keys(pieces, 320, ranked=True)["tokenizer.ggml.model"] == "llama"
    made = tmp_path / "made.gguf"
    for name in ("gemma2", "gemma3_text", "gemma3n", "gemma4_text"):
        shutil.copytree(TINY.parent / "tiny2" / name, tmp_path / name)
        for part in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(gemma / part, tmp_path / name / part)
        assert ggraph_here("convert", tmp_path / name, "-o", made, "--type", "f32")[0] == 0
        found = open_checkpoint(made).metadata
        family = name.removesuffix("_text")
        assert found["general.architecture"] == family
        wanted = family if family == "gemma4" else "llama"
        assert found["tokenizer.ggml.model"] == wanted, name
        own = Tokenizer.from_hf(tmp_path / name, 320)
        assert Tokenizer.from_gguf(found).encode(SAID) == own.encode(SAID)


@pytest.mark.parametrize("ranked", [False, True])
def test_added_tokens_of_spaces_are_spaces(tmp_path: Path, ranked: bool) -> None:
    """Gemma's runs of spaces and of line ends are added tokens. Its engine shows them as spaces."""
    engine, text = sentence_piece(lead=""), "the  sea\n\n        and <b>the ▁▁ sand"
    runs = [t for t in engine.get_vocab() if len(t) > 1 and set(t) == {"▁"}]
    assert "▁▁" in runs
    added = (*runs, "\n\n", "<b>")
    engine.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    source = hf_folder(tmp_path / "hf", engine, **config)
    own, keys = Tokenizer.from_hf(source, 320), gguf_keys(source, 320, ranked=ranked)
    again, ids = Tokenizer.from_gguf(keys), own.encode(text, bos=False)
    shown = text.replace("▁", " ")
    assert own.decode(ids) == again.decode(ids) == engine.decode(ids, False) == shown
    assert again.encode(text, bos=False) == ids
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    found = {t: int(k) for t, k in zip(tokens, kinds, strict=True) if t in added}
    assert found == dict.fromkeys(runs, 1) | {"<b>": 4, "\n\n": 4}


def test_roles_go_along(folder: Path, pieces: Path) -> None:
    own, again, keys = known(folder)
    assert keys["tokenizer.ggml.bos_token_id"] == 0 and keys["tokenizer.ggml.eos_token_id"] == 1
    assert again.eos_ids == own.eos_ids == {1, 2}, "generation_config.json names a second end"
    kinds = list(keys["tokenizer.ggml.token_type"])
    think = keys["tokenizer.ggml.tokens"].index("<think>")
    assert kinds[:3] == [3, 3, 3] and kinds[think] == 4 and kinds[-1] == 5
    assert (
        again.chat_template == own.chat_template and keys["tokenizer.ggml.add_bos_token"] is False
    )
    own, again, keys = known(pieces)
    assert list(keys["tokenizer.ggml.token_type"][:5]) == [2, 3, 3, 6, 6]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert again.encode("the sea")[0] == keys["tokenizer.ggml.bos_token_id"] == 1


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    def says(name: str, engine: tokenizers.Tokenizer, size: int = 320) -> str:
        with pytest.raises(FormatError) as refusal:
            gguf_keys(hf_folder(tmp_path / name, engine), size)
        return str(refusal.value)

    assert "no pre-tokeniser" in says("words", byte_level([r"[aeiou]+"]))
    assert "type WordLevel" in says(
        "level", tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    )
    assert "rows" in says("large", byte_level([]), 300)
    assert "no form for its tokenizer" in says("unmade", sentence_piece(drop=1))
    lower = byte_level([])
    lower.normalizer = tokenizers.normalizers.Lowercase()
    assert "no form for its tokenizer" in says("lower", lower)


def test_a_folder_and_its_gguf_say_the_same(folder: Path, pieces: Path, tmp_path: Path) -> None:
    for source, chat in ((folder, True), (pieces, False)):
        made, again = tmp_path / "made.gguf", tmp_path / "again.gguf"
        assert ggraph_here("convert", source, "-o", made, "--type", "f32")[0] == 0
        assert ggraph_here("quantize", made, again, "--type", "f32")[0] == 0
        assert answer(made, chat) == answer(source, chat) == answer(again, chat)
        before, after = open_checkpoint(made).metadata, open_checkpoint(again).metadata
        assert before["general.name"] == after["general.name"] == source.name
        assert after["general.quantization_version"] == 2
        kept = {k for k in before if k.startswith(("tokenizer.", "general."))}
        assert kept == {k for k in after if k.startswith(("tokenizer.", "general."))}


def answer(model: Path, chat: bool) -> list[str]:
    with closing(load(model, exact=True, cache_type="f32", threads=1)) as m:
        ids = m.prompt_ids("the sea is 123", chat=chat)
        found = list(Generation(m, ids, SamplerConfig(temp=0), 100).run(None))
    assert found
    return found


def test_a_head_for_a_folder_carries_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    source = TINY / "eagle3_for_llama_tied"
    assert ggraph("convert", source, "--target", folder, "-o", head)[0] == 0
    found = open_checkpoint(head).metadata
    assert found["tokenizer.ggml.tokens"] == known(folder)[2]["tokenizer.ggml.tokens"]


def test_a_model_without_a_tokenizer_is_not_written(tmp_path: Path) -> None:
    for command in (
        ("convert", TINY / "llama_tied", "-o", tmp_path / "x.gguf"),
        ("quantize", TINY / "llama_tied", tmp_path / "x.gguf"),
        ("convert", TINY / "eagle3_for_llama_tied", "--target", TINY / "llama_tied", "-o",
         tmp_path / "x.gguf"),
    ):  # fmt: skip
        assert "has no tokenizer (tokenizer.json)" in refused(*command)
    assert not list(tmp_path.iterdir())


def test_llama_cpp_reads_the_same_ids(
    folder: Path, pieces: Path, gemma: Path, tmp_path: Path
) -> None:
    """The same greedy text from a text that it cuts itself and from the folder's ids."""
    pytest.importorskip("xllamacpp")
    ranked = shutil.copytree(TINY.parent / "tiny2" / "gemma4_text", tmp_path / "gemma4")
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(gemma / part, ranked / part)
    config = json.loads((ranked / "config.json").read_text())
    (ranked / "config.json").write_text(json.dumps({**config, "num_kv_shared_layers": 3}))
    for source, new in ((folder, 16), (pieces, 16), (ranked, 1)):  # more are bytes, and no text
        made, own = tmp_path / f"{source.parent.name}.gguf", Tokenizer.from_hf(source, 320)
        model_to_gguf(open_model(source), made, "f32")
        with closing(LogprobPeer(made, 1, 512)) as peer:  # the wheel, which cuts texts
            for text in ("the sea is 123", SAID[:200], "don't\n\n  I'LL é 東京"):
                theirs, ours = peer.ask(text, new), peer.ask(own.encode(text), new)
                assert theirs.prompt_tokens == ours.prompt_tokens == len(own.encode(text))
                assert theirs.text == ours.text


def test_llama_cpp_takes_the_white_space_behind_phi_3_s_markers(tmp_path: Path) -> None:
    """As the folder's own engine does; GGUF files say it by the model's name alone."""
    engine, config = sentence_piece(), {"bos_token": "<s>", "eos_token": "</s>"}
    ends = [tokenizers.AddedToken(t, rstrip=True, special=True) for t in ("<|user|>", "<|end|>")]
    engine.add_special_tokens([*ends, tokenizers.AddedToken("<|endoftext|>", special=True)])
    source = hf_folder(tmp_path / "Phi-3-tiny", engine, **config, unk_token="<unk>")
    made, own = tmp_path / "made.gguf", Tokenizer.from_hf(source, 320)
    model_to_gguf(open_model(source), made, "f32")
    again = Tokenizer.from_gguf(open_checkpoint(made).metadata)
    texts = ["<|user|>\nthe sea<|end|>\n<|user|>\n", "<|end|> \t\r\n  and<|endoftext|> the"]
    for text in texts:
        ids = own.encode(text, special=True)
        assert again.encode(text, special=True) == ids
        assert again.encode_sewn(text + "<#|end|>", "#") == own.encode_sewn(text + "<#|end|>", "#")
    pytest.importorskip("xllamacpp")
    with closing(LogprobPeer(made, 1, 512)) as peer:
        for text in texts:
            ids = own.encode(text, special=True)
            theirs, ours = peer.ask(text, 8), peer.ask(ids, 8)
            assert theirs.prompt_tokens == ours.prompt_tokens == len(ids)
            assert theirs.text == ours.text
