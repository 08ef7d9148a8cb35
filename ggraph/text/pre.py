"""The pre-tokenisers of byte-level BPE vocabularies, by their GGUF name.

A pre-tokeniser cuts text into words before any merge, and merges never cross a cut. Each is a list
of patterns applied one after the other: every piece that a pattern matches, and every piece between
two matches, is cut again by the next. The names are the values of `tokenizer.ggml.pre`; the
patterns are those that the models' own tokenizer files publish. Not here: merging and byte fallback
(bpe.py), SentencePiece kinds, which have no pre-tokeniser (spm.py).
"""

from dataclasses import dataclass

from ggraph.errors import FormatError, shown


@dataclass(frozen=True)
class PreTokenizer:
    """How one family of models cuts text, and what else its name implies.

    `ignore_merges`: a word that is in the vocabulary is taken whole, whatever the merges say.
    `add_bos`: prompts start with the bos token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_KANA_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CASELESS}|{_LEAD}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_CASELESS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"{_LEAD}{_UPPER}*{_LOWER}+%s|{_LEAD}{_UPPER}+{_LOWER}*%s"
_GPT4O = (
    _CASED % (_CASELESS + "?", _CASELESS + "?") + rf"|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_TAIL}"
)
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_TAIL}"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 mellum a.x-4.0",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    (
        "seed-coder",
        PreTokenizer((rf"{_CASELESS}|{_LEAD}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_TAIL}",)),
    ),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _KANA_HAN, _DEEPSEEK3)),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: kind for names, kind in _KINDS for name in names.split()
}
"""Every known value of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokeniser called `name`.

    FormatError names the unknown value and all known ones: a guess would give ids that are nearly
    right, which is worse than none.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = " ".join(sorted(PRE_TOKENIZERS))
        raise FormatError(
            f"tokenizer.ggml.pre: unknown pre-tokeniser {shown(name)}; known: {known}"
        ) from None
