"""Encoders: vectors of texts and scores of pairs, from folders and GGUF files.

`golden/encoders` holds configs, tokenizers and what transformers 5.24 gave in float32 for weights
that are a rule (ruled_weights.py, scripts/golden_vectors.py).
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import ggraph_here, refused_here
from embedding_kit import ENCODERS, GOLDEN, RERANKERS, byte_tokenizer, encoder_folder
from encoder_kit import (
    ALL,
    KINDS,
    OWN,
    TO_LLAMA_CPP,
    TOLERANCE,
    apart,
    client,
    even,
    left_on_cuda,
    llama_cpp,
    opened,
    passages,
    said,
    spread_error,
    without_kernel,
)
from ruled_weights import bits, weight
from safetensors.numpy import load_file, save_file
from small_model import small_model
from tokenizers import Tokenizer as Engine

from ggraph.errors import FormatError, InputError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.serving.encoder import Encoding, Passage, Read
from ggraph.serving.text import Plain, Request
from ggraph.text.tokenizer import Tokenizer
from models.families import mpnet
from models.registry import Model, open_model
from models.run.convert import model_to_gguf
from models.run.load import OnlyReads, load, load_encoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, and GGUF files of them."""
    made = tmp_path_factory.mktemp("encoders")
    for name in ALL:
        encoder_folder(name, made / name)
        model_to_gguf(open_model(made / name), made / f"{name}.gguf", "f32")
    return made


def test_the_rule_makes_the_same_bits_everywhere() -> None:
    """Written down: by whatever version of whatever library, a golden model has these weights."""
    assert [hex(b) for b in bits("a", 2)] == ["0xf613dfa2b3c872df", "0x48a8ad4edda71d27"]
    assert weight("a.weight", (2, 3)).tobytes().hex() == "c2bea039c6bca2bd80a956be"
    assert weight("a.bias", (3,)).dtype == np.float16


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_transformers(name: str, suffix: str, root: Path) -> None:
    """By each pooling, through what is behind it; in steps of several texts, and of one, to the
    bit."""
    with opened(root / f"{name}{suffix}") as encoder:
        for kind, row in KINDS.items():
            texts, expected = passages(name, row), said(name)[kind]
            raw = encoder.vectors(texts)
            got = even(raw)
            assert spread_error(got, expected) < TOLERANCE, kind
            assert ((got * expected).sum(axis=1) > 1 - TOLERANCE).all()
            alone = [encoder.vectors([t])[0] for t in texts]
            assert np.array_equal(raw, alone), kind
            assert np.array_equal(encoder.vectors(texts[::-1])[::-1], alone), kind


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_transformers(name: str, suffix: str, root: Path) -> None:
    """Of pairs, whose second texts are told from the first by BERT alone."""
    expected = said(name)["scores"]
    with opened(root / f"{name}{suffix}") as encoder:
        pairs = passages(name, 0)
        got = np.concatenate(encoder.vectors(pairs))
        assert np.abs(got - expected).max() < TOLERANCE * np.ptp(expected)
        blurred = [Passage(p.tokens, 0) for p in pairs]
        told = np.abs(np.concatenate(encoder.vectors(blurred)) - expected).max() > 0.01
        assert told == (name == "bert_score")


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "bf16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_packed_weights_point_the_same_way(
    name: str, kind: str, root: Path, tmp_path: Path
) -> None:
    """With activations in 8 bits, too, where a row has the same bits alone."""
    path = tmp_path / "m.gguf"
    model_to_gguf(open_model(root / name), path, kind)
    texts, expected = passages(name, KINDS[OWN[name]]), said(name)[OWN[name]]
    with opened(path, 2, exact=False) as encoder:
        raw = encoder.vectors(texts)
        assert ((even(raw) * expected).sum(axis=1) > (0.96 if kind == "q4_k_m" else 0.998)).all()
        assert np.array_equal(raw, [encoder.vectors([t])[0] for t in texts])


@pytest.mark.parametrize("name", ALL)
def test_every_op_has_a_kernel(name: str, root: Path) -> None:
    """On the CPU, and in a plan for a GPU."""
    assert (without_kernel(root / name), left_on_cuda(root / name)) == ([], [])


LONG = "The ship, the sea and 9 stones. " * 8  # more tokens than are read


