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
# Han characters stand by themselves, and are letters of no other word.
_KIMI = r"\p{Han}+|" + (_CASED % (_CASELESS + "?", _CASELESS + "?")).replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
)
_KIMI += rf"|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_TAIL}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_TAIL}"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
# Digits from behind in threes; the first of them stay with what is before them.
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
# Words with single spaces between them are one.
_EXAONE = (
    rf"{_CASELESS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SYMBOLS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Letters with two cases, as the makers of DeepSeek LLM listed them: by code, since normalisation
# would change some.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 mellum a.x-4.0"
        " roberta-bpe modern-bert",
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
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _KANA_HAN, _DEEPSEEK3)),
    ),
    ("afmoe", PreTokenizer((_THREES, _ASIAN, _DEEPSEEK3))),
    ("exaone-moe", PreTokenizer((_EXAONE,))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
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
