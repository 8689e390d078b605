"""How llama.cpp cuts a text into words before bytes are merged: regular expressions by name.

The name is a file's ``tokenizer.ggml.pre``. Expressions are applied one after the other, each to
the pieces that those before it left.
"""

from __future__ import annotations

__all__ = ["BEGIN_BY_DEFAULT", "SPLITS", "WHOLE_WORDS"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen(letters: str) -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN2, _QWEN35 = _qwen(r"\p{L}"), _qwen(r"\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_REST}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}{_REST}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("refact", "smollm", "starcoder"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(
        ("dbrx", "falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "smaug-bpe"), (_LLAMA3,)
    ),
    **dict.fromkeys(("deepseek-r1-qwen", "qwen2"), (_QWEN2,)),
    "gpt-4o": (_GPT4O,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
#: A word that is a token is this token, whatever its merges make of it.
WHOLE_WORDS = ("falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken")
#: A text begins with the token of the begin, where the file does not say.
BEGIN_BY_DEFAULT = ("falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken")
