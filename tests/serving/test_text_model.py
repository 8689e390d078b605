"""Models with tokenizers and templates: names, ends, failures, and texts of tokens as they come."""

import functools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode.serving import ChatTemplate, TextModel, Tokenizer
from tests.serving.test_chat_template import TEMPLATES
from tests.serving.tokenizer_kinds import KINDS, KJV, tokenizer_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KJV, tmp_path / "source"))


def edit(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_folder_of_transformers(source: Path) -> None:
    edit(source / "generation_config.json", temperature=0.6, top_p=0.95, eos_token_id=[1, 7])
    (source / "chat_template.jinja").write_text(TEMPLATES["role_tokens"])
    told: list[str] = []
    model = TextModel.load(source, progress=told.append)
    assert model.name == "source" and model.context_length == 4096
    assert model.eos_token_ids == (1, 7)
    assert model.generation_defaults == {"temperature": 0.6, "top_p": 0.95}
    assert model.decoding.decoder.weight_format == "int8"
    assert model.template is not None and model.template.source == TEMPLATES["role_tokens"]
    assert told == ["Packing the weights of source as int8"]
    engine = model.decoding.engine(max_requests=1, capacity=32)
    assert engine.submit([5], max_new_tokens=2).result().tokens


def test_a_template_ends_a_turn_by_its_own_token(source: Path) -> None:
    settings = source / "tokenizer_config.json"
    template = TEMPLATES["chatml_tools_think"]
    edit(settings, extra_special_tokens=["<|im_end|>"], chat_template=template)
    model = TextModel.load(source, dtype="bfloat16", cache_dtype="int8", name="mine")
    assert model.eos_token_ids == (1, model.tokenizer.inner.token_to_id("<|im_end|>"))
    assert model.name == "mine" and model.decoding.cache_dtype == "int8"


def test_other_tokenizers_and_templates(source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(KJV)
    (source / "tokenizer.json").unlink()
    given = TextModel.load(source, tokenizer=tokenizer, chat_template="{{ messages[0].content }}")
    assert given.tokenizer is tokenizer and given.template is not None
    assert given.template.render([{"role": "user", "content": "a"}]) == "a"
    file = tmp_path / "template.jinja"
    file.write_text("{{ eos_token }}")
    from_files = TextModel.load(source, tokenizer=KJV, chat_template=file)
    assert from_files.template.render([{"role": "user", "content": "a"}]) == "</s>"
    template = ChatTemplate("x", special_tokens={})
    assert TextModel.load(source, tokenizer=KJV, chat_template=template).template is template


def test_a_saved_model_has_its_format_and_its_hash(source: Path, tmp_path: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(source, "int4", keep_model=False)
    folder = tmp_path / "saved"
    decoding.save(folder)
    model = TextModel.load(folder)
    assert model.decoding.decoder.weight_format == "int4"
    tokenizer = model.tokenizer
    assert model.decoding.fingerprint(tokenizer) == decoding.fingerprint(tokenizer)
    assert TextModel.load(folder, dtype="int4").name == "saved"
    with pytest.raises(ValueError, match=r"dtype is int8; expected int4, in which .* was saved"):
        TextModel.load(folder, dtype="int8")
    manifest = json.loads((folder / "lmdecode.json").read_text())
    assert manifest["model_class"] == "MistralForCausalLM"
    assert manifest["weights_hash"] == decoding.fingerprint().weights_hash
    # What it is saved as again is the same.
    model.decoding.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "lmdecode.json").read_text())
    assert again["weights"] == manifest["weights"]
    assert Tokenizer.load(tmp_path / "again").get_vocab() == tokenizer.get_vocab()


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_word_model

    path = tmp_path / "words.gguf"
    write_word_model(path, ["the", "cat", "sat"])
    model = TextModel.load(path)
    assert model.name == "words" and model.context_length and model.template is None
    assert model.decoding.decoder.weight_format == "file"
    assert TextModel.load(path, dtype="file").decoding.decoder.weight_format == "file"
    assert TextModel.load(path, dtype="int8").decoding.decoder.weight_format == "int8"


@pytest.mark.parametrize(
    ("model", "message"),
    [("none.gguf", "there is no file or folder 'none.gguf'"), ("./a/b", "there is no file or"),
     ("name", "there is no file or folder 'name'"), (Path("a"), "there is no file or folder 'a'"),
     ("no-such/model-here", "nor a model of this name in the cache or on the hub")],
)  # fmt: skip
def test_models_that_are_not_there(
    model: str | Path, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=message):
        TextModel.load(model)


def test_folders_without_a_model(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        TextModel.load(source)
    edit(source / "config.json", model_type="bert")
    with pytest.raises(ValueError, match="bert"):
        TextModel.load(source, tokenizer=KJV)


def streamed(tokenizer: Tokenizer, ids: list[int], parts: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    texts, at = [], 0
    for part in parts:
        texts.append(stream.push(ids[at : at + part]))
        at += part
    return [*texts, stream.push(ids[at:]), stream.finish()]


@functools.cache
def made(kind: str, cleans_up: bool = False) -> Tokenizer:
    """Make a tokenizer, once for all examples."""
    return Tokenizer(tokenizer_of(kind), cleans_up=cleans_up)


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_text_is_that_of_decode(kind: str, cleans_up: bool, data: st.DataObject) -> None:
    tokenizer = made(kind, cleans_up)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=14))
    parts = data.draw(st.lists(st.integers(0, 3), max_size=14))
    skip = data.draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, parts, skip)) == text


@given(st.text(max_size=12))
@settings(max_examples=100, deadline=None)
@example("\U0001f600 \u4e2d\u6587 a.")
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_without_prefix"])
def test_texts_come_back_token_by_token(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = "".join(streamed(tokenizer, ids, [1] * len(ids), False))
    assert whole == tokenizer.decode(ids, skip_special_tokens=False)
    if kind == "byte_level":
        assert whole == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_character_comes_when_it_is_whole() -> None:
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    ids = tokenizer.encode("a\U0001f600b", add_special_tokens=False)
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "\U0001f600", "b"]


def test_bytes_come_when_their_run_is_over_or_is_no_text() -> None:
    """A byte that follows can make each byte of the run before it a U+FFFD."""
    tokenizer = Tokenizer(tokenizer_of("sentencepiece_without_prefix"))
    run = [tokenizer.inner.token_to_id(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    a = tokenizer.inner.token_to_id("a")
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in [*run, a]] == ["", "", "", "", "\U0001f600a"]
    stream = tokenizer.stream()
    texts = [stream.push([token]) for token in [*run, run[-1], run[0], a]]
    assert texts == ["", "", "", "", "\ufffd" * 5, "\ufffd", "a"]


def test_words_of_every_kind_come_at_once() -> None:
    """But for decoders that need the whole text."""
    for kind in KINDS:
        tokenizer = Tokenizer(tokenizer_of(kind))
        ids = [tokenizer.inner.token_to_id(word) for word in ("he", "he", "he", "he")]
        stream = tokenizer.stream()
        first = stream.push(ids)
        waits = kind in ("ctc", "pattern_behind_fuse")
        assert (first == "") == waits, kind