def cut_at(folder: Path, out: Path, longest: object) -> Path:
    """The folder, as sentence-transformers has it, with that `max_seq_length`."""
    shutil.copytree(folder, out)
    (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    return out


@pytest.mark.parametrize(
    ("name", "longest"), [(n, k) for n in ALL for k in ((2, 13) if n in ENCODERS else (12, 13))]
)
def test_longer_texts_are_cut_as_the_library_cuts_them(
    name: str, longest: int, root: Path, tmp_path: Path
) -> None:
    """Token ids are those of the engine that it has cut them; of a pair the longer text is cut
    first."""
    folder = cut_at(root / name, tmp_path / "hf", longest)
    engine = Engine.from_file(str(folder / "tokenizer.json"))
    engine.enable_truncation(longest, strategy="longest_first")
    engine.no_padding()
    texts = [LONG, LONG[:90], "a", LONG + "word" * 4000]
    with client(folder) as asked, opened(folder) as encoder:
        if name in ENCODERS:
            reply = asked.post("/v1/embeddings", json={"input": texts, "parse_special": True})
            found = np.array([d["embedding"] for d in reply.json()["data"]])
            read = [Passage(engine.encode(t).ids, KINDS[OWN[name]]) for t in texts]
            assert np.abs(found - even(encoder.vectors(read))).max() < 1e-6
            assert reply.json()["usage"]["prompt_tokens"] == sum(len(p.tokens) for p in read)
            return
        for query in ("a", "the night", LONG[:40], LONG):
            body = {"query": query, "documents": texts}
            reply = asked.post("/v1/rerank", json=body).json()
            encoded = [engine.encode(query, t) for t in texts]
            seconds = [e.sequence_ids.index(1) for e in encoded]
            assert reply["usage"]["prompt_tokens"] == sum(len(e.ids) for e in encoded)
            read = [Passage(e.ids, 0, e.type_ids.index(1) if 1 in e.type_ids else s)
                    for e, s in zip(encoded, seconds, strict=True)]  # fmt: skip
            wanted = 1 / (1 + np.exp(-np.concatenate(encoder.vectors(read))))
            got = {r["index"]: r["relevance_score"] for r in reply["results"]}
            assert np.abs(wanted - [got[i] for i in range(len(texts))]).max() < 1e-6, query


def test_what_the_files_do_not_cut_is_refused(root: Path, tmp_path: Path) -> None:
    """Token ids that were given, a longest text of more than the context, and a GGUF file's texts,
    which do not tell; so is a number that is none."""
    for path, text in (
        (cut_at(root / "bert", tmp_path / "a", 12), [5] * 129),
        (cut_at(root / "bert", tmp_path / "b", 129), "ship " * 140),
        (cut_at(root / "bert", tmp_path / "c", None), "ship " * 140),
        (root / "bert.gguf", "ship " * 140),
    ):
        with client(path) as asked:
            reply = asked.post("/v1/embeddings", json={"input": text})
            assert reply.json()["error"]["code"] == "context_length_exceeded", path
    for i, bad in enumerate((0, "x", True)):
        with client(cut_at(root / "bert", tmp_path / str(i), bad)) as asked:
            reply = asked.post("/v1/embeddings", json={"input": "a"})
            assert reply.status_code == 400
            assert f"max_seq_length = {bad!r}" in reply.json()["error"]["message"]


def test_a_step_takes_what_fits(root: Path) -> None:
    """And one that is longer than a step of several may be is read alone."""
    with opened(root / "gemma_embedding") as encoder:
        sizes = [30, 30, 10, 1, 1, 1, 1, 200]
        texts = [Passage([(7 * i + j) % 320 for j in range(n)]) for i, n in enumerate(sizes)]
        assert [encoder.fitting(texts[i:]) for i in (0, 2, 3, 6, 7)] == [2, 4, 4, 1, 1]
        assert [encoder.shape(n).rows for n in (1, 17, 500, 513, 1025)] == [
            16, 24, 512, 1024, 2048,
        ]  # fmt: skip
        together = encoder.vectors(texts)
        assert np.array_equal(together, [encoder.vectors([t])[0] for t in texts])
        for count in (0, 257):
            with pytest.raises(InputError, match=f"{count} tokens: expected 1 to 256"):
                encoder.vectors([Passage([1] * count)])
        batch = Encoding(encoder)
        with pytest.raises(InputError, match="to read"):
            batch.submit(Request([1], Plain(lambda _: 0)))
        kept = [batch.submit(Read(t.tokens, Plain(lambda _: 0))) for t in texts]
        batch.cancel(kept[1])
        ended = []
        while not batch.idle:
            ended += batch.step()
        assert ended == [kept[0], *kept[2:]] and kept[1].ended == "cancelled"
        assert np.array_equal([t.features[0] for t in ended], [together[0], *together[2:]])
        assert batch.counters.prompt_rows == sum(sizes) - 30


def test_windows_reach_to_both_sides(root: Path, tmp_path: Path) -> None:
    """As far as half of one: a token beyond touches no row that only sees windows."""
    folder = Path(shutil.copytree(root / "gemma_embedding", tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in held.items() if not n.startswith("layers.") or n.startswith("layers.0.")},
        folder / "model.safetensors",
    )
    with opened(folder) as encoder:
        first = [(5 * i) % 320 for i in range(40)]
        near, far = [*first], [*first]
        near[20 + 8], far[20 + 9] = 1, 1
        at, closer, beyond = encoder.vectors([Passage(t, 20) for t in (first, near, far)])
        assert np.array_equal(at, beyond) and not np.array_equal(at, closer)


@pytest.mark.parametrize("name", TO_LLAMA_CPP)
def test_llama_cpp_gives_the_same(name: str, root: Path) -> None:
    """Of the file that `convert` writes: tokens, pooling and what is behind it."""
    xllamacpp = pytest.importorskip("xllamacpp")
    error, theirs, ours = apart(xllamacpp, root / f"{name}.gguf", name)
    assert theirs == ours
    bar = 2e-3 * np.ptp(said(name)["scores"]) if name in RERANKERS else 1e-3
    assert error < bar  # its GELU is the tanh form


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("name", TO_LLAMA_CPP)
def test_llama_cpp_reads_packed_weights(name: str, kind: str, root: Path, tmp_path: Path) -> None:
    """Positions and kinds of parts are added, which llama.cpp does in float32 alone. It rounds rows
    to 8 bits, which is not done here."""
    xllamacpp = pytest.importorskip("xllamacpp")
    out = tmp_path / "packed.gguf"
    model_to_gguf(open_model(root / name), out, kind)
    error, theirs, ours = apart(xllamacpp, out, name)
    assert theirs == ours
    assert error < (0.2 * np.ptp(said(name)["scores"]) if name in RERANKERS else 0.05)


def test_word_piece_of_a_gguf_file_is_that_of_the_folder(root: Path) -> None:
    """Ids, and text of ids."""
    texts = json.loads((GOLDEN / "encoders/bert/texts.json").read_text())
    own = Tokenizer.from_hf(root / "bert")
    again = Tokenizer.from_gguf(open_checkpoint(root / "bert.gguf").metadata)
    for special in (False, True):
        for text in (*texts, "ABC  def\t\n[CLS]x", "zzz$%", "waves[SEP]night", " "):
            ids = own.encode(text, special=special)
            assert again.encode(text, special=special) == ids
            assert again.decode(ids[1:]).split() == own.decode(ids[1:]).split()
    assert (again.vocabulary.prefix, again.vocabulary.suffix) == ((2,), (3,))
    assert [t.encode("") for t in (own, again)] == [[2], [2]]


def roberta(root: Path, name: str, out: Path) -> Path:
    """XLM-R's weights as a RoBERTa, whose tokens are bytes."""
    folder = Path(shutil.copytree(root / name, out))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].removeprefix("XLM")]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "roberta"}))
    byte_tokenizer(folder, "<s> $A </s>", "</s>", "<s> $A </s> </s> $B </s>")
    return folder


