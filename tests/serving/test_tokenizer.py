"""Tokenizers of folders and GGUF files: the tokens and texts of transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmdecode
from lmdecode.serving import Tokenizer
from tests.serving.tokenizer_kinds import KJV, tokenizer_of
from tests.support.releases import BEFORE_5_7

transformers = pytest.importorskip("transformers")
TEXTS = ["In the beginning", "  two  spaces\n", "\u4e2d\u6587 \U0001f600", "", "<s> a </s>b",
         "it's <|im_end|> n't .", "\x00\x7f\u2581x"]  # fmt: skip


def saved(tmp_path: Path, kind: str, **settings: Any) -> Path:
    """Write the tokenizer of a kind as transformers has it."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(kind), bos_token="<s>", eos_token="</s>", **settings
    )
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize(
    "kind", ["byte_level", "sentencepiece", "metaspace", "word_piece", "none", "kjv"]
)
def test_tokens_and_texts_are_those_of_transformers(kind: str, clean: bool, tmp_path: Path) -> None:
    folder = KJV
    if kind != "kjv":
        settings = {"clean_up_tokenization_spaces": clean, "add_bos_token": kind != "metaspace"}
        folder = saved(tmp_path, kind, **settings)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_tokens == theirs.special_tokens_map
    is_bpe = type(theirs.backend_tokenizer.model).__name__ == "BPE"
    options = {"clean_up_tokenization_spaces": False} if BEFORE_5_7 and is_bpe else {}
    for text in TEXTS:
        for adds in (False, True):
            ids = ours.encode(text, add_special_tokens=adds)
            assert ids == theirs(text, add_special_tokens=adds).input_ids
        for skips in (False, True):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(
                ids, skip_special_tokens=skips, **options
            )


