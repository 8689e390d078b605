"""``Decoding.translate`` against ``model.generate()``, and what it refuses."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lmdecode
from lmdecode.decoder import translation
from lmdecode.decoder.state import caches_bytes
from lmdecode.decoder.translation import Translator
from tests.decoder.decoder_models import END, MODELS, PAD, VOCAB, make_inputs, pair
from tests.support.causal_models import random_model
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

NEW = 9


def lists(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    return [
        ids[mask != 0].tolist()
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", sorted(MODELS.keys() - {"whisper"}))
def test_tokens_are_those_of_generate(kind: str, num_beams: int) -> None:
    """Of sources of any length, cut into batches, in the order in which they came."""
    model, decoding = pair(kind)
    inputs = make_inputs(kind, 7)
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams}
    options["max_new_tokens"] = NEW
    with torch.no_grad():
        expected = model.generate(
            **inputs, **options, return_dict_in_generate=True, output_scores=True
        )
    found = decoding.translate(lists(inputs), max_batch_tokens=30, **options)
    assert [result.request_id for result in found] == list(range(7))
    sequences = expected.sequences.view(7, num_beams, -1)
    for result, rows in zip(found, sequences.tolist(), strict=True):
        for tokens, length, row in zip(result.sequences, result.lengths, rows, strict=True):
            assert tokens[:length].tolist() == row[:length]
            assert set(row[length:]) <= {PAD}
    if num_beams > 1:  # of the same memories, bit for bit
        scores = torch.cat([result.scores for result in found]).float()
        arguments = {**inputs, **options, "return_dict_in_generate": True, "output_scores": True}
        assert scores.equal(decoding.generate(**arguments).sequences_scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_source_depends_on_no_other(dtype: str) -> None:
    model, _ = pair("marian")
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    sources = lists(make_inputs("marian", 9))
    together = decoding.translate(sources, num_beams=3, max_new_tokens=NEW)
    for source, result in zip(sources, together, strict=True):
        (alone,) = decoding.translate([source], num_beams=3, max_new_tokens=NEW)
        assert alone.sequences.equal(result.sequences) and alone.scores.equal(result.scores)
        assert alone.num_steps == result.num_steps and alone.status == result.status


def test_a_result_has_memory_of_its_own() -> None:
    """Neither the batch's, which pickle would write with it, nor that of a call to come."""
    _, decoding = pair("marian")
    sources = lists(make_inputs("marian", 9))
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW}
    found = decoding.translate(sources, **options)
    for result in found:
        for tensor in (result.sequences, result.scores, result.lengths, result.log_probs):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    before = [result.sequences.tolist() for result in found]
    decoding.translate(sources[::-1], **options)
    assert [result.sequences.tolist() for result in found] == before


def test_threads_share_a_decoding() -> None:
    _, decoding = pair("marian")
    sources = lists(make_inputs("marian", 9))

    def call(number: int) -> list[list[list[int]]]:
        mine = sources[number % 4 :]
        found = decoding.translate(
            mine, num_beams=1 + number % 3, max_new_tokens=NEW, max_batch_tokens=40
        )
        return [result.sequences.tolist() for result in found]

    expected = [call(number) for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(call, range(12))) == expected


