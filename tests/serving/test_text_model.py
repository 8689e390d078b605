"""Models with tokenizers and templates: names, ends, failures, and texts of tokens as they come."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import lmdecode  # noqa: E402
from lmdecode.generation_options import OPTIONS  # noqa: E402
from lmdecode.serving import ChatTemplate, TextModel, Tokenizer  # noqa: E402
from lmdecode.serving.text_model import defaults_of, is_causal  # noqa: E402
from lmdecode.serving.text_stream import held  # noqa: E402
from tests.serving.servers import create_app, post, serving  # noqa: E402
from tests.serving.test_chat_template import TEMPLATES  # noqa: E402
from tests.serving.tokenizer_kinds import KINDS, KJV, tokenizer_of  # noqa: E402


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


G2P = KJV.parents[1] / "g2p/model"
PROMPTS = {KJV: "And the LORD spake unto Moses", G2P: "acacia"}
NEW, VOCAB = 12, 4096
GREEDY = [14, 544, 14, 201, 2971, 323]  # the words that the model itself writes
SOON = 14  # one of them, as an end
# Of an encoder-decoder model, also with beams.
OF_TEXTS: list[dict[str, Any]] = [
    {"max_length": 5}, {"min_length": 12}, {"forced_bos_token_id": 9},
    {"max_length": 6, "forced_eos_token_id": 0}, {"bad_words_ids": [[70], [3]]},
]  # fmt: skip
CASES: list[tuple[Path, dict[str, Any], int]] = [
    *((KJV, {"do_sample": False, **entries}, 1) for entries in (
        {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[GREEDY[0]]]}, {"bad_words_ids": [GREEDY[:2], GREEDY[3:5]]},
        {"suppress_tokens": GREEDY[:3]}, {"stop_strings": ["saying", "xx"]},
        {"sequence_bias": [[GREEDY[:1], -9.0], [GREEDY[1:3], -9.5], [[5, 6], 1.0]]},
        {"eos_token_id": SOON, "min_new_tokens": 4}, {"eos_token_id": SOON, "min_length": 11},
        {"eos_token_id": SOON, "min_length": 30, "min_new_tokens": 3}, {"max_length": 15},
        {"max_new_tokens": 7, "max_length": 11}, {"forced_eos_token_id": 1},
    )),
    (KJV, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "length_penalty": 3.0,
           "early_stopping": True, "suppress_tokens": GREEDY[:1], "eos_token_id": SOON,
           "bad_words_ids": [[544], [SOON]], "sequence_bias": [[[494], 4.0]],
           "min_new_tokens": 3}, 3),
    *((G2P, {"do_sample": False, **entries}, beams) for entries in OF_TEXTS for beams in (1, 3)),
]  # fmt: skip


def folder_with(path: Path, source: Path, **entries: Any) -> Path:
    """Make a folder of a model of which only the generation config is another."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    file = path / "generation_config.json"
    known = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**known, **entries}))
    return path


