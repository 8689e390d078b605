"""Tokenizers inside of GGUF files: their tokens, their flags, and what is wrong with others."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import lmdecode
from lmdecode.formats.gguf import load_tokenizer, read_tokenizer
from lmdecode.readers.gguf.tokenizer import SPLITS
from lmdecode.serving.tokenizer import Tokenizer
from tests.support.causal_models import model_of, random_config
from tests.support.gguf_files import write_file, write_model

SPACE = "\u2581"
# Byte-level: the letters, what they merge into, and tokens of the user and of control.
WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789'.,!\u0120\u010a", "th", "the", "\u0120the", "12",
         "\u0120a", "<|end|>", "<think>", "<|begin|>"]  # fmt: skip
MERGES = ["t h", "th e", "\u0120 the", "1 2", "\u0120 a"]
# Sentencepiece: 256 bytes behind three special ones, then pieces with their scores.
BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = {SPACE: -1.0, "t": -2.0, "h": -3.0, "e": -4.0, "a": -5.0, "th": -6.0, "he": -7.0,
          "the": -8.0, SPACE + "t": -9.0, SPACE + "the": -10.0, SPACE + SPACE: -11.0}  # fmt: skip


def _bytes(path: Path, *entries: Any, pre: str = "gpt-2", merges: Any = MERGES) -> Path:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(WORDS)
        writer.add_token_types([1] * (len(WORDS) - 3) + [3, 4, 3])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(len(WORDS) - 3)
        writer.add_bos_token_id(len(WORDS) - 1)

    write_file(path, "llama", {}, add, *entries)
    return path


def _pieces(
    path: Path, *entries: Any, architecture: str = "llama", pieces: dict[str, float] = PIECES,
    others: float = 0.0, unknown: int | None = 0,
) -> Path:  # fmt: skip
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *BYTES, *pieces])
        writer.add_token_scores([others] * 259 + list(pieces.values()))
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if unknown is not None:
            writer.add_unk_token_id(unknown)

    write_file(path, architecture, {}, add, *entries)
    return path


def _ids(*tokens: str) -> list[int]:
    return [WORDS.index(token) for token in tokens]


def _pieces_ids(*tokens: str) -> list[int]:
    names = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    return [names.index(token) for token in tokens]


def test_tokens_of_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_bytes(tmp_path / "m.gguf"))
    text = "the the<|end|>th<think>\nab 'll"
    ids = _ids("the", "\u0120the", "<|end|>", "th", "<think>", "\u010a", "a", "b", "\u0120", "'",
               "l", "l")  # fmt: skip
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|end|>", "")
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|begin|>")


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [("gpt-2", ["12", "3"]), ("smollm", ["1", "2", "3"]), ("llama-bpe", ["12", "3"]),
     ("falcon-h1", ["12", "3"]), ("lfm2", ["12", "3"]), ("qwen2", ["1", "2", "3"]),
     ("qwen35", ["1", "2", "3"]), ("tekken", ["1", "2", "3"]), ("default", ["12", "3"])],
)  # fmt: skip
def test_words_are_cut_as_the_file_says(pre: str, tokens: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_bytes(tmp_path / "m.gguf", pre=pre))
    assert tokenizer("123", add_special_tokens=False).input_ids == _ids(*tokens)
    begins = pre in ("falcon-h1", "lfm2", "llama-bpe", "tekken")
    assert (tokenizer("a").input_ids[0] == tokenizer.bos_token_id) == begins


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_of_cutting_words_is_one_that_tokenizers_knows(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_bytes(tmp_path / "m.gguf", pre=pre))
    text = "the  12 a.\n\n'll a"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize(("pre", "first"), [("qwen2", (0, 1)), ("qwen35", (0, 3))])
def test_marks_are_of_words_or_not(pre: str, first: tuple[int, int], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_bytes(tmp_path / "m.gguf", pre=pre))
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\u0301b.\u0301 1")
    assert [span for _, span in words] == [
        first, *([(1, 3)] if pre == "qwen2" else []), (3, 5), (5, 6), (6, 7),
    ]  # fmt: skip


def test_a_word_that_is_a_token_is_not_merged(tmp_path: Path) -> None:
    """As Llama 3's words; there is no merge of "t" and "he" here."""
    merges = ["h e", "t h"]
    others = load_tokenizer(_bytes(tmp_path / "a.gguf", pre="gpt-2", merges=["t h"]))
    whole = load_tokenizer(_bytes(tmp_path / "b.gguf", pre="llama-bpe", merges=["t h"]))
    assert others("the").input_ids == _ids("th", "e")
    assert whole("the", add_special_tokens=False).input_ids == _ids("the")
    with pytest.raises(ValueError, match="has a vocabulary that makes no tokenizer"):
        load_tokenizer(_bytes(tmp_path / "c.gguf", merges=merges))  # "he" is no token