def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the sizes of the batches that are made from here on."""
    sizes: list[int] = []
    begin = translation.SearchSlots.__init__

    def count(self: Any, decoder: Any, size: int, source: int, **options: Any) -> None:
        sizes.append(size)
        begin(self, decoder, size, source, **options)

    monkeypatch.setattr(translation.SearchSlots, "__init__", count)
    return sizes


def test_memory_limits_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = lmdecode.Decoding.from_pretrained(pair("marian")[0])
    sources = lists(make_inputs("marian", 9))
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": NEW}
    expected = decoding.translate(sources, **options)
    one = caches_bytes(decoding.decoder.config, 1, 2, NEW + 1, max(map(len, sources)))
    for limit, sizes in ((4 * one, [4, 4, 1]), (0, [1] * 9)):
        decoding.decoder.translators.clear()
        monkeypatch.setattr(translation, "_KEPT_BYTES", 0)
        monkeypatch.setattr(translation, "_LARGEST_BATCH", limit)
        with monkeypatch.context() as patch:
            made = batch_sizes(patch)
            found = decoding.translate(sources, **options)
        assert made == sizes
        for result, other in zip(found, expected, strict=True):
            assert result.sequences.equal(other.sequences)


def test_what_is_prepared_is_kept_behind_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = lmdecode.Decoding.from_pretrained(pair("marian")[0])
    sizes = batch_sizes(monkeypatch)
    for number in (1, 600, 2, 2, 1):
        decoding.translate([[5, 6, END]] * number, num_beams=4, max_new_tokens=80)
    assert sizes == [1, 600, 2]
    assert len(decoding.decoder.spare_memory._kept[0]) > translation._KEPT_BYTES


def test_a_padded_tensor_and_other_kinds_of_sources() -> None:
    _, decoding = pair("bart")
    inputs = make_inputs("bart", 4)
    sources = lists(inputs)
    expected = decoding.translate(sources, num_beams=2, max_new_tokens=NEW)
    left = torch.full_like(inputs["input_ids"], PAD)
    for row, source in zip(left, sources, strict=True):
        row[len(row) - len(source) :] = torch.tensor(source)
    for given, mask in (
        (inputs["input_ids"], inputs["attention_mask"]),
        (left, left != PAD),
        ([torch.tensor(source, dtype=torch.int32) for source in sources], None),
        (tuple(map(tuple, sources)), None),
    ):
        found = decoding.translate(given, attention_mask=mask, num_beams=2, max_new_tokens=NEW)
        assert [r.sequences.tolist() for r in found] == [r.sequences.tolist() for r in expected]
    assert decoding.translate([]) == []


def test_a_generation_config() -> None:
    model, decoding = pair("marian")
    inputs = make_inputs("marian")
    config = GenerationConfig(
        num_beams=3, max_new_tokens=NEW, no_repeat_ngram_size=2, length_penalty=0.5,
        decoder_start_token_id=END, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    with torch.no_grad():
        expected = model.generate(**inputs, generation_config=config)
    options: list[dict[str, Any]] = [{}, {"num_beams": 3}]
    for more in options:
        found = decoding.translate(lists(inputs), generation_config=config, **more)
        for result, row in zip(found, expected.tolist(), strict=True):
            assert result.sequences[0, : result.lengths[0]].tolist() == row[: result.lengths[0]]
    config.num_return_sequences = 2
    found = decoding.translate(lists(inputs), generation_config=config)
    assert [len(result.scores) for result in found] == [2] * len(found)
    found = decoding.translate(
        lists(inputs), generation_config=config, num_beams=1, num_return_sequences=1
    )
    assert [len(result.scores) for result in found] == [1] * len(found)
    assert config.num_beams == 3 and config.max_new_tokens == NEW


@wrong_calls(
    [
        ("sources is of type str; expected a sequence of sequences of int", {"sources": "abc"}),
        (r"sources\[0\] is of type str; expected a sequence of int", {"sources": ["abc"]}),
        (r"a token of sources\[1\] is of type float; expected", {"sources": [[1], [2.0]]}),
        (r"sources\[1\] has 0 tokens; expected 1 to 96", {"sources": [[1], []]}),
        (r"sources\[0\] has 97 tokens; expected 1 to 96", {"sources": [[1] * 97]}),
        (r"tokens\[0\] is 64; expected 0 to 63", {"sources": [[64]]}),
        (r"sources has shape \[3\]; expected \[batch", {"sources": torch.ones(3)}),
        (r"sources\[0\] is a tensor .* dtype float32", {"sources": torch.ones(1, 3)}),
        ("attention_mask is given; expected None", {"attention_mask": torch.ones(1, 2)}),
        (rf"sources\[1\]: tokens\[1\] is {2**70}; exp", {"sources": [[5], [6, 2**70]]}),
        (r"^Decoding.translate: sources\[1\]: tokens\[1\]", {"sources": [[5], [6, -1]]}),
        (r"pad_token_id, .* is \[64\]; expected tokens below 64", {"pad_token_id": 64}),
        (r"forced_bos_token_id is \[64\]; expected tok", {"forced_bos_token_id": 64}),
        (r"prompt_ids is \[64\]; expected tokens be", {"decoder_start_token_id": 64}),
        (
            r"decoder_start_token_id is \[5, 6\]; expected one token",
            {"decoder_start_token_id": [5, 6]},
        ),
        (
            "repetition_penalty is 0.0; expected a number above 0",
            {"num_beams": 2, "repetition_penalty": 0.0},
        ),
        ("max_batch_tokens is 0; expected at least 1", {"max_batch_tokens": 0}),
        ("max_length is 98; expected at most 97: the model has", {"max_new_tokens": 97}),
        ("do_sample is True; expected none", {"do_sample": True}),
        ("colour is given; expected generate", {"colour": "red"}),
        ("colour is given; expected generate", {"colour": False}),
    ]
)
def test_what_is_refused(wrong: WrongCall) -> None:
    _, decoding = pair("bart")
    options = {"sources": [[5, 6, END]], "max_new_tokens": 4, **wrong[1]}
    assert_refused(wrong, lambda: decoding.translate(**options))


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        (lambda: pair("whisper")[1], "the model takes input_features; expected a model of tokens"),
        (lambda: lmdecode.Decoding.from_pretrained(random_model("llama", "plain")),
         "the model is not an encoder-decoder one of transformers on the cpu"),
    ],
)  # fmt: skip
def test_other_models(decoding: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Decoding.translate: {message}"):
        decoding().translate([[5, 6]])


def test_padding_that_has_no_position() -> None:
    """M2M100's positions count tokens that are no padding; those of padding are zeros."""
    _, decoding = pair("m2m_100")
    with pytest.raises(ValueError, match=r"sources\[1\]: tokens\[2\] is 1; expected no padding"):
        decoding.translate([[5, END], [5, 6, PAD, END]], max_new_tokens=NEW)