@functools.cache
def reference(source: Path) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer."""
    kind = transformers.AutoModelForSeq2SeqLM if source == G2P else transformers.MistralForCausalLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return kind.from_pretrained(source, dtype="float32"), tokenizer


def generated(folder: Path, **options: Any) -> tuple[str, int]:
    """Return the text of transformers, and its number of new tokens."""
    source = (folder / "config.json").resolve().parent
    model, tokenizer = reference(source)
    config = transformers.GenerationConfig.from_pretrained(folder)
    ids = tokenizer(PROMPTS[source], return_tensors="pt").input_ids
    begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
    tokens = model.generate(ids, generation_config=config, tokenizer=tokenizer, **options)
    tokens = tokens[0, begin:].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)


def asked(folder: Path, **body: Any) -> tuple[int, Any]:
    model = TextModel.load(folder, dtype="float32")
    sizes = {} if is_causal(model.decoding) else {"source": 16, "num_beams": 3}
    engine = model.decoding.engine(max_requests=4, capacity=63, **sizes)
    with serving(create_app(engine, model)) as port:
        prompt = PROMPTS[(folder / "config.json").resolve().parent]
        found = post(port, "/v1/completions", {"prompt": prompt, **body})
    engine.stop()
    return found


def answered(folder: Path, **body: Any) -> tuple[str, int]:
    # Of what ends a text, transformers' has all.
    status, got = asked(folder, include_stop_str_in_output=True, **body)
    assert status == 200, got
    return got["choices"][0]["text"], got["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("source", "entries", "beams"), CASES, ids=[f"{'-'.join(e)}-{n}" for _, e, n in CASES]
)
def test_answers_are_those_of_generate(
    source: Path, entries: dict[str, Any], beams: int, tmp_path: Path
) -> None:
    folder, plain = folder_with(tmp_path / "a", source, **entries), tmp_path / "b"
    new = source == KJV and not entries.keys() & {"max_length", "max_new_tokens"}
    wanted = generated(folder, num_beams=beams, **({"max_new_tokens": NEW} if new else {}))
    body = {"num_beams": beams, **({"max_tokens": NEW} if new else {})}
    assert answered(folder, **body) == wanted
    if source == KJV:
        of_model = generated(folder_with(plain, KJV), num_beams=beams, max_new_tokens=NEW)
        assert wanted != of_model, "the entry has an effect"


def test_fields_of_a_request_win(tmp_path: Path) -> None:
    entries = {"suppress_tokens": GREEDY[:3], "bad_words_ids": [[5, 6]], "max_new_tokens": 3,
               "sequence_bias": [[GREEDY[:1], -9.0]], "min_new_tokens": 5,
               "stop_strings": ","}  # fmt: skip
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, **entries)
    plain = folder_with(tmp_path / "plain", KJV, do_sample=False)
    own = {"suppress_tokens": [9], "logit_bias": {str(GREEDY[0]): 0}, "max_tokens": NEW,
           "min_tokens": 0, "stop": []}  # fmt: skip
    assert answered(folder, **own) == answered(plain, max_tokens=NEW)


def test_a_grammar_has_no_token_forced(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, forced_eos_token_id=1)
    plain = folder_with(tmp_path / "plain", KJV, do_sample=False)
    body = {"max_tokens": 4, "guided_regex": "[a-z]{40}"}
    assert answered(folder, **body) == answered(plain, **body)


def test_a_longer_prompt_than_max_length_needs_max_tokens(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", KJV, max_length=4)
    status, got = asked(folder)
    assert status == 400 and got["error"]["param"] == "prompt"
    assert "expected fewer than 4, the max_length of the model" in got["error"]["message"]
    assert asked(folder, max_tokens=2)[0] == 200


def test_what_answers_cannot_follow_is_said_once(tmp_path: Path) -> None:
    entries = {"num_beams": 4, "begin_suppress_tokens": [3], "max_time": 2.0, "top_h": 0.4}
    neutral = {"num_return_sequences": 1, "guidance_scale": None, "remove_invalid_values": False,
               "num_assistant_tokens": 9, "use_cache": True, "chat_format": "chatml"}  # fmt: skip
    folder = folder_with(tmp_path / "model", KJV, **entries, **neutral)
    message = "of model has max_time, num_beams, begin_suppress_tokens, which answers do not follow"
    with pytest.warns(UserWarning, match=message):
        assert TextModel.load(folder).generation_defaults == {"top_h": 0.4}


def test_every_option_of_a_config_is_followed_or_named() -> None:
    known = [option for option in OPTIONS if option.continuous is not None]
    quiet = {o.name for o in known if o.batch == "ignores" or o.continuous == "ignored"}
    with pytest.warns(UserWarning, match="which answers do not follow") as told:
        config = {option.name: 3 for option in known}
        defaults = defaults_of(config, "x", Tokenizer.load(KJV), VOCAB)
    for name in {option.name for option in known} - {"eos_token_id"}:
        is_named = f" {name}," in str(told[0].message)
        assert is_named or name in defaults or name in quiet, name
        assert not (is_named and name in defaults), name


def test_biases_are_read_as_transformers_saves_a_dict(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(sequence_bias={(14,): -9.0, (544, 14): -9.5})
    saved = json.loads(config.to_json_string())["sequence_bias"]
    assert saved == {"(14,)": -9.0, "(544, 14)": -9.5}
    pairs = [[[14], -9.0], [[544, 14], -9.5]]
    texts = [answered(folder_with(tmp_path / name, KJV, do_sample=False, sequence_bias=biases),
                      max_tokens=NEW)
             for name, biases in (("dict", saved), ("pairs", pairs))]  # fmt: skip
    assert texts[0] == texts[1] == generated(tmp_path / "pairs", max_new_tokens=NEW)


def test_what_no_request_could_ask_for_is_left_out_with_its_reason(tmp_path: Path) -> None:
    entries: dict[str, Any] = {
        "temperature": "0.7", "top_p": 2.0, "repetition_penalty": 0.0, "no_repeat_ngram_size": -1,
        "bad_words_ids": [[]], "suppress_tokens": [3, VOCAB], "eos_token_id": [SOON, VOCAB],
        "sequence_bias": [[14, -5.0]], "max_length": 0, "min_new_tokens": -2, "min_length": 0.5,
        "length_penalty": "long", "early_stopping": "soon", "num_beam_groups": 0,
        "diversity_penalty": "much", "forced_bos_token_id": 5000, "forced_eos_token_id": [1, 2],
        "stop_strings": ["a"] * 17, "do_sample": "yes",
    }  # fmt: skip
    with pytest.warns(UserWarning) as told:
        found = defaults_of({**entries, "top_k": 5.0}, "x", Tokenizer.load(KJV), VOCAB)
    assert found == {"top_k": 5} and len(told) == 1
    names, _, reasons = str(told[0].message).partition(", which answers do not follow (")
    assert set(names.removeprefix("the generation config of x has ").split(", ")) == set(entries)
    assert "max_length is 0; expected an int, 2 to" in reasons
    assert "forced_eos_token_id is [1, 2]; expected an int, 0 to 4095; " in reasons
    # Some of them transformers refuses as well, so they never reach a server.
    refused = {"temperature", "early_stopping", "do_sample", "num_beam_groups"}
    left = {name: value for name, value in entries.items() if name not in refused}
    with pytest.warns(UserWarning, match="which answers do not follow"):
        folder = folder_with(tmp_path / "model", KJV, **left)
        plain = folder_with(tmp_path / "plain", KJV, eos_token_id=SOON)
        for body in ({"temperature": 0, "max_tokens": NEW}, {"num_beams": 2, "max_tokens": NEW}):
            assert answered(folder, **body) == answered(plain, **body)


@pytest.mark.parametrize("groups", [None, 1, 3])
def test_groups_of_a_search_that_do_not_fit_a_request_are_left_out(
    groups: int | None, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "model", KJV, num_beam_groups=2, diversity_penalty=0.5)
    plain = folder_with(tmp_path / "plain", KJV, **({"diversity_penalty": 0.5} if groups else {}))
    body = {"num_beams": 3, "max_tokens": 4, "num_beam_groups": groups}
    assert answered(folder, **body) == answered(plain, **body)


class Looked(str):
    """A text that counts how often it is looked at."""

    times = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("endswith", "find"):
            self.times += 1
        return super().__getattribute__(name)


@given(st.text("ab<", max_size=9), st.lists(st.text("ab<", max_size=7), max_size=4))
def test_the_longest_beginning_of_a_word_is_held(text: str, words: list[str]) -> None:
    begun = [n for word in words for n in range(1, len(word)) if text.endswith(word[:n])]
    assert held(text, words) == max(begun, default=0)


def test_a_text_is_looked_at_where_words_may_begin_alone() -> None:
    text = Looked("hello world, this is <")
    assert held(text, ["[TOOL_CALLS]", "<tool_call>", "```python"]) == 1
    assert text.times == 3
