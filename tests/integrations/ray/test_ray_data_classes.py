"""The classes for Ray Data, called as its actors call them; no Ray is needed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from ray_stand_in import G2P, KJV

import lmdecode
from lmdecode.integrations.ray.data import Generate, Transcribe, Translate
from lmdecode.integrations.ray.rows import row_seeds
from tests.decoder.whisper_models import audio, extractor, make_whisper
from tests.support.word_tokenizer import word_tokenizer

PROMPTS = [
    "In the beginning", "And", "The LORD said unto Moses, Speak unto the children of Israel",
    "Blessed is the man", "And it came to pass in those days, that", "In the beginning",
    "Thou shalt not", "Verily, verily, I say unto you, He that heareth my word",
]  # fmt: skip
ROWS = [{"prompt": prompt, "id": row} for row, prompt in enumerate(PROMPTS)]
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.9, "seed": 3}


def column(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def batch_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: column([row[name] for row in rows]) for name in rows[0]}


def run(call: Callable[[Any], Any], rows: list[Any], sizes: list[int]) -> dict[Any, Any]:
    """Return "text" and "tokens" by id, of rows in batches of these sizes, one after the other."""
    found = {}
    rows, sizes = list(rows), list(sizes)
    while rows:
        size = sizes.pop(0) if sizes else 1
        part, rows = rows[:size], rows[size:]
        output = call(batch_of(part))
        for row, text, tokens in zip(part, output["text"], output["tokens"], strict=True):
            found[row["id"]] = (text, tokens)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        SAMPLED,
        SAMPLED | {"repetition_penalty": 1.4, "temperature": 0.7},
        SAMPLED | {"no_repeat_ngram_size": 2, "pad_token_id": 7},
        SAMPLED | {"stop_strings": ["the", "LORD"]},
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "prompt_lookup_num_tokens": 4},
        {"max_new_tokens": 12, "num_beams": 3, "length_penalty": 0.5},
        {"max_new_tokens": 12, "num_beams": 2, "repetition_penalty": 1.4},
        {"max_new_tokens": 40, "eos_token_id": [1, 16, 298]},
    ],
    ids=lambda arguments: " ".join(sorted(arguments)),
)
def test_a_row_is_the_same_in_any_batch(arguments: dict[str, Any]) -> None:
    generate = Generate(KJV, **arguments)
    alone = run(generate, ROWS, [])
    assert run(generate, ROWS, [8]) == alone
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    assert run(generate, shuffled, [3, 2, 3]) == alone


def test_texts_are_those_of_generate_with_the_seed_of_the_row() -> None:
    generate = Generate(KJV, **SAMPLED)
    output = generate(batch_of(ROWS))
    assert list(output["prompt"]) == PROMPTS and list(output["id"]) == list(range(8))
    decoding, seeds = lmdecode.Decoding.from_pretrained(KJV), row_seeds("", 3, batch_of(ROWS), [])
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([generate._tokenizer(prompt).input_ids])
        alone = decoding.generate(
            ids, do_sample=True, top_p=0.9, max_new_tokens=12, seed=seeds[row]
        )
        assert output["tokens"][row] == alone[0, ids.shape[1] :].tolist()
        assert output["text"][row] == generate._tokenizer.decode(
            output["tokens"][row], skip_special_tokens=True
        )


def test_one_engine_writes_the_rows_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(PROMPTS)
    rows = [*ROWS, {"prompt": long, "id": 8}, {"prompt": f"{long} and", "id": 9}]
    expected = run(Generate(KJV, **SAMPLED), rows, [10])
    decoding, engines = lmdecode.Decoding.from_pretrained(KJV), list[lmdecode.Engine]()
    make = decoding.engine

    def engine(**sizes: Any) -> lmdecode.Engine:
        engines.append(make(**sizes))
        return engines[-1]

    def refuse(*inputs: Any, **arguments: Any) -> Any:
        raise AssertionError("generate() was called")

    monkeypatch.setattr(decoding, "engine", engine)
    monkeypatch.setattr(decoding, "generate", refuse)
    assert run(Generate(decoding, KJV, **SAMPLED), rows, [3, 4, 2, 1]) == expected
    assert len(engines) == 1
    assert engines[0].stats.cached_tokens > 0  # the beginning of the last prompt
    with pytest.raises(AssertionError, match="was called"):
        Generate(decoding, KJV, num_beams=2)(batch_of(ROWS))


def test_an_engine_grows_with_the_longest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(Generate(KJV, **SAMPLED), ROWS, [8])
    monkeypatch.setattr("lmdecode.integrations.ray.data.CAPACITY", 16)
    assert run(Generate(KJV, **SAMPLED), ROWS, [1, 1, 6]) == expected


def test_seeds_come_from_ids_or_from_prompts() -> None:
    generate = Generate(KJV, **SAMPLED)
    by_prompt = generate({"prompt": column(PROMPTS)})
    assert by_prompt["text"][0] == by_prompt["text"][5]  # of one prompt
    by_id = generate(batch_of(ROWS))
    assert by_id["text"][0] != by_id["text"][5]
    another = Generate(KJV, **SAMPLED | {"seed": 4})(batch_of(ROWS))
    assert list(another["text"]) != list(by_id["text"])
    texts = [str(row["id"]) for row in ROWS]
    named = generate({"prompt": column(PROMPTS), "id": column(texts)})
    assert list(named["text"]) != list(by_id["text"])
    small = generate({"prompt": column(PROMPTS), "id": np.arange(8, dtype=np.int32)})
    assert list(small["text"]) == list(by_id["text"])


def test_seeds_stay_those_of_earlier_releases() -> None:
    ids = {"id": column([0, -1, "a"])}
    assert row_seeds("", 1, ids, []) == SEEDS
    assert len(set(row_seeds("", 0, {"id": range(10000)}, []))) == 10000


SEEDS = [1990323284725668403, 1872056657312693819, 3843928710771618140]


def test_a_packed_folder_gives_the_same_texts(tmp_path: Path) -> None:
    expected = Generate(KJV, dtype="int8", **SAMPLED)(batch_of(ROWS))
    lmdecode.Decoding.from_pretrained(KJV, "int8", keep_model=False).save(tmp_path / "packed")
    packed = Generate(tmp_path / "packed", KJV, **SAMPLED)
    assert packed(batch_of(ROWS))["tokens"] == expected["tokens"]
    with pytest.raises(ValueError, match="dtype is 'int8'; expected None"):
        Generate(tmp_path / "packed", KJV, dtype="int8")


def test_an_empty_batch_has_the_columns() -> None:
    output = Generate(KJV)({"prompt": column([])})
    assert list(output) == ["prompt", "text", "tokens"] and output["tokens"] == []


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 4}, {"num_beams": 3, "max_new_tokens": 5}])
def test_translations_are_the_same_in_any_batch(arguments: dict[str, Any]) -> None:
    words = ["through", "tough", "a", "pronunciation", "read", "decoder"]
    rows = [{"source": word, "id": word} for word in words]
    translate = Translate(G2P, **arguments)
    alone = run(translate, rows, [])
    assert run(translate, rows, [6]) == run(translate, rows[::-1], [4, 2]) == alone
    ids = [translate._tokenizer(word).input_ids for word in words]
    results = lmdecode.Decoding.from_pretrained(G2P).translate(ids, **arguments)
    assert [result.new_tokens() for result in results] == [alone[word][1] for word in words]


class Processor:
    """What a processor of Whisper is made of, of a tiny model."""

    def __init__(self) -> None:
        self.feature_extractor = extractor()
        self.tokenizer = word_tokenizer(60000)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_beams": 2},
        {"do_sample": True, "seed": 2},
        {"do_sample": True, "temperature": 0.9, "seed": 2},
        {"temperature": 0.9, "seed": 2},
    ],
)
def test_transcripts_are_the_same_in_any_batch(arguments: dict[str, Any]) -> None:
    decoding = lmdecode.Decoding.from_pretrained(make_whisper())
    lengths = [2.0, 0.5, 1.5, 1.1] + ([] if "do_sample" in arguments else [4.7])
    rows = [{"audio": audio(length, n), "id": n} for n, length in enumerate(lengths)]
    transcribe = Transcribe(decoding, Processor(), language="en", **arguments)
    alone = run(transcribe, rows, [])
    assert run(transcribe, rows, [5]) == run(transcribe, rows[::-1], [2, 3]) == alone
    assert all(tokens for _, tokens in alone.values())
    named = [{"audio": {"array": row["audio"], "sampling_rate": 16000}, "id": row["id"]}
             for row in rows]  # fmt: skip
    assert run(transcribe, named, [5]) == alone


WRONG_BATCHES: list[tuple[Any, type[Exception], str]] = [
    ({"text": column(["a"])}, ValueError, "columns are 'text'; expected one of the name 'prompt'"),
    ({"prompt": column([None])}, TypeError, "column 'prompt', row 0 of the batch, is of type None"),
    ({"prompt": column(["a", 3])}, TypeError, "column 'prompt', row 1 of the batch, is of type in"),
    ({"prompt": column(["a"]), "text": column(["b"])}, ValueError, "there is a column 'text'"),
    ({"prompt": column(["a"]), "id": column([1.5])}, TypeError, "column 'id', row 0 of the batch"),
    ({"prompt": column(["a"]), "id": column([True])}, TypeError, "expected an int or str"),
    (["a"], TypeError, "the batch is of type list; expected a dict of columns"),
]


@pytest.mark.parametrize(("batch", "kind", "message"), WRONG_BATCHES)
def test_wrong_batches_are_named(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Generate(KJV, max_new_tokens=1)(batch)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("a.wav", TypeError, "column 'audio', row 0 of the batch, is of type str; expected an arr"),
        (None, TypeError, "is of type NoneType"),
        (np.zeros(5, np.int16), ValueError, "dtype int16; expected"),
        (np.zeros((2, 5), np.float32), ValueError, r"shape \[2, 5\]"),
        (np.full(5, np.nan), ValueError, "not finite"),
        ({"array": np.zeros(5), "sampling_rate": 8000}, ValueError, "sampling_rate 8000"),
    ],
)
def test_wrong_sounds_are_named(value: Any, kind: type[Exception], message: str) -> None:
    from lmdecode.integrations.ray.rows import audio_of

    with pytest.raises(kind, match=message):
        audio_of("Transcribe", {"audio": column([value])}, "audio")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"seed": -1}, ValueError, "seed is -1; expected at least 0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"max_length": 10}, ValueError, "max_length is given; expected none"),
        ({"streamer": 1}, ValueError, "streamer is given"),
        ({"num_beams": 2, "do_sample": True}, ValueError, "do_sample is True with num_beams 2"),
        ({"model": G2P}, ValueError, "an encoder-decoder model; expected a decoder-only one"),
        ({"model": 5}, TypeError, "model is of type int; expected a folder"),
        ({"model": "nowhere/at/all"}, OSError, "nowhere"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Generate(**{"model": KJV} | arguments)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="not an encoder-decoder one"):
        Translate(KJV)
    with pytest.raises(ValueError, match="model is a 'marian'; expected a Whisper"):
        Transcribe(G2P)
    with pytest.raises(ValueError, match="temperature is"):
        Transcribe(lmdecode.Decoding.from_pretrained(make_whisper()), Processor(),
                   temperature=(0.0, 0.2))  # fmt: skip
    with pytest.raises(TypeError, match="tokenizer is None beside a Decoding"):
        Generate(lmdecode.Decoding.from_pretrained(KJV))
