"""Merging against the `tokenizers` engine, over random vocabularies and words."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from ggraph.errors import FormatError
from ggraph.formats.strings import Texts
from ggraph.text import bpe
from ggraph.text.bpe import BpeEncoder, Merges, Remembered
from ggraph.text.pre import PreTokenizer
from ggraph.text.spm import RankedEncoder, SpmEncoder
from ggraph.text.tokenizer import Tokenizer
from ggraph.text.vocab import byte_chars

LETTERS = "abcé "
WORDS = (r" ?\S+|\s+",)


ALPHABET = [byte_chars()[b] for b in LETTERS.encode()]


@st.composite
def vocabularies(
    draw: st.DrawFn, alphabet: Sequence[str] = ALPHABET
) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and ranked merges, each of which joins two tokens that are there."""
    tokens = list(dict.fromkeys(alphabet))
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(0, 14))):
        pair = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        merges.append(pair)
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
    return tokens, draw(st.permutations(merges))


def engine(tokens: list[str], merges: list[tuple[str, str]], whole: bool) -> Engine:
    """The library's encoder over the same tables."""
    made = Engine(
        models.BPE(
            {t: i for i, t in enumerate(tokens)}, list(dict.fromkeys(merges)), ignore_merges=whole
        )
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Split(Regex(WORDS[0]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    return made


@given(vocabularies(), st.lists(st.text(LETTERS, max_size=30), max_size=4), st.booleans())
def test_ids_are_those_of_the_library(
    vocabulary: tuple[list[str], list[tuple[str, str]]], texts: list[str], whole: bool
) -> None:
    tokens, merges = vocabulary
    listed = Texts(f"{a} {b}" for a, b in merges)
    ours = BpeEncoder(Texts(tokens), listed, PreTokenizer(WORDS, whole))
    theirs = engine(tokens, merges, whole)
    for text in [*texts, *texts]:  # the second time from the cache
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


FIRST = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
FIRST_TYPES = [3, 3, 3, 2] + [6] * 256


def gemma(tokens: list[str], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes Gemma 4's, with what early files say of bos."""
    every = [*FIRST, *tokens, "<|turn>", "<turn|>"]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": every,
        "tokenizer.ggml.scores": [-1000.0] * len(every),
        "tokenizer.ggml.token_type": [*FIRST_TYPES, *[1] * len(tokens), 3, 3],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": len(every) - 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }


def gemmas_engine(tokens: list[str], merges: list[tuple[str, str]]) -> Engine:
    """The library's encoder as Gemma 4's tokenizer.json configures it."""
    ids = {t: i for i, t in enumerate([*FIRST, *tokens])}
    made = Engine(
        models.BPE(
            ids, list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


@given(
    vocabularies([*"abc▁\n"]),
    st.lists(st.text("abc \né東", max_size=30), max_size=4),
)
def test_ranked_merges_over_characters_give_the_librarys_ids(
    vocabulary: tuple[list[str], list[tuple[str, str]]], texts: list[str]
) -> None:
    """Also where a token goes on behind a space or a line's end."""
    ours, theirs = Tokenizer.from_gguf(gemma(*vocabulary)), gemmas_engine(*vocabulary)
    for text in [*texts, *texts]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [2, *ids], text
        assert ours.decode(ids) == text
        assert ours.encode(f"<|turn>{text}<turn|>", special=True)[2:-1] == ids
    assert {ours.vocabulary.tokens[i] for i in ours.eos_ids} == {"<eos>", "<turn|>"}


def test_a_byte_that_is_no_token_keeps_its_neighbours_apart() -> None:
    encoder = BpeEncoder(Texts(["a", "b", "ab"]), Texts(["a b"]), PreTokenizer(WORDS))
    assert encoder.encode("ab") == [2]
    assert encoder.encode("axb") == [0, 1]
    assert encoder.encode("x") == []


@given(vocabularies([*"abé▁"]), st.lists(st.text("ab ", max_size=8), max_size=5))
def test_letters_that_are_lost_keep_their_neighbours_apart(
    vocabulary: tuple[list[str], list[tuple[str, str]]], parts: list[str]
) -> None:
    """Whether or not text can be cut at spaces."""
    tokens, merges = vocabulary
    encoder = RankedEncoder(Texts(tokens), Texts(f"{a} {b}" for a, b in merges))
    assert encoder.encode("x".join(parts)) == [i for p in parts for i in encoder.encode(p)]


def by_a_queue(worth: Callable[[str, str], Any], parts: list[str]) -> list[str]:
    """The parts that a word ends as, by a queue that holds each offer with all it is of: `worth` is
    the place of a pair among all, None where it does not merge."""
    before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
    queue: list[tuple[Any, int, str, str]] = []

    def offer(left: int) -> None:
        if left >= 0 and after[left] < len(parts):
            pair = parts[left], parts[after[left]]
            if (found := worth(*pair)) is not None:
                heappush(queue, (found, left, *pair))

    parts = list(parts)
    for place in range(len(parts)):
        offer(place)
    gone = set[int]()
    while queue:
        _, left, *pair = heappop(queue)
        right = after[left]
        if left in gone or right >= len(parts) or [parts[left], parts[right]] != pair:
            continue
        parts[left] += parts[right]
        gone.add(right)
        after[left] = after[right]
        if after[left] < len(parts):
            before[after[left]] = left
        offer(before[left])
        offer(left)
    return [p for i, p in enumerate(parts) if i not in gone]


PARTS = st.sampled_from(["ab", "a", "b", "aab", "ba" * 40, "é", "a" * 90])
LONG_WORDS = st.lists(PARTS, max_size=60).map("".join)
TEXTS = ["a", "b", "é", "aa", "ab", "ba", "aab", "aaaa", "abab", "baba", "abé", "éa", "babab"]


@given(st.permutations(TEXTS), st.data(), LONG_WORDS)
def test_long_words_end_as_a_queue_of_all_offers_has_them(
    tokens: list[str], data: st.DataObject, word: str
) -> None:
    """By ranks, in any order, and by scores, some of them equal."""
    cuts = [f"{t[:i]} {t[i:]}" for t in tokens for i in range(1, len(t))]
    known = [c for c in cuts if {*c.split()} <= {*tokens}]
    merges = data.draw(st.permutations(known))
    ranks = {tuple(m.split()): i for i, m in enumerate(merges)}
    wanted = by_a_queue(lambda *pair: ranks.get(pair), list(word))
    made = Merges(Texts(merges), Texts(tokens)).apply([tokens.index(c) for c in word])
    assert [tokens[i] for i in made] == wanted
    listed = [t for t in tokens if data.draw(st.booleans())]
    scores = data.draw(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.5]), min_size=len(listed),
                                max_size=len(listed)))  # fmt: skip
    best = dict(zip(listed, scores, strict=True))
    wanted = by_a_queue(
        lambda a, b: -best[a + b] if a + b in best else None, list(word)
    )  # fmt: skip
    encoder = SpmEncoder(Texts([*listed, "<unk>"]), [*scores, -9.0], len(listed))
    ids = [i for t in wanted for i in ([listed.index(t)] if t in best else encoder._ids_of(t))]
    assert encoder.encode(word) == ids


def test_a_long_word_takes_steps_in_proportion() -> None:
    """200,000 letters without a cut: no merge goes through the word, and a pair of neighbours is
    looked up once, however often it comes."""
    asked = list[tuple[int, int]]()

    class Counted(Merges):
        def find(self, left: int, right: int) -> tuple[int, int] | None:
            asked.append((left, right))
            return super().find(left, right)

    merges = Counted(Texts(["a a", "aa aa"]), Texts(["a", "aa", "aaaa"]))
    assert merges.apply([0] * 200_000) == [2] * 50_000
    assert sorted(set(asked)) == sorted(asked)
    assert len(asked) <= 9


def plain_merges(tokens: list[str], merges: list[str], word: str) -> list[str] | None:
    """By the definition: look for the best pair of neighbours, merge it, look again. None where a
    merge has one part, or two tokens that together are none."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        cut = merge.find(" ", 1)
        if cut < 0:
            return None
        ranks.setdefault((merge[:cut], merge[cut + 1 :]), rank)
    if any({*pair} <= {*tokens} and "".join(pair) not in tokens for pair in ranks):
        return None
    parts = list(word)
    while pairs := [(ranks[p], i) for i, p in enumerate(pairwise(parts)) if p in ranks]:
        i = min(pairs)[1]
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    return parts


PAIRS = ["a b", "a a", "b a", "a ab"]


@given(
    st.permutations(["", "a", "b", " ", "é", "aa", "ab", "ba", " a", "b ", "aab", "abé", "ab a"]),
    st.permutations(PAIRS)
    | st.lists(st.text("ab é", max_size=5) | st.sampled_from([*PAIRS, "ab é", "  a", "ab  a"])),
    st.text("ab", min_size=6, max_size=12) | st.text("ab é", max_size=12),
)
def test_merges_of_any_texts_are_as_defined_or_refused(
    tokens: list[str], merges: list[str], word: str
) -> None:
    """Also empty ones, parts that begin with a space, and pairs that stand twice."""
    wanted = plain_merges(tokens, merges, word)
    if wanted is None:
        with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges"):
            Merges(Texts(merges), Texts(tokens))
    else:
        symbols = [tokens.index(c) for c in word]
        made = Merges(Texts(merges), Texts(tokens)).apply(symbols)
        assert [tokens[i] for i in made] == wanted


@pytest.mark.parametrize(("merge", "text"), [("ab", "is not two parts"), ("a b", "is no token")])
def test_a_merge_that_makes_no_sense_is_refused(merge: str, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        BpeEncoder(Texts(["a", "b"]), Texts([merge]), PreTokenizer(WORDS))


def test_words_are_remembered_up_to_a_number_and_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "WORDS", 2)
    asked: list[str] = []

    def encode(word: str) -> list[int]:
        asked.append(word)
        return [len(word)]

    long = "x" * (bpe.LETTERS + 1)
    known, words = Remembered(encode), ("a", long, "bb", "ccc", "a", long, "bb", "ccc")
    assert [known[w] for w in words] == [[len(w)] for w in words]
    assert asked == ["a", long, "bb", "ccc", long, "ccc"] and set(known) == {"a", "bb"}