def test_pieces_merge_by_their_scores(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_pieces(tmp_path / "m.gguf"))
    assert tokenizer("the he").input_ids == _pieces_ids("<s>", SPACE + "the", SPACE, "he")
    assert tokenizer("é").input_ids == _pieces_ids("<s>", SPACE, "<0xC3>", "<0xA9>")
    # A space is put before what follows a special token, too: as llama.cpp does.
    ids = _pieces_ids("<s>", SPACE + "t", "</s>", SPACE, "he")
    assert tokenizer("t</s>he").input_ids == ids
    assert tokenizer.decode(_pieces_ids(SPACE + "the", "<0xC3>", "<0xA9>")) == "theé"


def test_gemma_4s_pieces_have_merges(tmp_path: Path) -> None:
    """No space is put before a text, and newlines are words of their own."""
    pieces = ["t", "h", "e", SPACE, "th", "the", SPACE + "t", "\n", "\n\n", "e\n", SPACE + "the"]
    merges = ["t h", "th e", f"{SPACE} t", "e \n", "\n \n", f"{SPACE} the"]
    tokens = ["<unk>", "<s>", "</s>", "<turn|>", *BYTES, *pieces]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, 3] + [6] * 256 + [1] * len(pieces))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    write_file(tmp_path / "m.gguf", "llama", {}, add)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    text = "the the\n\nté\n<turn|>e"
    expected = ["<s>", "the", SPACE + "the", "\n\n", "t", "<0xC3>", "<0xA9>", "\n", "<turn|>", "e"]
    ids = tokenizer(text).input_ids
    assert ids == [tokens.index(token) for token in expected]
    assert tokenizer.decode(ids[1:]) == text
    assert read_tokenizer(tmp_path / "m.gguf").eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>"], ["<|end|>"]),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<turn|>", "<|tool_response>", "<end>"], ["<turn|>", "<|tool_response>"]),
    ],
)
def test_tokens_that_end_a_text(names: list[str], ends: list[str], tmp_path: Path) -> None:
    """Where messages have other ends, <|end|> is followed by the next one."""
    tokens = ["a", "<eot>", *names]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([1, 3, *([3, 4, 3][: len(names)])])
        writer.add_eos_token_id(1)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 2)

    write_file(tmp_path / "m.gguf", "llama", {}, add)
    found = [tokens[i] for i in read_tokenizer(tmp_path / "m.gguf").eos_token_ids]
    assert found == ["<eot>", *ends]


def test_flags(tmp_path: Path) -> None:
    def flags(writer: Any) -> None:
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
        writer.add_chat_template("{{ messages[0]['content'] }}!")

    tokenizer = load_tokenizer(_pieces(tmp_path / "m.gguf", flags))
    assert tokenizer("the").input_ids == _pieces_ids("the", "</s>")
    assert tokenizer.decode(_pieces_ids(SPACE + "the")) == " the"
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "the!"


def test_special_tokens_of_phi_3_take_spaces(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_pieces(tmp_path / "m.gguf", architecture="phi3"))
    assert tokenizer("</s> the").input_ids == _pieces_ids("<s>", "</s>", SPACE + "the")
    assert tokenizer("<s> the").input_ids == _pieces_ids("<s>", "<s>", SPACE, SPACE + "the")


