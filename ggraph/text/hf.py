"""Reads the tokenizer of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

Encoding is left to the `tokenizers` engine that the file configures; this file works out what the
engine does not tell: the bytes of each id, the roles, and which ids stand before and behind a text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, cast, get_args

from tokenizers import Tokenizer as Engine
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace

from ggraph.errors import FormatError
from ggraph.formats.strings import Pieces, Texts
from ggraph.text.unigram import hidden
from ggraph.text.vocab import (
    SPACE,
    NormalForm,
    SpacePrefix,
    Vocabulary,
    byte_level_pieces,
    byte_token_piece,
    end_ids,
    fim_ids,
    markers,
    spm_pieces,
    value_of,
)
from ggraph.text.wordpiece import bert_source, word_piece

_MAX_ID = 1 << 24  # far above any vocabulary: a larger id is a damaged file, not a big table


class HfEncoder:
    """Encodes with the engine of a tokenizer.json.

    Unlike the other encoders it cuts out special tokens by itself, since the file may tie them to
    its own normaliser; so it is asked for one or the other way of reading a text. A space that
    Metaspace puts before the first part of a text is left to who asks, for any part may be the
    whole text here.
    """

    def __init__(self, source: str) -> None:
        self._parsing = _engine(source)
        self._plain = _engine(source)
        self._plain.encode_special_tokens = True
        if isinstance(self._plain.model, Unigram):  # it has markers among its tokens
            own = json.loads(source)["model"]
            scored = hidden(own["vocab"], frozenset(i for i, s in self.added().items() if s))
            self._plain.model = Unigram(scored, own.get("unk_id"), bool(own.get("byte_fallback")))
        cut = self._plain.pre_tokenizer
        if isinstance(cut, Metaspace) and cut.prepend_scheme == "first":
            cut.prepend_scheme = "never"

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, all of them, with special tokens read as text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        """Ids of `text` with special tokens found in it."""
        return list(self._parsing.encode(text, add_special_tokens=False).ids)

    def told_apart(self, texts: Sequence[str], *, ignore_merges: bool) -> str | None:
        """The first of some texts that has other ids where `ignore_merges` of its BPE is this; None
        where all have the same. The engine reads them all at once."""
        model = self._plain.model
        meant, before = self._batch(texts), model.ignore_merges
        model.ignore_merges = ignore_merges
        try:
            found = self._batch(texts)
        finally:
            model.ignore_merges = before
        return next((t for t, a, b in zip(texts, meant, found, strict=True) if a != b), None)

    def _batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def words(self, text: str) -> list[str]:
        """How the file cuts `text` before any merge, in the letters that its tokens have."""
        cut = self._parsing.pre_tokenizer
        return [text] if cut is None else [w for w, _ in cut.pre_tokenize_str(text)]

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the file's post-processor puts before a text, and what behind."""
        found = self._parsing.encode("a", add_special_tokens=True)
        pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
        before = [i for i, _ in takewhile(lambda pair: pair[1], pairs)]
        behind = [i for i, _ in takewhile(lambda pair: pair[1], reversed(pairs[len(before) :]))]
        return tuple(before), tuple(reversed(behind))

    def between(self) -> tuple[int, ...]:
        """What it puts between two texts behind what stands behind one alone, if anything does:
        else each begins as if there were no other."""
        found = self._parsing.encode("a", "a", add_special_tokens=True)
        pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
        texts = [at for at, (_, own) in enumerate(pairs) if not own]
        inner = pairs[min(texts, default=0) : max(texts, default=0)]
        marks, behind = tuple(i for i, own in inner if own), self.around()[1]
        return marks[len(behind) :] if behind and marks[: len(behind)] == behind else ()

    def space_prefix(self) -> SpacePrefix:
        """Where it puts spaces before texts, of which it takes the first off again."""
        cut = self._parsing.pre_tokenizer
        if isinstance(cut, Metaspace) and cut.prepend_scheme in ("first", "always"):
            return cast(SpacePrefix, cut.prepend_scheme)
        return "every"

    def table(self) -> dict[int, str]:
        """Every id with its text, added tokens included."""
        return {i: t for t, i in self._parsing.get_vocab(with_added_tokens=True).items()}

    def added(self) -> dict[int, bool]:
        """Added ids, each with whether it is special (a marker) or ordinary text."""
        return {i: t.special for i, t in self._parsing.get_added_tokens_decoder().items()}

    def normalizer(self) -> NormalForm | None:
        """The normal form that text is brought to, where the file says no more than that."""
        name = type(self._parsing.normalizer).__name__
        return cast(NormalForm, name) if name in get_args(NormalForm) else None

    def strips(self) -> tuple[frozenset[int], frozenset[int]]:
        """Added ids that take the white space before them, and those that take what is behind."""
        added = self._parsing.get_added_tokens_decoder().items()
        left, right = ((i for i, t in added if t.lstrip), (i for i, t in added if t.rstrip))
        return frozenset(left), frozenset(right)