def test_roberta_is_xlm_r_with_tokens_of_bytes(root: Path, tmp_path: Path) -> None:
    """Vectors, scores and what stands between two texts, from folders and GGUF files."""
    folder = roberta(root, "xlm_roberta", tmp_path / "hf")
    scores = roberta(root, "xlm_roberta_score", tmp_path / "scores")
    for source in (folder, scores):
        model_to_gguf(open_model(source), source.with_suffix(".gguf"), "f32")
        for path in (source, source.with_suffix(".gguf")):
            v = load_encoder(open_model(path)).tokenizer.vocabulary
            assert [v.tokens[i] for i in (*v.prefix, *v.suffix, *v.between)] == [
                "<s>", "</s>", "</s>",
            ]  # fmt: skip
    keys = open_checkpoint(folder.with_suffix(".gguf")).metadata
    assert (keys["general.architecture"], keys["bert.context_length"]) == ("bert", 128)
    for path in (folder, folder.with_suffix(".gguf")):
        with opened(path) as encoder:
            got = even(encoder.vectors(passages("xlm_roberta")))
            assert spread_error(got, said("xlm_roberta")["mean"]) < TOLERANCE
    for path in (scores, scores.with_suffix(".gguf")):
        with opened(path) as encoder:
            got = np.concatenate(encoder.vectors(passages("xlm_roberta_score", 0)))
            assert np.abs(got - said("xlm_roberta_score")["scores"]).max() < TOLERANCE


def test_llama_cpp_reads_roberta(root: Path, tmp_path: Path) -> None:
    """Its tokens of texts and of pairs, too."""
    xllamacpp = pytest.importorskip("xllamacpp")
    for name in ("xlm_roberta", "xlm_roberta_score"):
        folder = roberta(root, name, tmp_path / name)
        model_to_gguf(open_model(folder), folder.with_suffix(".gguf"), "f32")
    error, theirs, ours = apart(xllamacpp, tmp_path / "xlm_roberta.gguf", "xlm_roberta")
    assert theirs == ours and error < 1e-3
    given = {"query": "Where?", "documents": ["In the harbour.", "b"], "model": "m"}
    told = llama_cpp(xllamacpp, tmp_path / "xlm_roberta_score.gguf").handle_rerank(given)
    with client(tmp_path / "xlm_roberta_score.gguf") as asked:
        own = asked.post("/v1/rerank", json=given).json()
    assert own["usage"] == told["usage"]
    scores = {r["index"]: 1 / (1 + np.exp(-r["relevance_score"])) for r in told["results"]}
    for r in own["results"]:
        assert abs(r["relevance_score"] - scores[r["index"]]) < 2e-3