def test_it_is_saved_beside_the_weights(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(WORDS)
        writer.add_token_types([1] * (len(WORDS) - 3) + [3, 4, 3])
        writer.add_token_merges(MERGES)
        writer.add_chat_template("{{ messages[0]['content'] }}")

    model = model_of(random_config("llama", "plain", vocab_size=len(WORDS)))
    write_model(tmp_path / "m.gguf", model, add)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path / "m.gguf")
    # Control tokens of known names end a text, too.
    ends = decoding.model.generation_config.eos_token_id
    assert ends == [model.config.eos_token_id, WORDS.index("<|end|>")]
    decoding.save(tmp_path / "saved")
    own = load_tokenizer(tmp_path / "m.gguf")
    for load in (AutoTokenizer.from_pretrained, load_tokenizer):
        saved = load(tmp_path / "saved")
        assert saved("the 123<think> a").input_ids == own("the 123<think> a").input_ids
        assert saved.chat_template == own.chat_template
    again = lmdecode.Decoding.load(tmp_path / "saved")
    again.save(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (
        tmp_path / "saved" / "tokenizer.json").read_bytes()  # fmt: skip


def _without(key: str) -> Any:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{key}")


def _with(key: str, value: Any) -> Any:
    def change(writer: Any) -> None:
        writer.kv_data[0][f"tokenizer.ggml.{key}"].value = value

    return change


WRONG: list[tuple[Any, str]] = [
    (_without("model"), "has a tokenizer ''; expected one of gemma4, gpt2, llama"),
    (_with("model", "rwkv"), "has a tokenizer 'rwkv'; expected one of gemma4, gpt2, llama"),
    (_with("pre", "unheard"), "cuts words as 'unheard' (tokenizer.ggml.pre); expected one of"),
    (_without("tokens"), "has no list of strings for tokenizer.ggml.tokens; expected one"),
    (_without("merges"), "has no list of strings for tokenizer.ggml.merges; expected one"),
    (_with("merges", ["ab"]), "has a merge 'ab'; expected two tokens and a space between"),
    (_with("token_type", [1, 2]),
     f"has no list of {len(WORDS)} numbers for tokenizer.ggml.token_t"),
    (_with("eos_token_id", 1000), "has 1000 for tokenizer.ggml.eos_token_id; expected a token"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1][:40])
def test_what_is_wrong_is_named(case: tuple[Any, str], tmp_path: Path) -> None:
    path = _bytes(tmp_path / "m.gguf", case[0])
    with pytest.raises(ValueError, match=re.escape(case[1])) as raised:
        load_tokenizer(path)
    assert str(path) in str(raised.value)


def _tied(path: Path, pieces: dict[str, float], *entries: Any) -> Path:
    return _pieces(path, *entries, pieces=pieces, others=-1000.0, unknown=None)


def _merged(text: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of a text: of all pairs the best, of equal ones the leftmost, in turn."""
    parts = list(text)
    while found := [(-scores[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1)
                    if parts[i] + parts[i + 1] in scores]:  # fmt: skip
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _random_pieces(seed: int, num_scores: int) -> dict[str, float]:
    generator = random.Random(seed)
    pieces = [*"abcd", SPACE]
    while len(pieces) < 60:
        piece = generator.choice(pieces) + generator.choice(pieces)
        inner = SPACE in piece.lstrip(SPACE) and seed % 2
        if len(piece) < 7 and piece not in pieces and not inner:
            pieces.append(piece)
    return {piece: -float(generator.randrange(num_scores)) for piece in pieces}


@pytest.mark.parametrize("num_scores", [1, 20])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_the_same_score_merge_leftmost_first(
    seed: int, num_scores: int, tmp_path: Path
) -> None:
    """As in llama.cpp b11739: the rule here gave its tokens in all of 2 000 texts of 20 files."""
    pieces, generator = _random_pieces(seed, num_scores), random.Random(seed)
    path = _tied(tmp_path / "m.gguf", pieces)
    tokenizer, own = load_tokenizer(path), Tokenizer.load(path)
    names = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    for _ in range(50):
        text = "".join(generator.choices("abcd é", k=generator.choice([2, 9, 40])))
        expected = []
        for piece in _merged(SPACE + text.replace(" ", SPACE), pieces):
            in_bytes = [f"<0x{byte:02X}>" for byte in piece.encode()]
            expected += [piece] if piece in pieces else in_bytes
        assert [names[i] for i in tokenizer(text).input_ids] == ["<s>", *expected]
        assert own.encode(text) == tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_llama_cpps_tokens_of_the_same_score(tmp_path: Path) -> None:
    """Seen of llama.cpp b11739; by the order of merges it would be d, ce and a, bc."""
    path = _tied(
        tmp_path / "m.gguf", dict.fromkeys([SPACE, *"abcde", "ce", "dc", "bc", "ab"], -1e3)
    )
    pieces = load_tokenizer(path).tokenize("dceabc")
    assert pieces == [SPACE, "dc", "e", "ab", "c"]


def test_a_saved_model_keeps_pieces_of_the_same_score(tmp_path: Path) -> None:
    """A tokenizer.json cannot say what they do: the folder has a GGUF file without tensors."""
    pieces = dict.fromkeys([SPACE, *"abcde", "ce", "dc", "bc", "ab"], -1000.0)

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *pieces])
        writer.add_token_scores([-1000.0] * (3 + len(pieces)))
        writer.add_token_types([2, 3, 3] + [1] * len(pieces))
        writer.add_chat_template("{{ messages[0]['content'] }}!")

    model = model_of(random_config("llama", "plain", vocab_size=3 + len(pieces)))
    write_model(tmp_path / "m.gguf", model, add)
    lmdecode.Decoding.from_pretrained(tmp_path / "m.gguf").save(tmp_path / "saved")
    lmdecode.Decoding.load(tmp_path / "saved").save(tmp_path / "again")
    for folder in ("saved", "again"):
        assert not (tmp_path / folder / "tokenizer.json").exists()
        saved, own = load_tokenizer(tmp_path / folder), Tokenizer.load(tmp_path / folder)
        ids = load_tokenizer(tmp_path / "m.gguf")("dceabc").input_ids
        assert saved("dceabc").input_ids == own.encode("dceabc") == ids
        assert own.chat_template == saved.chat_template == "{{ messages[0]['content'] }}!"


def test_merges_of_a_file_of_pieces_with_scores_are_left_aside(tmp_path: Path) -> None:
    """As in llama.cpp: the scores alone say what goes first."""
    merges = _tied(tmp_path / "m.gguf", {SPACE: -1.0, "a": -2.0, "b": -3.0, "ab": -5.0, "ba": -4.0},
                   lambda writer: writer.add_token_merges(["a b", "b a"]))  # fmt: skip
    assert load_tokenizer(merges).tokenize("aba") == [SPACE, "a", "ba"]