def load_hf(folder: str | Path, size: int = 0) -> tuple[HfEncoder, Vocabulary]:
    """The encoder and the vocabulary of `folder`, of at least `size` ids (a model may have more
    rows than its tokenizer has texts). FormatError when a file is missing or bad."""
    folder = Path(folder)
    config = _optional_object(folder / "tokenizer_config.json")
    source = _source(folder, config)
    parsed = _object(source, folder / "tokenizer.json")
    if _marked(parsed):
        source = json.dumps(parsed)
    encoder = HfEncoder(source)
    generation = _optional_object(folder / "generation_config.json")
    template = _template(folder, config)
    return encoder, _vocabulary(encoder, size, parsed, config, generation, template)


def tokenizer_file(folder: Path) -> Path | None:
    """What a folder tells of its tokens by, if anything: BERT's older ones have a list alone."""
    names = ("tokenizer.json", "vocab.txt")
    return next((folder / n for n in names if (folder / n).is_file()), None)


def parsed_tokenizer(folder: Path) -> dict[str, Any]:
    """A folder's tokenizer.json, or what stands for it. FormatError where there is none."""
    config = _optional_object(folder / "tokenizer_config.json")
    return _object(_source(folder, config), folder / "tokenizer.json")


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    path = tokenizer_file(folder) or folder / "tokenizer.json"
    return bert_source(_text(path), config) if path.suffix == ".txt" else _text(path)


def _marked(parsed: Mapping[str, Any]) -> bool:
    """Makes special what is a marker whatever a file says: Qwen and DeepSeek have tokens for
    filling in that anybody could type. Whether anything changed."""
    listed = parsed.get("added_tokens")
    added = [t for t in listed if isinstance(t, dict)] if isinstance(listed, list) else []
    texts = Texts(str(t.get("content")) for t in added)
    plain = [added[i] for i in markers(texts, end_ids(texts, ())) if not added[i].get("special")]
    for token in plain:
        token["special"] = True
    return bool(plain)


def _vocabulary(
    encoder: HfEncoder,
    size: int,
    parsed: Mapping[str, Any],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    template: str | None,
) -> Vocabulary:
    table, added = encoder.table(), encoder.added()
    if not table or max(table) > _MAX_ID:
        raise FormatError(
            f"tokenizer.json: {len(table)} tokens, greatest id {max(table, default=0)}"
        )
    tokens = Texts(table.get(i, "") for i in range(max(size, max(table) + 1)))
    read, stripped = _reader(parsed)
    pieces = read(Texts("" if i in added else t for i, t in enumerate(tokens)))
    space = SPACE if _writes_spaces(parsed) else " "
    for i in added:  # Gemma's runs of spaces are such, too
        pieces[i] = tokens[i].replace(space, " ").encode("utf-8", "replace")
    bos, eos, unk = (_role(config, tokens, r) for r in ("bos_token", "eos_token", "unk_token"))
    lstrip, rstrip = encoder.strips()
    before, behind = encoder.around()
    return Vocabulary(
        tokens=tokens,
        pieces=Pieces(pieces),
        control=frozenset(i for i, special in added.items() if special),
        user_defined=frozenset(i for i, special in added.items() if not special),
        eos_ids=end_ids(tokens, [eos, *_listed_ends(generation, len(tokens))]),
        bos_id=bos,
        eos_id=eos,
        unk_id=unk,
        prefix=_prefix(before, bos, value_of(config, "add_bos_token", bool)),
        suffix=_suffix(behind, eos, value_of(config, "add_eos_token", bool)),
        between=encoder.between(),
        space_prefix=encoder.space_prefix() if stripped else "never",
        chat_template=template,
        lstrip=lstrip,
        rstrip=rstrip,
        normalizer=encoder.normalizer(),
        fim=fim_ids(tokens),
    )


