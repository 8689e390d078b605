"""A model's generation config is what requests have where they say nothing else."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lmdecode.generation_options import OPTIONS  # noqa: E402
from lmdecode.serving.text_model import TextModel, defaults_of, is_causal  # noqa: E402
from tests.serving.servers import KJV, TEMPLATE, create_app, post, served, serving  # noqa: E402

G2P = KJV.parents[1] / "g2p/model"
KEEPS = {"include_stop_str_in_output": True}  # as transformers does
PROMPT, NEW = "And the LORD spake unto Moses", 12
GREEDY = [14, 544, 14, 201, 2971, 323]  # the words that the model itself writes
SOON = 14  # one of them, as an end


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


def load(folder: Path, **options: Any) -> TextModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return TextModel.load(folder, dtype="float32", **options)


@functools.cache
def reference(source: Path) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer."""
    kind = transformers.AutoModelForSeq2SeqLM if source == G2P else transformers.MistralForCausalLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return kind.from_pretrained(source, dtype="float32"), tokenizer


def generated(folder: Path, prompt: str, **options: Any) -> tuple[str, int]:
    """Return the text of transformers, and its number of new tokens."""
    model, tokenizer = reference((folder / "config.json").resolve().parent)
    config = transformers.GenerationConfig.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
    tokens = model.generate(ids, generation_config=config, tokenizer=tokenizer, **options)
    tokens = tokens[0, begin:].tolist()
    return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)


def answered(folder: Path, prompt: str, **body: Any) -> tuple[str, int]:
    model = load(folder)
    sizes = {} if is_causal(model.decoding) else {"source": 16, "num_beams": 3}
    engine = model.decoding.engine(max_requests=4, capacity=63, **sizes)
    with serving(create_app(engine, model)) as port:
        status, got = post(port, "/v1/completions", {"prompt": prompt, **KEEPS, **body})
    engine.stop()
    assert status == 200, got
    return got["choices"][0]["text"], got["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "entries",
    [
        {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[GREEDY[0]]]}, {"bad_words_ids": [GREEDY[:2], GREEDY[3:5]]},
        {"suppress_tokens": GREEDY[:3]},
        {"sequence_bias": [[GREEDY[:1], -9.0], [GREEDY[1:3], -9.5], [[5, 6], 1.0]]},
        {"eos_token_id": SOON}, {"eos_token_id": SOON, "min_new_tokens": 4},
        {"eos_token_id": SOON, "min_length": 11}, {"eos_token_id": SOON, "min_length": 30,
                                                   "min_new_tokens": 3},
        {"max_length": 15}, {"max_new_tokens": 7}, {"max_new_tokens": 7, "max_length": 11},
        {"forced_eos_token_id": 1},
    ],
    ids=lambda entries: "-".join(entries),
)  # fmt: skip
def test_greedy_answers_are_those_of_generate(entries: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, **entries)
    length = {} if entries.keys() & {"max_length", "max_new_tokens"} else {"max_tokens": NEW}
    wanted = generated(folder, PROMPT, **({"max_new_tokens": NEW} if length else {}))
    assert answered(folder, PROMPT, **length) == wanted
    plain = folder_with(tmp_path / "plain", KJV, do_sample=False)
    assert wanted != generated(plain, PROMPT, max_new_tokens=NEW), "the entry has an effect"


@pytest.mark.parametrize(
    "entries",
    [
        {}, {"max_length": 5}, {"min_length": 12}, {"forced_bos_token_id": 9},
        {"max_length": 6, "forced_eos_token_id": 0}, {"bad_words_ids": [[70], [3]]},
    ],
    ids=lambda entries: "-".join(entries) or "plain",
)  # fmt: skip
@pytest.mark.parametrize("num_beams", [1, 3])
def test_so_are_those_of_an_encoder_decoder_model(
    entries: dict[str, Any], num_beams: int, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "model", G2P, do_sample=False, **entries)
    wanted = generated(folder, "acacia", num_beams=num_beams)
    assert answered(folder, "acacia", num_beams=num_beams) == wanted