def test_a_folder_need_not_name_what_stands_around_a_text(root: Path, tmp_path: Path) -> None:
    """As ModernBERT's, whose tokenizer tells of [CLS] and [SEP] alone: GGUF's bos and eos."""
    folder = Path(shutil.copytree(root / "modern_bert", tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "<s>"}))
    with warnings.catch_warnings(action="error"):
        model_to_gguf(open_model(folder), tmp_path / "m.gguf", "f32")
    keys = open_checkpoint(tmp_path / "m.gguf").metadata
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.add_eos_token"]
    own, again = Tokenizer.from_hf(folder), Tokenizer.from_gguf(keys)
    for v in (own.vocabulary, again.vocabulary):
        assert (v.prefix, v.suffix) == ((256,), (257,))
    assert own.encode("a </s>") == again.encode("a </s>")


@pytest.mark.parametrize(
    ("name", "pre"), [("modern_bert", "modern-bert"), ("roberta", "roberta-bpe")]
)
def test_files_of_llama_cpp_s_converter_name_the_cut_otherwise(
    name: str, pre: str, root: Path, tmp_path: Path
) -> None:
    """As GPT-2's; llama.cpp reads such a file as it is read here."""
    folder = tmp_path / "hf"
    if name == "roberta":
        roberta(root, "xlm_roberta", folder)
    else:
        shutil.copytree(root / name, folder)
        (folder / "tokenizer_config.json").unlink()
    model_to_gguf(open_model(folder), tmp_path / "own.gguf", "f32")
    held = open_checkpoint(tmp_path / "own.gguf")
    named = {**held.metadata, "tokenizer.ggml.pre": pre}
    write_gguf(tmp_path / "m.gguf", named, held.tensors.values())
    own, again = (Tokenizer.from_gguf(m) for m in (held.metadata, named))
    text = "They'll see  1234 waves,\n\nby night"
    assert again.encode(text) == own.encode(text) and len(again.encode(text)) > 9
    xllamacpp = pytest.importorskip("xllamacpp")
    error, theirs, ours = apart(xllamacpp, tmp_path / "m.gguf", name)
    assert theirs == ours and error < 1e-3


