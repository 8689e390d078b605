"""Models of sentencepiece: the tokens of its own package, version 0.2.3, through tokenizers."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from lmdecode.readers.tokenizer_files import converted_tokenizer, keep_rules

tokenizers = pytest.importorskip("tokenizers")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_START = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
LETTERS = [("\u2581", -3.0), ("\u2581a", -2.0), ("a", -4.0), ("b", -5.0), ("ab", -2.5),
           ("\u2581ab", -6.0), ("\u2581\u2581", -7.0), ("\u00e4", -8.0)]  # fmt: skip
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return bytes([*_varint(number << 3 | 2), *_varint(len(value))]) + value
    return bytes([*_varint(number << 3), *_varint(value)])


def _varint(value: int) -> list[int]:
    return [value & 127 | 128, *_varint(value >> 7)] if value > 127 else [value]


def _charsmap(letter: str, other: str) -> bytes:
    """Return rules of one letter of ASCII: a trie of a root, the letter and its leaf."""
    units = [(ord(letter) ^ 1) << 10, 3 << 10 | 1 << 8 | ord(letter), 1 << 31]
    units += [i ^ 1 for i in range(3, 256)]
    return struct.pack("<I256I", 1024, *units) + other.encode() + b"\0"


def model_file(
    folder: Path,
    kind: int = UNIGRAM,
    *,
    prefix: bool = True,
    trims: bool = True,
    more: list[tuple[str, float, int]] | None = None,
    trainer: bytes = b"",
    rules: bytes = b"",
) -> Path:
    """Write a model; ``more`` pieces with BYTE among them have bytes for unknown letters."""
    letters = [(text, score, NORMAL) for text, score in LETTERS]
    pieces = [*_START, *letters, *(more or [])]
    data = b"".join(
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, of))
        for text, score, of in pieces
    )
    has_bytes = any(of == BYTE for _, _, of in pieces)
    data += _field(2, _field(3, kind) + _field(35, int(has_bytes)) + trainer)
    data += _field(3, _field(3, int(prefix)) + _field(4, int(trims)) + rules)
    path = folder / "tokenizer.model"
    path.write_bytes(data)
    return path


def tokenizer_of(path: Path, unknown: str = "<unk>", left_out: str = "") -> Any:
    """Return the tokenizer that a file makes of what transformers' LlamaTokenizer made of it."""
    data, texts, at = path.read_bytes(), list[str](), 0
    while data[at] == 10:  # a piece, of less than 128 bytes
        texts.append(data[at + 4 : at + 4 + data[at + 3]].decode())
        at += 2 + data[at + 1]
    vocab = {text: i for i, text in enumerate(texts) if text != left_out}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    words = keep_rules(tokenizer, path, unknown)
    tokenizer.add_tokens([tokenizers.AddedToken(word) for word in words])
    return tokenizer


def tokens_of(path: Path, text: str) -> str:
    """Return the tokens of a text with a ``|`` between."""
    tokenizer = tokenizer_of(path)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return "|".join(map(tokenizer.id_to_token, ids)).replace("\u2581", "_")


