"""WordPiece, as BERT has it: a word is the longest token that it begins with, then such parts.

GGUF writes a word with the letter for a space before it, and a part that goes on with a word as it
is; BERT's vocabulary writes the former as they are, and ## before the latter.

Sources: Devlin et al. 2018 (arXiv 1810.04805); the `tokenizers` engine; llama.cpp's converter.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from ggraph.errors import FormatError, shown
from ggraph.formats.strings import Texts
from ggraph.text.vocab import SPACE, value_of

LOWERCASE, STRIP_ACCENTS = (
    f"tokenizer.ggml.normalizer.{n}" for n in ("lowercase", "strip_accents")
)
CLS, SEP = "tokenizer.ggml.cls_token_id", "tokenizer.ggml.seperator_token_id"  # GGUF's spelling
GOES_ON = "##"


class WordPieceEncoder:
    """Encodes plain text with the tokens of a GGUF file; a word of which some part is no token
    becomes `unknown`. FormatError where there is no such token."""

    def __init__(self, tokens: Texts, unknown: int | None, metadata: Mapping[str, Any]) -> None:
        if unknown is None:
            raise FormatError("tokenizer.ggml.unknown_token_id: WordPiece needs such a token")
        lower = value_of(metadata, LOWERCASE, bool, True)
        strip = value_of(metadata, STRIP_ACCENTS, bool, lower)
        written = [bert_form(t) for t in tokens]
        model = models.WordPiece(
            {t: i for i, t in enumerate(written)}, unk_token=written[unknown],
            max_input_chars_per_word=100,
        )  # fmt: skip
        self._engine = Engine(model)
        self._engine.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip)
        self._engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, all of them."""
        return list(self._engine.encode(text, add_special_tokens=False).ids)


def bert_source(vocabulary: str, config: Mapping[str, Any]) -> str:
    """The tokenizer.json that BERT's vocab.txt, a token a line, and tokenizer_config.json mean.
    FormatError where it lacks a token that BERT's has, or the config tells of another kind."""
    kind = value_of(config, "tokenizer_class", str, "BertTokenizer")
    if kind.removesuffix("Fast") != "BertTokenizer":
        raise FormatError(f"vocab.txt of {kind} without tokenizer.json; known: BertTokenizer")
    ids = {t: i for i, t in enumerate(vocabulary.removesuffix("\n").split("\n"))}
    missing = [t for t in _MARKERS if t not in ids]
    if missing:
        raise FormatError(f"vocab.txt: no {', '.join(missing)}")
    engine = Engine(models.WordPiece(ids, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(
        lowercase=value_of(config, "do_lower_case", bool, True),
        strip_accents=value_of(config, "strip_accents", bool),
        handle_chinese_chars=value_of(config, "tokenize_chinese_chars", bool, True),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    engine.decoder = decoders.WordPiece()
    engine.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _MARKERS])
    return engine.to_str()


_MARKERS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_form(token: str) -> str:
    """A token of a GGUF file as BERT's vocabulary has it."""
    if token.startswith(SPACE):
        return token.removeprefix(SPACE)
    return token if _is_marker(token) else GOES_ON + token


def gguf_form(token: str) -> str:
    """The other way."""
    if token.startswith(GOES_ON):
        return token.removeprefix(GOES_ON)
    return token if _is_marker(token) else SPACE + token


def _is_marker(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def normalizer_keys(normalizer: Any) -> dict[str, bool]:
    """The keys of a tokenizer.json's normaliser. FormatError where it is none of BERT's."""
    own = normalizer if isinstance(normalizer, dict) else {}
    whole = own.get("clean_text") is True and own.get("handle_chinese_chars") is True
    if own.get("type") != "BertNormalizer" or not whole:
        raise FormatError(f"tokenizer.json: normalizer {shown(normalizer)} of WordPiece; known: "
                          "BertNormalizer, with all it does")  # fmt: skip
    lower = bool(own.get("lowercase"))
    strips = own.get("strip_accents")
    return {LOWERCASE: lower, STRIP_ACCENTS: lower if strips is None else bool(strips)}


def word_piece(decoder: Mapping[str, Any], text: str) -> bytes:
    """A word with a space before it, or a part that goes on with the word before; punctuation
    moves to what it ends, where the file says so. Source: the `tokenizers` engine."""
    prefix = str(decoder.get("prefix", GOES_ON))
    shown = text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"
    for apart, together in _TIDY if decoder.get("cleanup", True) else ():
        shown = shown.replace(apart, together)
    return shown.encode("utf-8", "replace")


_TIDY = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" do not", " don't"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