def test_special_tokens_that_a_config_alone_has(tmp_path: Path) -> None:
    folder = saved(tmp_path, "byte_level")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"pad_token": "<pad>", "image_token": "<image>", "extra_special_tokens": ["<x>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "a<pad>b<image>c<x>"
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == "abc"


def test_special_tokens_as_plain_text(tmp_path: Path) -> None:
    folder = saved(tmp_path, "byte_level", add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.load(folder)
    text = "a<|im_end|> <think>"
    plain = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
    added = set(tokenizer.inner.get_added_tokens_decoder())
    assert not added & set(plain) and tokenizer.decode(plain) == text
    assert added & set(tokenizer.encode(text, add_special_tokens=False))
    around = tokenizer.encode("", add_special_tokens=True)
    assert tokenizer.encode(text, parse_special=False) == [around[0], *plain, around[1]]


def test_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(tokenizer_of("sentencepiece"))
    of = {name: tokenizer.token_bytes(i) for name, i in tokenizer.get_vocab().items()}
    assert of["<0xE2>"] == b"\xe2" and of["\u2581a"] == b" a" and of["<s>"] == b"<s>"
    assert tokenizer.token_bytes(99999) == b""
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    of = {name: tokenizer.token_bytes(i) for name, i in tokenizer.get_vocab().items()}
    assert of["\u0120a"] == b" a" and of["\u00e2\u0124"] == b"\xe2\x82"
    assert of["<|im_end|>"] == b"<|im_end|>"


@pytest.mark.parametrize("of_model", [False, True])
def test_an_added_word_of_a_byte_level_tokenizer_is_its_content(of_model: bool) -> None:
    """Its letters are no bytes; tokenizers 0.23.3 decodes the first two to other texts."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer.from_str(tokenizer_of("byte_level").to_str())
    words = ["na\u00efve", "\u010daj", "\u0120new", "caf\u00e9\u4e2d"]
    if of_model:  # as a GGUF file has them
        state = json.loads(inner.to_str())
        state["model"]["vocab"] |= {word: 400 + i for i, word in enumerate(words)}
        state["model"]["merges"] = [["\u0120", "a"]]
        inner = tokenizers.Tokenizer.from_str(json.dumps(state))
    inner.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    inner.add_tokens(["\u0120a", "\u00e9"])
    inner.add_special_tokens(["<\u00fd>"])
    tokenizer = Tokenizer(inner)
    text = "a na\u00efve \u010daj \u0120new caf\u00e9\u4e2d<\u00fd> a \u9e1e"
    ids = tokenizer.encode(text)
    assert set(map(inner.token_to_id, [*words, "<\u00fd>"])) <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<\u00fd>", "")
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == text


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "spiece.model").write_text("")
    with pytest.raises(ValueError, match="has a tokenizer that cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        Tokenizer.load(tmp_path)
    shutil.copy(KJV / "tokenizer.json", tmp_path)
    for text, message in (("{", "is no JSON"), ("[]", "has a list; expected a dict"),
                          ('{"added_tokens_decoder": {"1": 3}}', "damaged tokenizer_config"),
                          ('{"chat_template": 3}', "chat_template of type int")):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(tmp_path)


def test_an_older_form_of_a_tokenizer(tmp_path: Path) -> None:
    """A vocabulary and its merges, which transformers reads."""
    tokenizer = tokenizer_of("byte_level")
    vocabulary = {**tokenizer.get_vocab(), "<|endoftext|>": 300}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [300, 7]}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_ids == (300, 7)
    for text in ("hello he", "\u4e2d<|endoftext|>"):
        assert ours.encode(text) == theirs(text).input_ids


def test_numbers_that_no_token_has() -> None:
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    assert tokenizer.decode([99999]) == ""
    for number in (-1, 1 << 40):
        with pytest.raises(ValueError, match=r"ids has a number that no token has; expected 0 to"):
            tokenizer.decode([number])


def test_texts_that_are_none() -> None:
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    for parses in (True, False):
        with pytest.raises(ValueError, match=r"text has '.udc00' at character 1; expected no surr"):
            tokenizer.encode("a\udc00", parse_special=parses)
    with pytest.raises(TypeError, match="text is of type bytes; expected str"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def test_a_saved_model_needs_no_transformers(tmp_path: Path) -> None:
    lmdecode.Decoding.from_pretrained(KJV, "int8", keep_model=False).save(tmp_path)
    program = (
        "import sys\n"
        "from lmdecode.serving import TextModel\n"
        f"model = TextModel.load({str(tmp_path)!r})\n"
        "engine = model.decoding.engine(max_requests=1, capacity=64)\n"
        "ids = model.tokenizer.encode('In the beginning')\n"
        "tokens = engine.submit(ids, max_new_tokens=8).result().tokens\n"
        "model.decoding.fingerprint(model.tokenizer)\n"
        "assert not {'transformers', 'sympy'} & sys.modules.keys(), 'transformers'\n"
        "print(model.name, model.context_length, model.eos_token_ids, model.template, tokens)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    decoding = lmdecode.Decoding.load(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(KJV)
    ids = tokenizer("In the beginning", return_tensors="pt").input_ids
    tokens = decoding.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert done.stdout.strip() == f"{tmp_path.name} 4096 (1,) None {tokens}"


def _gguf(path: Path, kind: str, **flags: bool) -> Path:
    """Write a file with a tokenizer of a kind, and no weights."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_file

    is_bytes = kind == "gpt2"
    letters = [*"abcdefgh.'", "\u0120" if is_bytes else "\u2581"]
    pieces = [*letters, "ab", letters[-1] + "a", "<|end|>", "<think>"]
    numbers = [] if is_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *numbers, *pieces]
    kinds = [2, 3, 3] + [6] * len(numbers) + [1] * (len(pieces) - 2) + [3, 4]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        if is_bytes:
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(["a b", "\u0120 a"])
        else:
            writer.add_token_scores([-float(i) for i in range(len(tokens))])
        if kind == "gemma4":
            writer.add_token_merges(["a b", "\u2581 a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template("{{ messages[0].content }}<|end|>")
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    write_file(path, "llama", {}, add)
    return path


@pytest.mark.parametrize("kind", ["gemma4", "gpt2", "llama"])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_a_gguf_file_has_the_tokens_of_transformers(
    kind: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    from lmdecode.formats.gguf import load_tokenizer

    path = _gguf(tmp_path / "m.gguf", kind, **flags)
    ours, theirs = Tokenizer.load(path), load_tokenizer(path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    end = ours.inner.token_to_id("<|end|>")
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2, end))
    for text in ["ab a b", " ab<|end|> <think>", "\u00e9", "", "</s>h"]:
        for adds in (False, True):
            ids = ours.encode(text, add_special_tokens=adds)
            assert ids == theirs(text, add_special_tokens=adds).input_ids
        for skips in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skips)
            assert ours.decode(ids, skip_special_tokens=skips) == expected
            stream = ours.stream(skip_special_tokens=skips)
            assert "".join(stream.push([token]) for token in ids) + stream.finish() == expected


def test_a_gguf_tokenizer_needs_no_transformers(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "m.gguf", "llama")
    program = (
        "import sys\n"
        "from lmdecode.serving import Tokenizer\n"
        f"print(Tokenizer.load({str(path)!r}).encode('ab'))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Tokenizer.load(path).encode("ab"))