def test_nothing_is_searched_where_a_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, decoding = pair("marian")
    monkeypatch.setattr(Translator, "translate", lambda *_: pytest.fail("searched"))
    with pytest.raises(ValueError, match=r"sources\[2\]: tokens\[0\] is 64; expected 0 to 63"):
        decoding.translate([[5, 6], [7], [VOCAB]], max_batch_tokens=1, max_new_tokens=NEW)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_effect(default: torch.dtype) -> None:
    _, decoding = pair("marian")
    sources = lists(make_inputs("marian"))
    expected = decoding.translate(sources, num_beams=2, max_new_tokens=NEW)
    torch.set_default_dtype(default)
    try:  # a translator of its own, as no call before has asked for this
        found = decoding.translate(sources, num_beams=2, max_new_tokens=NEW, min_length=0)
    finally:
        torch.set_default_dtype(torch.float32)
    for result, other in zip(found, expected, strict=True):
        assert result.sequences.equal(other.sequences) and result.scores.equal(other.scores)


def test_beams_and_results_of_the_models_config() -> None:
    """They count where nothing is said, as for generate()."""
    model, decoding = pair("marian")
    sources = lists(make_inputs("marian", 3))
    expected = decoding.translate(sources, num_beams=4, num_return_sequences=3, max_new_tokens=NEW)
    before = copy.deepcopy(model.generation_config)
    try:
        model.generation_config.update(num_beams=4, num_return_sequences=3, max_new_tokens=NEW)
        found = decoding.translate(sources)
        (greedy, *_) = decoding.translate(sources, num_beams=1, num_return_sequences=1)
    finally:
        model.generation_config = before
    assert len(greedy.scores) == 1
    for result, other in zip(found, expected, strict=True):
        assert len(result.scores) == 3 and result.sequences.equal(other.sequences)