def test_layers_without_windows_are_told_by_their_period_or_one_by_one(
    root: Path, tmp_path: Path
) -> None:
    """By the configs of either form, and by the keys of llama.cpp's files."""
    folder = Path(shutil.copytree(root / "modern_bert", tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    model = open_model(folder)
    for key in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        del config[key]
    config["layer_types"] = [
        f"{'sliding' if own else 'full'}_attention" for own in model.config.windowed_layers
    ]
    bases = {"full_attention": 160000.0, "sliding_attention": 10000.0}
    config["rope_parameters"] = {
        k: {"rope_type": "default", "rope_theta": v} for k, v in bases.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(folder).config == model.config
    held = open_checkpoint(root / "modern_bert.gguf")
    assert held.metadata["modern-bert.rope.freq_base_swa"] == 10000.0
    pattern = "modern-bert.attention.sliding_window_pattern"
    for told in ({pattern: 3}, {pattern: None}, {"modern-bert.rope.freq_base_swa": None}):
        keys = {k: v for k, v in {**held.metadata, **told}.items() if v is not None}
        write_gguf(tmp_path / "m.gguf", keys, held.tensors.values())
        again = open_model(tmp_path / "m.gguf").config
        assert again.windowed_layers == (False, True, True, False, True)
        assert again.window_rope == model.config.window_rope
    for wrong in ({"hidden_activation": "silu"}, {"norm_bias": True}):
        (folder / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ModelError, match=next(iter(wrong))):
            open_model(folder)


RELEASED = {
    "self_attn.q_proj": "attn.Wqkv", "self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}  # fmt: skip


def test_nomic_s_released_folders_have_names_of_their_own(root: Path, tmp_path: Path) -> None:
    """Of tensors, of which one holds three, and of keys; they tell of more positions than were
    trained. To the bit the same."""
    folder = Path(shutil.copytree(root / "nomic_bert", tmp_path / "hf"))
    held, found = load_file(folder / "model.safetensors"), {}
    for name, t in held.items():
        lead, part = re.fullmatch(r"(layers\.\d+\.)?(.+)\.\w+", name).groups()  # type: ignore[union-attr]
        if part in ("self_attn.k_proj", "self_attn.v_proj"):
            continue
        if part == "self_attn.q_proj":
            t = np.concatenate([held[name.replace("q_proj", f"{r}_proj")] for r in "qkv"])
        title = name.replace(part, RELEASED.get(part, part)) if lead else name
        title = title.replace("embeddings.LayerNorm", "emb_ln")
        found[f"encoder.{title}" if lead else title] = t
    save_file(found, folder / "model.safetensors")
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 64,
        "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 512, "max_trained_positions": 128,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "qkv_proj_bias": False,
        "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "causal": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "type_vocab_size": 2,
        "vocab_size": 250,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(folder).config == open_model(root / "nomic_bert").config
    texts = passages("nomic_bert")
    with opened(folder) as own, opened(root / "nomic_bert") as other:
        assert np.array_equal(own.vectors(texts), other.vectors(texts))
    for key, other_value in (("activation_function", "gelu"), ("rotary_emb_interleaved", True)):
        (folder / "config.json").write_text(json.dumps({**config, key: other_value}))
        with pytest.raises(ModelError, match=f"nomic-bert: config.json: {key} "):
            open_model(folder)


def test_distances_have_the_buckets_of_transformers() -> None:
    """Where each begins, as `MPNetEncoder.relative_position_bucket` of 5.24 gave; behind a row they
    are those before it, 16 higher."""
    begins = [*range(9), 12, 16, 23, 32, 46, 64, 91]
    wanted = np.searchsorted(begins, np.arange(600), "right") - 1
    assert np.array_equal(mpnet.bucket(-np.arange(600)), wanted)
    assert np.array_equal(mpnet.bucket(np.arange(1, 600)), 16 + wanted[1:])


def test_what_mpnet_adds_to_scores_is_stored_as_it_was(root: Path, tmp_path: Path) -> None:
    """But for the bucket that no distance is in; another number of them is refused."""
    table = load_file(root / "mpnet/model.safetensors")["encoder.relative_attention_bias.weight"]
    held = open_checkpoint(root / "mpnet.gguf").tensors[mpnet.TABLE].float32()
    used = np.delete(np.arange(mpnet.BUCKETS), 16)
    assert np.array_equal(held[used], table[used].astype(np.float32)) and not held[16].any()
    folder = Path(shutil.copytree(root / "mpnet", tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.relative_attention_bias.weight"] = table[:16].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"attn_rel_b.weight': expected \[32, 4\], got \[16, 4\]"):
        open_model(folder)


def test_positions_begin_behind_those_of_padding(root: Path, tmp_path: Path) -> None:
    """However many those are; a table that does not hold so many more is refused."""
    folder = Path(shutil.copytree(root / "xlm_roberta", tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    assert open_model(folder).context_length == 128
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 3}))
    texts = [p.tokens for p in passages("xlm_roberta")]
    with opened(folder) as encoder:
        assert encoder.context == 126
        got = even(encoder.vectors([Passage(t) for t in texts]))
        assert spread_error(got, said("xlm_roberta")["mean"]) > 0.01
    for told, text in ((140, "position_embd.weight"), (2, "belong to no text")):
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": told}))
        with pytest.raises(ModelError, match=text), opened(folder) as encoder:
            encoder.vectors([Passage([5])])


@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_a_folder_may_tell_of_what_it_was_trained_from(
    name: str, root: Path, tmp_path: Path
) -> None:
    """As all-distilroberta-v1 does; where there is such a head, it is another model."""
    folder = Path(shutil.copytree(root / name, tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    lead = config["architectures"][0].removesuffix("Model")
    config["architectures"] = [f"{lead}ForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with opened(folder) as encoder:
        got = even(encoder.vectors(passages(name)))
    assert spread_error(got, said(name)["mean"]) < TOLERANCE
    head = {"cls.predictions.bias": np.zeros(64, np.float16)}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"cls\.predictions\.bias"):
        open_model(folder)


def listed(root: Path, out: Path, **config: Any) -> Path:
    """The BERT's folder as older ones are: its tokens are a list, and nothing else."""
    folder = Path(shutil.copytree(root / "bert", out))
    parsed = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("".join(f"{t}\n" for t in parsed["model"]["vocab"]))
    return folder


def test_a_list_of_tokens_is_read_as_bert_s(root: Path, tmp_path: Path) -> None:
    """As of older rerankers: the same ids and text of ids, from the folder and of a GGUF file."""
    folder = listed(root, tmp_path / "hf", do_lower_case=True)
    texts = json.loads((GOLDEN / "encoders/bert/texts.json").read_text())
    model_to_gguf(open_model(folder), tmp_path / "m.gguf", "f32")
    meant = Tokenizer.from_hf(root / "bert")
    own = Tokenizer.from_hf(folder)
    for t in (own, Tokenizer.from_gguf(open_checkpoint(tmp_path / "m.gguf").metadata)):
        assert (t.vocabulary.prefix, t.vocabulary.suffix, t.vocabulary.between) == ((2,), (3,), ())
        for text in (*texts, "[CLS]x [MASK]", "the   sea\u2028waves"):
            for special in (False, True):
                assert t.encode(text, special=special) == meant.encode(text, special=special)
    assert own.decode(own.encode("the sea, by night")[1:]) == "the sea, by night"
    cased = Tokenizer.from_hf(listed(root, tmp_path / "cased", do_lower_case=False))
    assert cased.encode("The sea") != own.encode("The sea") == cased.encode("the sea")


def test_a_list_of_other_tokens_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"vocab\.txt of BertJapaneseTokenizer without"):
        Tokenizer.from_hf(listed(root, tmp_path / "ja", tokenizer_class="BertJapaneseTokenizer"))
    with pytest.raises(FormatError, match=r"do_lower_case: expected true or false"):
        Tokenizer.from_hf(listed(root, tmp_path / "odd", do_lower_case="yes"))
    folder = listed(root, tmp_path / "few")
    (folder / "vocab.txt").write_text("<s>\n[UNK]\n[PAD]\n[MASK]\n[CLS]\n")
    with pytest.raises(FormatError, match=r"vocab.txt: no \[SEP\]"):
        Tokenizer.from_hf(folder)
    (folder / "vocab.txt").unlink()
    told = refused_here("convert", folder, "--out", tmp_path / "m.gguf")
    assert "has no tokenizer" in told


CASED = {"lowercase": False, "strip_accents": None}


def test_a_cased_vocabulary_stays_cased(root: Path, tmp_path: Path) -> None:
    folder = spoilt_tokenizer(root, tmp_path / "hf", lambda t: t["normalizer"].update(CASED))
    model_to_gguf(open_model(folder), tmp_path / "m.gguf", "f32")
    keys = open_checkpoint(tmp_path / "m.gguf").metadata
    assert keys["tokenizer.ggml.normalizer.lowercase"] is False
    ids = Tokenizer.from_gguf(keys).encode("The é")
    assert ids == Tokenizer.from_hf(folder).encode("The é") and 1 in ids


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda t: t.update(normalizer={"type": "NFC"}), "known: BertNormalizer"),
        (lambda t: t["normalizer"].update(clean_text=False), "known: BertNormalizer"),
        (lambda t: t.update(post_processor=None), "texts between"),
        (lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}), "GGUF has no form"),
        (lambda t: t["model"].update(continuing_subword_prefix="@@"), "GGUF has no form"),
    ],
)
def test_what_gguf_cannot_say_of_word_piece_is_refused(
    spoil: Callable[[Any], None], text: str, root: Path, tmp_path: Path
) -> None:
    folder = spoilt_tokenizer(root, tmp_path / "hf", spoil)
    with pytest.raises(FormatError, match=text):
        model_to_gguf(open_model(folder), tmp_path / "m.gguf", "f32")


def spoilt_tokenizer(root: Path, folder: Path, spoil: Callable[[Any], None]) -> Path:
    shutil.copytree(root / "bert", folder)
    parsed = json.loads((folder / "tokenizer.json").read_text())
    spoil(parsed)
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    return folder


def test_older_files_name_the_tokens_around_a_text_otherwise(root: Path) -> None:
    """By roles of other kinds of vocabulary, or not at all."""
    keys = dict(open_checkpoint(root / "bert.gguf").metadata)
    for roles in (("cls", "seperator"), ("bos", "eos", "unknown")):
        for role in roles:
            del keys[f"tokenizer.ggml.{role}_token_id"]
        t = Tokenizer.from_gguf(keys)
        v = t.vocabulary
        assert (v.prefix, v.suffix, v.unk_id, t.encode("a \u0b95")) == ((2,), (3,), 1, [2, 5, 1])
    keys["tokenizer.ggml.tokens"] = [t.replace("[UNK]", "[X]") for t in v.tokens]
    with pytest.raises(FormatError, match="unknown_token_id"):
        Tokenizer.from_gguf(keys)


@pytest.mark.parametrize("name", ALL)
def test_whoever_goes_on_with_texts_refuses_an_encoder(name: str, root: Path) -> None:
    """By any command, in a sentence."""
    for path in (root / name, root / f"{name}.gguf"):
        with pytest.raises(OnlyReads, match=r"is an encoder .*and no text"):
            load(path)
    for command in ("generate", "chat"):
        told = refused_here(command, "-m", root / name, *["Hello"][: command == "generate"])
        assert "is an encoder" in told and "/v1/embeddings" in told


def test_what_an_encoder_has_no_use_for_is_refused(root: Path, tmp_path: Path) -> None:
    for option in ("--head", "--disk-cache", "--model-draft", "--mmproj"):
        told = refused_here("serve", "-m", root / "bert", option, tmp_path, "--port", "0")
        assert f"{option}: bert is an encoder" in told
    small = small_model(tmp_path / "small.gguf")
    told = refused_here("generate", "-m", small, "--model-draft", root / "bert", "Hello")
    assert "bert is an encoder" in told


def test_a_file_of_texts_is_embedded(root: Path, tmp_path: Path) -> None:
    """By the command that answers files of requests."""
    texts = json.loads((GOLDEN / "encoders/bert/texts.json").read_text())
    body = {"input": texts, "parse_special": True}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    text = {**asked, "custom_id": "b", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(asked) + "\n" + json.dumps(text) + "\n")
    options = ("-m", root / "bert", "--exact", "-t", "1")
    status, _, _ = ggraph_here("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    replies = {line["custom_id"]: line["response"] for line in lines}
    assert status == 0 and replies["b"]["status_code"] == 400
    found = np.array([d["embedding"] for d in replies["a"]["body"]["data"]])
    assert spread_error(found, said("bert")["cls"]) < TOLERANCE


def test_the_plan_of_an_encoder_is_proved(root: Path) -> None:
    sizes = ("-c", "128", "--rows", "40", "--context", "64")
    status, out, _ = ggraph_here("plan", root / "bert", *sizes, "--json")
    assert status == 0 and json.loads(out)


def test_a_decoder_is_no_encoder() -> None:
    with pytest.raises(InputError, match="is no encoder"):
        load_encoder(open_model(GOLDEN / "tiny/llama_tied"))


def test_files_that_say_otherwise_are_refused(root: Path, tmp_path: Path) -> None:
    held = open_checkpoint(root / "bert.gguf")
    told = {**held.metadata, "bert.attention.causal": True}
    write_gguf(tmp_path / "m.gguf", told, list(held.tensors.values()))
    with pytest.raises(ModelError, match="always see later ones"):
        open_model(tmp_path / "m.gguf")
    for name, changes, text in (
        ("bert", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("bert", {"is_decoder": True}, "is_decoder True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("gemma_embedding", {"use_bidirectional_attention": False}, "tie_word|lm_head|Dense|place"),
    ):
        folder = Path(shutil.copytree(root / name, tmp_path / "hf", dirs_exist_ok=True))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=text):
            model = open_model(folder)
            model_to_gguf(model, tmp_path / "x.gguf", "f32")
        shutil.rmtree(folder)


def test_a_classifier_of_several_classes_is_refused(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(root / "bert_score", tmp_path / "hf"))
    held = load_file(folder / "model.safetensors")
    save_file(
        {n: np.repeat(t, 3, 0) if n.startswith("classifier") else t for n, t in held.items()},
        folder / "model.safetensors",
    )
    with opened(folder) as encoder, pytest.raises(ModelError, match=r"cls\.output.*\[1, 64\]"):
        encoder.vectors([Passage([1])])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda c, t: c.update(activation_function="torch.nn.modules.activation.Tanh"), "'Tanh'"),
        (lambda c, t: c.pop("activation_function"), "'Tanh'"),
        (lambda c, t: t.update({"linear.bias": np.zeros(160, np.float16)}), r"linear\.bias"),
        (lambda c, t: t.clear(), "nothing"),
    ],
)
def test_a_module_that_is_more_than_a_product_is_refused(
    spoil: Callable[[Any, Any], None], text: str, root: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(root / "gemma_embedding", tmp_path / "hf"))
    config = json.loads((folder / "2_Dense/config.json").read_text())
    held = load_file(folder / "2_Dense/model.safetensors")
    spoil(config, held)
    (folder / "2_Dense/config.json").write_text(json.dumps(config))
    save_file(held, folder / "2_Dense/model.safetensors")
    with pytest.raises(ModelError, match=text):
        open_model(folder)


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_server_gives_vectors_and_nothing_else(name: str, suffix: str, root: Path) -> None:
    """By the pooling that the file says, or as asked for."""
    expected, ids = said(name), [p.tokens for p in passages(name)]
    model, width = open_model(root / f"{name}{suffix}"), expected["mean"].shape[1]
    with client(root / f"{name}{suffix}") as asked:
        for kind in (None, *KINDS):
            given = {"input": ids} | ({} if kind is None else {"pooling": kind})
            reply = asked.post("/v1/embeddings", json=given).json()
            found = np.array([d["embedding"] for d in reply["data"]])
            assert spread_error(found, expected[kind or OWN[name]]) < TOLERANCE, kind
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
        short = asked.post("/v1/embeddings", json={"input": ids, "dimensions": 8}).json()
        assert all(len(d["embedding"]) == 8 for d in short["data"])
        wide = {"input": "a", "dimensions": width + 1}
        assert asked.post("/v1/embeddings", json=wide).status_code == 400
        told = asked.get("/v1/models").json()["data"][0]["meta"]
        assert told == {
            "context_length": model.context_length, "vocab_size": model.vocab_size,
            "vector_width": width,
        }  # fmt: skip
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            refused = asked.post(path, json={"prompt": "a", "messages": []})
            assert refused.status_code == 400
            assert "is an encoder: it makes vectors" in refused.json()["error"]["message"]
        reply = asked.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert reply.status_code == 400 and "is no reranker" in reply.json()["error"]["message"]
        assert "/v1/embeddings" in asked.get("/").text
        assert asked.get("/health").json()["status"] == "ok"
        metrics = asked.get("/metrics").text
        assert "ggraph_prompt_rows_total" in metrics and "ggraph_slots" not in metrics
        long = asked.post("/v1/embeddings", json={"input": [[1] * (model.context_length + 1)]})
        assert long.json()["error"]["code"] == "context_length_exceeded"


