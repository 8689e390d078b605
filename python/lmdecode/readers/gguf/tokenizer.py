"""The tokenizer inside a GGUF file, as one of transformers; its tokens are those of llama.cpp.

transformers' own converter knows fewer of llama.cpp's ways to cut a text into words, and silently
takes another for those that it does not know: this one refuses them.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmdecode.readers.gguf.metadata import Facts, end_tokens
from lmdecode.readers.gguf.reader import GgufFile, Strings, is_gguf
from lmdecode.readers.tokenizer_files import scored_merges

__all__ = [
    "SPLITS",
    "GgufTokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "tokenizer_files",
    "tokenizer_path",
]


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


_KINDS = ("gemma4", "gpt2", "llama")
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_SAVED = "tokenizer.gguf"
# Phi 3's special tokens, except these, absorb the spaces that follow.
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")


class _Vocabulary:
    """Vocabulary of a file, checked.

    ``kind`` is "gpt2" (byte-level BPE), "llama" (sentencepiece) or "gemma4" (its pieces, with
    merges).
    """

    def __init__(self, facts: Facts) -> None:
        self._file, self.puts_space = facts.file, not facts.is_ollamas  # where it does not say
        self.kind = self.entry("model", str, "")
        if self.kind not in _KINDS:
            raise self.error(f"has a tokenizer {self.kind!r}; expected one of {', '.join(_KINDS)}")
        self.tokens: list[str] = self._strings("tokens", True)
        self.merges: list[str] = self._strings("merges", self.kind != "llama")
        self.kinds: Sequence[int] = self._numbers("token_type", _NORMAL)
        self.scores: Sequence[float] = self._numbers("scores", 0.0)
        self.merged = dict[str, float]()  # scores of pieces that two others make
        self.has_ties = False

    def error(self, what: str) -> ValueError:
        return ValueError(f"load_tokenizer: {self._file.path} {what}")

    def entry(self, key: str, kind: type, default: Any) -> Any:
        """Return an entry of ``tokenizer.ggml``, of this type."""
        value = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise self.error(
                f"has a {type(value).__name__} for tokenizer.ggml.{key}; expected a {kind.__name__}"
            )
        return value

    def _strings(self, key: str, is_needed: bool) -> list[str]:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None and not is_needed:
            return []
        if not isinstance(value, Strings):
            raise self.error(f"has no list of strings for tokenizer.ggml.{key}; expected one")
        return list(value)

    def _numbers(self, key: str, default: float) -> Sequence[Any]:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return [default] * len(self.tokens)
        if not isinstance(value, array) or len(value) != len(self.tokens):
            raise self.error(
                f"has no list of {len(self.tokens)} numbers for tokenizer.ggml.{key}; expected one "
                "for each token"
            )
        return list(value)

    def ids(self) -> dict[str, int]:
        """Return the number of each token, of two the first."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            ids.setdefault(token, i)
        return ids

    def pairs(self) -> list[tuple[str, str]]:
        """Return the merges that the file has, first the one that goes first."""
        found = []
        for merge in self.merges:
            at = merge.find(" ", 1)
            if at < 0:
                raise self.error(f"has a merge {merge!r}; expected two tokens and a space between")
            found.append((merge[:at], merge[at + 1 :]))
        return found

    def scored_pairs(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """Return the merges by scores; note the scores of merged pieces, and whether some tie."""
        scores, words = dict[str, float](), set[str]()
        for token, kind, score in zip(self.tokens, self.kinds, self.scores, strict=True):
            if kind not in (_CONTROL, _BYTE, _UNKNOWN):
                scores.setdefault(token, score)
            if kind == _USER_DEFINED:  # which is a whole word before any merge
                words.add(token)
        merges = scored_merges(scores, ids)
        self.merged = {t: scores[t] for t in map("".join, merges) if t not in words}
        self.has_ties = len(set(self.merged.values())) < len(self.merged)
        return merges


class _LeftmostPieces:
    """Cuts a text into pieces some of which have the same score, called by the package tokenizers.

    Merges of that package have an order; here, of two pairs the one further left goes first.
    """

    def __init__(self, scores: dict[str, float]) -> None:
        self._scores = scores  # of the pieces that two others make
        self._ends = lru_cache(1 << 16)(self._find_ends)

    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda _, part: self._cut(part))

    def _cut(self, part: Any) -> list[Any]:
        ends = self._ends(str(part.normalized))
        return [part[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]

    def _find_ends(self, text: str) -> tuple[int, ...]:
        """Return where pieces end: the best score is merged first, of equal ones the leftmost."""
        ends, begins = list(range(1, len(text) + 1)), list(range(len(text)))  # by last letter
        heap: list[tuple[float, int, int, int]] = []

        def add(begin: int, middle: int) -> None:
            piece = text[begin : ends[middle]] if begin >= 0 and middle < len(text) else ""
            if piece in self._scores:
                heapq.heappush(heap, (-self._scores[piece], begin, middle, ends[middle]))

        for i in range(1, len(text)):
            add(i - 1, i)
        while heap:
            _, begin, middle, end = heapq.heappop(heap)
            if ends[begin] == middle and ends[middle] == end:  # else one is merged with another
                ends[begin], ends[middle], begins[end - 1] = end, 0, begin
                add(begins[begin - 1] if begin else -1, begin)
                add(begin, end)
        found = [0]
        while found[-1] < len(text):
            found.append(ends[found[-1]])
        return tuple(found[1:])


def _bytes_tokenizer(vocabulary: _Vocabulary) -> Any:
    """Return a byte-level tokenizer, which splits words by the rules of ``pre``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = vocabulary.entry("pre", str, "default")
    if pre not in SPLITS:
        raise vocabulary.error(
            f"cuts words as {pre!r} (tokenizer.ggml.pre); expected one of {', '.join(SPLITS)}"
        )
    model = models.BPE(
        vocab=vocabulary.ids(), merges=vocabulary.pairs(), ignore_merges=pre in WHOLE_WORDS
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(vocabulary: _Vocabulary) -> Any:
    """Return a tokenizer of sentencepiece's kind; by default a space is put before a text.

    Not so with Gemma 4's: it takes newlines apart from what is around them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = vocabulary.ids()
    unknown = vocabulary.entry("unknown_token_id", int, 0)
    if not 0 <= unknown < len(vocabulary.tokens):
        raise vocabulary.error(
            f"has {unknown} for tokenizer.ggml.unknown_token_id; expected a token below "
            f"{len(vocabulary.tokens)}"
        )
    is_llama = vocabulary.kind == "llama"
    merges = vocabulary.scored_pairs(ids) if is_llama else vocabulary.pairs()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[] if vocabulary.has_ties else merges,
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=vocabulary.has_ties,
        )
    )
    has_prefix = is_llama and vocabulary.entry("add_space_prefix", bool, vocabulary.puts_space)
    if not is_llama:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    if vocabulary.has_ties:
        cuts = [pre_tokenizers.PreTokenizer.custom(_LeftmostPieces(vocabulary.merged))]
        if not any(_SPACE in token.lstrip(_SPACE) for token in vocabulary.merged):
            words = Regex(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+")
            cuts.insert(0, pre_tokenizers.Split(words, behavior="isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return tokenizer


def _add_tokens(tokenizer: Any, vocabulary: _Vocabulary, takes_spaces: bool) -> None:
    """Make those whole words that are in no case cut: control tokens, and the user's."""
    from tokenizers import AddedToken

    special, others = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if not token:
            continue
        if kind in (_CONTROL, _UNKNOWN):
            rstrip = takes_spaces and token not in _KEEP_SPACES
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer of a file; it adds the begin and end tokens of a text where the file says so.

    ``special_tokens`` has those of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``
    that exist. ``adds_bos`` and ``adds_eos`` say whether a text gets its begin and end tokens;
    ``eos_token_ids`` end a text. With ``has_ties``, pieces have the same score, which
    ``tokenizer.json`` cannot express.
    """

    tokenizer: Any
    special_tokens: dict[str, str]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    has_ties: bool = False


def _put_around(tokenizer: Any, bos: str | None, eos: str | None) -> None:
    """Let a tokenizer put these before and after a text; None: nothing."""
    from tokenizers import processors

    single = [f"{bos}:0", "$A:0", f"{eos}:0"]
    pair = [*single, f"{bos}:1", "$B:1", f"{eos}:1"]
    none = {f"{None}:0", f"{None}:1"}
    if bos is None and eos is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in single if part not in none],
        pair=[part for part in pair if part not in none],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None
        ],
    )


def _tokenizer_of(file: GgufFile) -> GgufTokenizer:
    facts = Facts(file)
    vocabulary = _Vocabulary(facts)
    is_bytes = vocabulary.kind == "gpt2"
    specials = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = facts.token(f"{key}_token_id", len(vocabulary.tokens))
        if token is not None:
            specials[f"{name}_token"] = vocabulary.tokens[token]
    begins = not is_bytes or vocabulary.entry("pre", str, "default") in BEGIN_BY_DEFAULT
    adds_bos = vocabulary.entry("add_bos_token", bool, begins)
    adds_eos = vocabulary.entry("add_eos_token", bool, False)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise vocabulary.error("has a tokenizer.chat_template that is no string; expected one")
    try:
        build = _bytes_tokenizer if is_bytes else _sentencepiece_tokenizer
        tokenizer = build(vocabulary)
        _add_tokens(tokenizer, vocabulary, facts.architecture == "phi3" and not is_bytes)
        _add_named(tokenizer, specials)
        _put_around(
            tokenizer,
            specials.get("bos_token") if adds_bos else None,
            specials.get("eos_token") if adds_eos else None,
        )
    except ValueError:
        raise
    except Exception as error:  # that of tokenizers is of no type of its own
        raise vocabulary.error(f"has a vocabulary that makes no tokenizer ({error})") from error
    ends = end_tokens(facts, len(vocabulary.tokens))
    return GgufTokenizer(
        tokenizer, specials, adds_bos, adds_eos, template, tuple(ends), vocabulary.has_ties
    )


def _add_named(tokenizer: Any, specials: dict[str, str]) -> None:
    """Make tokens special that are so by their names alone, as transformers does."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()
             if token.special}  # fmt: skip
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in dict.fromkeys(specials.values())
            if token not in known
        ]
    )


