"""DecodingBatch with a GenerationConfig: what generate() finds with it, or an error."""

import functools
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest, BeamResult
from tests.decoder.decoder_models import END, make_inputs, make_model

pytest.importorskip("transformers")
from transformers import GenerationConfig

from lmdecode.integrations.transformers.decoding.encoding import memory_of

SIZES: dict[str, int] = dict(max_requests=3, num_beams=5, capacity=40, source=16)


@functools.cache
def pair(kind: str) -> tuple[Any, lmdecode.Decoding]:
    model = make_model(kind, 0)
    return model, lmdecode.Decoding.from_pretrained(model)


@functools.cache
def memories(kind: str) -> tuple[torch.Tensor, ...]:
    model, inputs = pair(kind)[0], make_inputs(kind, 3, 1)
    with torch.no_grad():
        outputs = model.get_encoder()(**inputs)
    found, lengths = memory_of(outputs, inputs.get("attention_mask"))
    return tuple(row[:length] for row, length in zip(found, lengths.tolist(), strict=True))


def rows(results: list[BeamResult]) -> list[list[int]]:
    return [
        result.sequences[rank, : int(result.lengths[rank])].tolist()
        for result in sorted(results, key=lambda result: str(result.request_id))
        for rank in range(len(result.sequences))
    ]


CONFIGS: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
    {"num_beams": 3, "early_stopping": True, "min_new_tokens": 5},
    {"num_beams": 5, "early_stopping": "never", "min_length": 4, "max_length": 12},
    {"num_beams": 4, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"num_beams": 2, "forced_bos_token_id": 9, "forced_eos_token_id": END},
    {"num_beams": 4, "suppress_tokens": [10, 11], "bad_words_ids": [[14], [15], [END]]},
    {"num_beams": 3, "eos_token_id": [2, 20, 21, 22], "temperature": 0.7, "top_k": 3},
    {"num_beams": 4, "max_length": None, "max_new_tokens": None},
]


@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_results_are_those_of_generate(kind: str, options: dict[str, Any]) -> None:
    model, decoding = pair(kind)
    if "max_length" not in options:
        options = {"max_new_tokens": 14, **options}
    config = GenerationConfig(**options)
    expected = decoding.generate(**make_inputs(kind, 3, 1), generation_config=config)
    batch = decoding.batch(**SIZES, generation_config=config)
    for number, memory in enumerate(memories(kind)):
        batch.add(None, memory)
        assert batch.running[-1] == number
    found = rows(batch.run())
    assert len(found) == len(expected)
    for row, tokens in zip(found, expected.tolist(), strict=True):
        assert tokens[: len(row)] == row
        assert not set(tokens[len(row) :]) - {model.generation_config.pad_token_id}


def test_a_config_of_one_request() -> None:
    """In place of the batch's, with a prompt of its own."""
    model, decoding = pair("marian")
    defaults = model.generation_config
    batch = decoding.batch(**SIZES, generation_config=GenerationConfig(max_new_tokens=3))
    config = GenerationConfig(num_beams=4, max_new_tokens=6, eos_token_id=END)
    batch.add([7, 8], memories("marian")[0], generation_config=config)
    batch.add(torch.tensor([7, 8]), memories("marian")[0])
    first, second = batch.run()[::-1]
    assert first.prompt_length == second.prompt_length == 2
    request = BeamRequest(
        [7, 8], num_beams=4, max_new_tokens=6, eos_token_id=END,
        pad_token_id=defaults.pad_token_id, forced_eos_token_id=defaults.forced_eos_token_id,
    )  # fmt: skip
    batch.add(request, memories("marian")[0])
    (same,) = batch.run()
    assert first.sequences.equal(same.sequences) and first.scores.equal(same.scores)
    assert second.sequences.shape[1] <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "do_sample is True"),
        ({"begin_suppress_tokens": [4]}, r"begin_suppress_tokens is \[4\]"),
        ({"bad_words_ids": [[4, 5]]}, r"bad_words_ids is \[\[4, 5\]\]; expected words of one"),
        ({"bad_words_ids": [[9]], "forced_bos_token_id": 9}, "expected no token of bad_words_ids"),
        ({"sequence_bias": {(4,): 1.0}}, "sequence_bias is"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size is 2"),
        ({"renormalize_logits": True}, "renormalize_logits is True"),
        ({"output_scores": True}, "output_scores is True"),
        ({"stop_strings": "x"}, "stop_strings is 'x'"),
        ({"max_time": 1.0}, "max_time is 1.0"),
        ({"num_beam_groups": 2}, "num_beam_groups is 2"),
        ({"diversity_penalty": 1.0}, "diversity_penalty is 1.0"),
        ({"a_word_of_mine": 3}, "a_word_of_mine is 3"),
        ({"num_beams": 1, "repetition_penalty": 1.5}, "repetition_penalty is 1.5; expected 1"),
        ({"max_new_tokens": None, "max_length": 1}, "max_length is 1; expected more than the 1"),
        ({"num_beams": 6}, "num_beams of the request: 6; expected at most 5"),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_ignored(options: dict[str, Any], message: str) -> None:
    _, decoding = pair("marian")
    config = GenerationConfig(**{"num_beams": 4, "max_new_tokens": 5, **options})
    batch = decoding.batch(**SIZES)
    with pytest.raises(ValueError, match=message):
        batch.add(None, memories("marian")[0], generation_config=config)
    assert batch.running == ()


def test_what_goes_together() -> None:
    _, decoding = pair("marian")
    batch, memory = decoding.batch(**SIZES), memories("marian")[0]
    config = GenerationConfig(num_beams=2, max_new_tokens=5)
    with pytest.raises(TypeError, match="request is a BeamRequest; expected a prompt"):
        batch.add(BeamRequest([1], max_new_tokens=3), memory, generation_config=config)
    with pytest.raises(TypeError, match="expected a BeamRequest"):
        batch.add([1], memory)
    with pytest.raises(TypeError, match="generation_config is of type dict; expected a Generat"):
        batch.add([1], memory, generation_config={"num_beams": 2})
    alone = lmdecode.Decoding(decoding.config, make_weights())
    with pytest.raises(ValueError, match="decoder_start_token_id is None; expected a token"):
        alone.batch(**SIZES).add(None, memory, generation_config=config)


def make_weights() -> lmdecode.DecoderWeights:
    from lmdecode.readers.transformers.encoder_decoder import decoder_of

    return decoder_of(pair("marian")[0])[1]