def test_texts_of_a_folder_are_read_as_transformers_reads_them(root: Path) -> None:
    texts = json.loads((GOLDEN / "encoders/bert/texts.json").read_text())
    for path in (root / "bert", root / "bert.gguf"):
        with client(path) as asked:
            given = {"input": texts, "parse_special": True}
            reply = asked.post("/v1/embeddings", json=given).json()
            found = np.array([d["embedding"] for d in reply["data"]])
            assert spread_error(found, said("bert")["cls"]) < TOLERANCE
            assert reply["usage"]["prompt_tokens"] == (said("bert")["ids"] >= 0).sum()


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_judges(name: str, suffix: str, root: Path) -> None:
    """The best first, each as if it were asked alone; and makes no vectors."""
    pairs = json.loads((GOLDEN / "encoders" / name / "texts.json").read_text())
    expected = 1 / (1 + np.exp(-said(name)["scores"].astype(np.float64)))
    with client(root / f"{name}{suffix}") as asked:
        for (query, text), chance in zip(pairs, expected, strict=True):
            given = {"query": query, "documents": [text, {"text": "old"}, "b"], "model": "m"}
            reply = asked.post("/v1/rerank", json=given).json()
            scores = {r["index"]: r["relevance_score"] for r in reply["results"]}
            assert abs(scores[0] - chance) < TOLERANCE
            assert list(scores.values()) == sorted(scores.values(), reverse=True)
            alone = asked.post("/rerank", json={**given, "documents": [text]}).json()
            assert alone["results"] == [{"index": 0, "relevance_score": scores[0]}]
        few = {**given, "top_n": 1, "return_documents": True}
        best = asked.post("/v1/rerank", json=few).json()["results"]
        assert len(best) == 1 and set(best[0]) == {"index", "relevance_score", "document"}
        assert best[0]["document"]["text"] in (text, "old", "b")
        for wrong, said_of in (
            ({"query": "a", "documents": []}, "documents"),
            ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
            ({"query": "a", "documents": ["a " * 200]}, "exceeds the available context"),
            ({"documents": ["b"]}, "query"),
        ):
            refused = asked.post("/v1/rerank", json=wrong)
            assert refused.status_code == 400 and said_of in refused.text
        for pooling in ({}, {"pooling": "mean"}):
            refused = asked.post("/v1/embeddings", json={"input": "a", **pooling})
            assert refused.status_code == 400 and "is a reranker" in refused.text
        assert "vector_width" not in asked.get("/v1/models").text
        assert "it makes scores" in asked.post("/v1/completions", json={"prompt": "a"}).text
    metadata = open_checkpoint(root / f"{name}.gguf").metadata
    assert metadata["bert.pooling_type"] == 4