def test_a_search_has_the_rules_of_searches(tmp_path: Path) -> None:
    entries = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "length_penalty": 3.0,
               "early_stopping": True, "suppress_tokens": GREEDY[:1], "eos_token_id": SOON,
               "bad_words_ids": [[544], [SOON]], "sequence_bias": [[[494], 4.0]],
               "min_new_tokens": 3, "do_sample": False}  # fmt: skip
    folder = folder_with(tmp_path / "model", KJV, **entries)
    wanted = generated(folder, PROMPT, num_beams=3, max_new_tokens=NEW)
    assert answered(folder, PROMPT, num_beams=3, max_tokens=NEW) == wanted
    plain = folder_with(tmp_path / "plain", KJV)
    assert wanted != generated(plain, PROMPT, num_beams=3, max_new_tokens=NEW)


def test_a_stop_text_of_the_config_ends_an_answer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, stop_strings=["saying", "xx"])
    wanted, count = generated(folder, PROMPT, max_new_tokens=NEW)
    assert wanted.endswith("saying") and count < NEW
    assert answered(folder, PROMPT, max_tokens=NEW) == (wanted, count)
    assert answered(folder, PROMPT, max_tokens=NEW, stop=["zz"])[1] == NEW


def test_fields_of_a_request_win(tmp_path: Path) -> None:
    entries = {"suppress_tokens": GREEDY[:3], "bad_words_ids": [[5, 6]], "max_new_tokens": 3,
               "sequence_bias": [[GREEDY[:1], -9.0]], "min_new_tokens": 5}  # fmt: skip
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, **entries)
    plain = folder_with(tmp_path / "plain", KJV, do_sample=False)
    own = {"suppress_tokens": [9], "logit_bias": {str(GREEDY[0]): 0}, "max_tokens": NEW,
           "min_tokens": 0}  # fmt: skip
    assert answered(folder, PROMPT, **own) == answered(plain, PROMPT, max_tokens=NEW)


def test_a_grammar_has_no_token_forced(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = folder_with(tmp_path / "model", KJV, do_sample=False, forced_eos_token_id=1)
    plain = folder_with(tmp_path / "plain", KJV, do_sample=False)
    body = {"max_tokens": 4, "guided_regex": "[a-z]{40}"}
    assert answered(folder, PROMPT, **body) == answered(plain, PROMPT, **body)


def test_a_longer_prompt_than_max_length_needs_max_tokens(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", KJV, max_length=4)
    with served(load(folder, chat_template=TEMPLATE)) as port:
        status, got = post(port, "/v1/completions", {"prompt": PROMPT})
        assert status == 400 and got["error"]["param"] == "prompt"
        assert "expected fewer than 4, the max_length of the model" in got["error"]["message"]
        ask = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
        assert post(port, "/v1/chat/completions", ask)[0] == 200


def test_what_answers_cannot_follow_is_said_once(tmp_path: Path) -> None:
    entries = {"num_beams": 4, "begin_suppress_tokens": [3], "max_time": 2.0, "top_h": 0.4,
               "exponential_decay_length_penalty": [5, 1.1], "penalty_alpha": 0.6}  # fmt: skip
    neutral = {"num_return_sequences": 1, "guidance_scale": None, "remove_invalid_values": False,
               "num_assistant_tokens": 9, "use_cache": True, "chat_format": "chatml"}  # fmt: skip
    folder = folder_with(tmp_path / "model", KJV, **entries, **neutral)
    message = (
        r"the generation config of model has max_time, num_beams, begin_suppress_tokens, "
        r"exponential_decay_length_penalty, penalty_alpha, which answers do not follow"
    )
    with pytest.warns(UserWarning, match=message):
        model = TextModel.load(folder)
    assert model.generation_defaults == {"top_h": 0.4}


def test_every_option_of_a_config_is_followed_or_named() -> None:
    known = [option for option in OPTIONS if option.continuous is not None]
    quiet = {o.name for o in known if o.batch == "ignores" or o.continuous == "ignored"}
    with pytest.warns(UserWarning, match="which answers do not follow") as told:
        defaults = defaults_of({option.name: 3 for option in known}, "x")
    message = str(told[0].message)
    for name in {option.name for option in known} - {"eos_token_id"}:
        assert (name in defaults) + (f" {name}," in message) + (name in quiet) >= 1, name
        assert not (name in defaults and f" {name}," in message), name