def _prefix(own: tuple[int, ...], bos: int | None, asked: bool | None) -> tuple[int, ...]:
    """What every prompt begins with: the config's word on bos goes before the post-processor's, as
    in transformers, which makes that anew."""
    if asked is None or bos is None or asked == (bos in own):
        return own
    return (bos, *own) if asked else tuple(i for i in own if i != bos)


def _suffix(own: tuple[int, ...], eos: int | None, asked: bool | None) -> tuple[int, ...]:
    """What stands behind a text that is complete: the same of eos, which does not follow another
    end."""
    if asked is False:
        return tuple(i for i in own if i != eos)
    return (eos,) if asked and not own and eos is not None else own


def _engine(source: str) -> Engine:
    """The engine, which gives all of a text and nothing else: files keep the cut and the padding
    of whoever trained with them."""
    try:
        engine = Engine.from_str(source)
        engine.no_truncation()
        engine.no_padding()
        return engine
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # bare Exception for most faults of the file; a panic is none even
        raise FormatError(f"tokenizer.json: {e}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(f"{path}: cannot be read: {e}") from None


def _object(source: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _optional_object(path: Path) -> dict[str, Any]:
    return _object(_text(path), path) if path.is_file() else {}


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file first, then that of a processor, which may know of images,
    then the config's (one, or the one named default)."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return _text(own)
    told = _optional_object(folder / "chat_template.json")
    value = told.get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = [v for v in value if isinstance(v, dict) and v.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else None


def _role(config: Mapping[str, Any], tokens: Texts, role: str) -> int | None:
    value = config.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return tokens.find(value) if isinstance(value, str) and value else None


def _listed_ends(generation: Mapping[str, Any], count: int) -> list[int]:
    value = generation.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and 0 <= i < count]


def _reader(parsed: Mapping[str, Any]) -> tuple[Callable[[Texts], list[bytes]], bool]:
    """What turns tokens' texts into their bytes, and whether a text's first space is not its own.
    FormatError for a decoder that is not known: its tokens have no bytes of their own."""
    parts = _decoder_parts(parsed.get("decoder"))
    kinds = {str(p.get("type")) for p in parts}
    if not kinds <= _DECODERS:
        raise FormatError(
            f"tokenizer.json: decoder {', '.join(sorted(kinds - _DECODERS))}; "
            f"known: {', '.join(sorted(_DECODERS))}"
        )
    if not kinds:  # the engine puts a space between any two tokens
        return lambda texts: [f" {t}".encode() for t in texts], True
    if "WordPiece" in kinds:
        return lambda texts: [word_piece(parts[0], t) for t in texts], True
    metaspace = "Metaspace" in kinds and not _never_prepends(parts)
    return partial(_pieces, kinds=frozenset(kinds)), "Strip" in kinds or metaspace


_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [p for p in parts or [] if isinstance(p, dict)]


def _writes_spaces(parsed: Mapping[str, Any]) -> bool:
    """Whether tokens have another letter for a space, be they added or not."""
    parts = _decoder_parts(parsed.get("decoder"))
    return any(p.get("type") in ("Metaspace", "Replace") for p in parts)


def _never_prepends(parts: list[dict[str, Any]]) -> bool:
    return any(p.get("prepend_scheme") == "never" for p in parts)


def _pieces(texts: Texts, kinds: frozenset[str]) -> list[bytes]:
    if "ByteLevel" in kinds:
        return byte_level_pieces(texts)
    spaced = kinds & {"Metaspace", "Replace"}
    found = spm_pieces(texts) if spaced else texts.encoded()
    for i, text in enumerate(texts if "ByteFallback" in kinds else ()):
        if len(text) == 6 and text.startswith("<0x"):
            found[i] = byte_token_piece(text)
    return found