def test_a_decoder_s_server_judges_nothing(tmp_path: Path) -> None:
    with client(small_model(tmp_path / "small.gguf")) as asked:
        reply = asked.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert reply.status_code == 400 and "is no reranker" in reply.json()["error"]["message"]


def test_a_written_file_says_what_the_folder_says(root: Path, tmp_path: Path) -> None:
    """And so does one that is written of it."""
    model_to_gguf(open_model(root / "gemma_embedding.gguf"), tmp_path / "m.gguf", "q8_0")
    for path in (root / "gemma_embedding.gguf", tmp_path / "m.gguf"):
        keys = open_checkpoint(path).metadata
        lead = "gemma-embedding"
        assert keys["general.architecture"] == lead and keys[f"{lead}.pooling_type"] == 1
        sizes = [keys[f"{lead}.dense_{n}_feat_{e}"] for n in (2, 3) for e in ("in", "out")]
        assert sizes == [64, 160, 160, 64] and keys[f"{lead}.attention.causal"] is False
    keys = open_checkpoint(root / "bert.gguf").metadata
    assert keys["bert.pooling_type"] == 2 and keys["tokenizer.ggml.token_type_count"] == 2
    folder = Path(shutil.copytree(root / "bert", tmp_path / "hf"))
    (folder / "modules.json").unlink()  # libraries of embeddings take the mean then
    model: Model = open_model(folder)
    model_to_gguf(model, tmp_path / "mean.gguf", "f32")
    assert open_checkpoint(tmp_path / "mean.gguf").metadata["bert.pooling_type"] == 1