CASES: dict[str, dict[str, Any]] = {
    "unigram": {},
    "BPE": {"kind": BPE},
    "no first space": {"prefix": False},
    "all spaces": {"trims": False},
    "all spaces, BPE, no first space": {"kind": BPE, "trims": False, "prefix": False},
    "bytes": {"more": BYTES},
    "bytes, BPE, all spaces": {"more": BYTES, "kind": BPE, "trims": False},
    "a rule of a letter": {"rules": _field(2, _charsmap("X", "ab"))},
    "words of the user": {"more": [("<w>", 0.0, USER)], "trims": False},
    "words of the user, BPE": {"more": [("<w>", 0.0, USER)], "kind": BPE, "trims": False},
    "words of the user, spaces removed": {"more": [("<w>", 0.0, USER)]},
    "words of the user with spaces": {"more": [("\u2581\u2581b", 0.0, USER)], "kind": BPE,
                                      "trims": False, "prefix": False},
    "words of the user with a space, as mT5's": {"more": [("\u2581<w>", 0.0, USER)]},
}  # fmt: skip
TEXTS = ["", " ", "ab", " ab", "  a  b ", "abab", "aXX\u017eb", "a <w> b", "a<w>b", "a\t"]
# Of each case the tokens of each text, none as -.
TOKENS = {
    "unigram":
        "-  -  _|ab  _|ab  _a|_|b  _|ab|ab  _a|<unk>|b  _a|_|<unk>|_|b  _a|<unk>|b  "
        "_a|<unk>",
    "BPE": "-  -  _ab  _ab  _a|_|b  _ab|ab  _a|<unk>|b  _a|_|<unk>|_|b  _a|<unk>|b  _a|<unk>",
    "no first space":
        "-  -  ab  ab  a|_|b  ab|ab  a|<unk>|b  a|_|<unk>|_|b  a|<unk>|b  a|<unk>",
    "all spaces":
        "-  _|_  _|ab  _|_|ab  _|_|_a|_|_|b|_  _|ab|ab  _a|<unk>|b  _a|_|<unk>|_|b  "
        "_a|<unk>|b  _a|<unk>",
    "all spaces, BPE, no first space":
        "-  _  ab  _ab  _|_a|__|b|_  ab|ab  a|<unk>|b  a|_|<unk>|_|b  a|<unk>|b  a|<unk>",
    "bytes":
        "-  -  _|ab  _|ab  _a|_|b  _|ab|ab  _a|<0x58>|<0x58>|<0xC5>|<0xBE>|b  "
        "_a|_|<0x3C>|<0x77>|<0x3E>|_|b  _a|<0x3C>|<0x77>|<0x3E>|b  _a|<0x09>",
    "bytes, BPE, all spaces":
        "-  __  _ab  _|_ab  __|_a|__|b|_  _ab|ab  _a|<0x58>|<0x58>|<0xC5>|<0xBE>|b  "
        "_a|_|<0x3C>|<0x77>|<0x3E>|_|b  _a|<0x3C>|<0x77>|<0x3E>|b  _a|<0x09>",
    "a rule of a letter":
        "-  -  _|ab  _|ab  _a|_|b  _|ab|ab  _a|ab|ab|<unk>|b  _a|_|<unk>|_|b  _a|<unk>|b  "
        "_a|<unk>",
    "words of the user":
        "-  _|_  _|ab  _|_|ab  _|_|_a|_|_|b|_  _|ab|ab  _a|<unk>|b  _a|_|<w>|_|b  _a|<w>|b  "
        "_a|<unk>",
    "words of the user, BPE":
        "-  __  _ab  _|_ab  __|_a|__|b|_  _ab|ab  _a|<unk>|b  _a|_|<w>|_|b  _a|<w>|b  "
        "_a|<unk>",
    "words of the user, spaces removed":
        "-  -  _|ab  _|ab  _a|_|b  _|ab|ab  _a|<unk>|b  _a|_|<w>|_|b  _a|<w>|b  _a|<unk>",
    "words of the user with spaces":
        "-  _  ab  _ab  _|_a|__b|_  ab|ab  a|<unk>|b  a|_|<unk>|_|b  a|<unk>|b  a|<unk>",
    "words of the user with a space, as mT5's":
        "-  -  _|ab  _|ab  _a|_|b  _|ab|ab  _a|<unk>|b  _a|_<w>|_|b  _a|<unk>|b  _a|<unk>",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    """transformers 5.23: `</s>` for letters that no piece has, a first space always."""
    path = model_file(tmp_path, **CASES[name])
    assert [tokens_of(path, text) or "-" for text in TEXTS] == TOKENS[name].split("  ")


@pytest.mark.parametrize("name", ["all spaces", "all spaces, BPE, no first space", "bytes"])
def test_texts_come_back(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(model_file(tmp_path, **CASES[name]))
    for text in ("ab", "a b", " a" if name != "bytes" else "a"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": 3}, "is neither of kind"),
        ({"kind": 4}, "is neither of kind"),
        ({"trainer": _field(24, 1)}, "spaces behind words"),
        ({"rules": _field(5, 0)}, "spaces as they are"),
        ({"more": [("c", -1.0, UNUSED)]}, "unused pieces"),
        ({"rules": _field(1, b"user_defined") + _field(2, _charsmap("X", "a"))}, "of its own for"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = model_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"tokenizer.model .*{message}"):
        keep_rules(None, path, "<unk>")


def test_a_word_of_the_user_that_the_rules_change_is_refused(tmp_path: Path) -> None:
    rule = _field(2, _charsmap("X", "a"))
    path = model_file(tmp_path, rules=rule, more=[("<X>", 0.0, USER)])
    with pytest.raises(ValueError, match=r"tokenizer.model has a user-defined piece '<X>', which"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\n\xff\xff\xff", b"\x0f", b"\n\x02\x15\0", b"\0" * 9]
)
def test_a_file_that_is_no_model_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.model"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.model is no model of sentencepiece"):
        keep_rules(None, path, "<unk>")


def test_pieces_that_transformers_leaves_out_are_named(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    with pytest.raises(ValueError, match="makes a tokenizer without 'ab'"):
        tokenizer_of(path, left_out="ab")
    with pytest.raises(ValueError, match="without a token for unknown letters"):
        tokenizer_of(path, "<none>")


def test_what_is_missing_to_read_a_model_is_named(tmp_path: Path) -> None:
    """transformers 5.23 asks for tiktoken."""
    utils = pytest.importorskip("transformers.utils")
    if utils.is_sentencepiece_available() and utils.is_protobuf_available():
        pytest.skip("nothing is missing")
    model_file(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ImportError, match="needs the packages sentencepiece and protobuf to read"):
        converted_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "tokenizer_class", "file"),
    [("unigram", "T5Tokenizer", "spiece.model"), ("bpe", "LlamaTokenizer", "tokenizer.model"),
     ("unigram", "XLMRobertaTokenizer", "sentencepiece.bpe.model")],
)  # fmt: skip
@pytest.mark.parametrize("rules", ["nmt_nfkc", "identity"])
def test_a_folder_has_the_tokens_of_sentencepiece(
    kind: str, tokenizer_class: str, file: str, rules: str, tmp_path: Path
) -> None:
    """Trained here; skipped where the packages are not that transformers needs."""
    trainer = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    from lmdecode.serving import Tokenizer

    keeps = rules == "identity" and kind == "bpe"
    words = ["<sep>", *(["\u2581" * 2, "\u2581" * 3] if keeps else [])]  # Gemma has such
    text = [f"the {word} of a model na\u00efve caf\u00e9" for word in "words tokens pieces".split()]
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 50), model_prefix=str(tmp_path / "m"), vocab_size=60,
        model_type=kind, normalization_rule_name=rules, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=words, remove_extra_whitespaces=not keeps, add_dummy_prefix=not keeps,
    )  # fmt: skip
    (tmp_path / "m.model").rename(tmp_path / file)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": tokenizer_class})
    )
    theirs = trainer.SentencePieceProcessor(model_file=str(tmp_path / file))
    ours = Tokenizer.load(tmp_path)
    letters = ["\ufb01ne \uff76\uff9e", "cafe\u0301 <sep> \u0416", "a  b   <sep>b "]
    for one in ["the model", "  two  words ", *letters, "\n", ""]:
        ids = ours.encode(one, add_special_tokens=False)
        pieces = [ours.inner.id_to_token(token) for token in ids]
        assert pieces == list(map(theirs.id_to_piece, theirs.encode(one))), one
        assert ours.inner.token_to_id("<sep>") not in ours.special_ids