def read_tokenizer(path: str | os.PathLike[str]) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file, without transformers; errors as ``load_tokenizer``."""
    return _tokenizer_of(GgufFile(path))


def _of_transformers(found: GgufTokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    cuts, found.tokenizer.pre_tokenizer = found.tokenizer.pre_tokenizer, None  # not to be copied
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=found.tokenizer,
        **found.special_tokens,
        add_bos_token=found.adds_bos,
        add_eos_token=found.adds_eos,
        chat_template=found.chat_template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.backend_tokenizer.pre_tokenizer = cuts
    return tokenizer


def tokenizer_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file with the tokenizer of such a file, or of a saved folder, else None."""
    own = Path(path) / _SAVED
    return next((Path(found) for found in (path, own) if is_gguf(found)), None)


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template.

    Parameters
    ----------
    path : str or path
        Of the file, or of a folder that ``Decoding.save`` wrote of one.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
        It puts the begin and the end of a text where the file says so.

    Raises
    ------
    OSError
        There is no such file.
    ValueError
        It is damaged, or has no tokenizer, or one of an unsupported kind.
    """
    file = tokenizer_path(path)
    if file is None and (Path(path) / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    return _of_transformers(_tokenizer_of(GgufFile(file or path)))


def tokenizer_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as the files that transformers has of one, by name.

    Where pieces have the same score, it is a GGUF file: ``tokenizer_path``.
    There are none if the file has no tokenizer of a supported kind.
    """
    file = GgufFile(path)
    if file.metadata.get("tokenizer.ggml.model") not in _KINDS:
        return {}
    found = _tokenizer_of(file)
    if found.has_ties:
        return {_SAVED: file.without_tensors()}
    with tempfile.TemporaryDirectory() as folder:
        _of_transformers(found).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
