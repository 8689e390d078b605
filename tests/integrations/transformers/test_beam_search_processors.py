"""Which logits processors of a beam search become arguments of the op, and that it is the same."""

import math

import pytest
import torch
from beam_parity import assert_same, both
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)
from user_processors import Forbid

import lmdecode
from lmdecode.integrations.transformers import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.beam import search
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors
from tests.support.releases import BEFORE_5_23, IGNORES_PADDING

PAD, EOS, VOCAB = 0, 2, 61
SEARCH = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12}

OPTIONS = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 40},
    {"min_length": 9},
    {"min_new_tokens": 6},
    {"suppress_tokens": [4, 9, 21, 60]},
    {"begin_suppress_tokens": [30, 40, 41, 50]},
    {"forced_bos_token_id": 25},
    {"forced_eos_token_id": EOS},
    {"forced_eos_token_id": 4, "suppress_tokens": [5]},
    {"sequence_bias": {(20,): -2.5, (33,): 3.5, (40,): 2.0}},
    {"bad_words_ids": [[14], [15], [16], [40]]},
    {
        "sequence_bias": {(20,): 2.5}, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
        "bad_words_ids": [[14], [15]], "min_length": 8, "min_new_tokens": 5,
        "forced_eos_token_id": EOS, "suppress_tokens": [4, 9], "begin_suppress_tokens": [30],
    },
]  # fmt: skip
NOT_FUSED = [
    {"sequence_bias": {(20,): 2.5, (21, 22): 5.0}},
    {"bad_words_ids": [[14], [15, 16]]},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.4},
    {"exponential_decay_length_penalty": (3, 1.4)},
    {"remove_invalid_values": True},
    {"renormalize_logits": True, "repetition_penalty": 1.4},
    {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(batch_id, 50))},
    {"forced_eos_token_id": [EOS, 7]},
]


def _name(options: dict) -> str:
    return "-".join(options)


@pytest.fixture
def op_calls(monkeypatch) -> list[dict]:
    """Collect the keyword arguments of the op."""
    calls = []
    op = lmdecode.log_softmax_top_k

    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return op(*args, **kwargs)

    monkeypatch.setattr(search, "log_softmax_top_k", recorded)
    return calls


def same_tokens_and_scores(model, *inputs, **arguments) -> None:
    """Compare with transformers: the op's tokens, and the scores with those of whole rows."""
    arguments = {**SEARCH, "return_dict_in_generate": True, **arguments}
    scored, got = both(model, *inputs, **arguments, output_scores=True)
    assert_same(scored, got)
    expected, got = both(model, *inputs, **arguments)
    assert_same(expected, got)


@pytest.mark.parametrize("options", OPTIONS, ids=_name)
@pytest.mark.parametrize("name", ["gpt2", "bart", "t5"])
def test_the_op_does_what_the_processors_do(make_model, prompts, op_calls, name, options):
    same_tokens_and_scores(make_model(name), prompts, **options)
    assert op_calls
    arguments = set().union(*(call.keys() for call in op_calls)) - {"num_beams"}
    assert arguments or (name == "gpt2" and options == {"forced_bos_token_id": 25})


@pytest.mark.parametrize("options", NOT_FUSED, ids=_name)
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_others_are_called(make_model, prompts, op_calls, name, options):
    same_tokens_and_scores(make_model(name), prompts, **options)
    assert not op_calls


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"repetition_penalty": 1.4}, True),
        ({"no_repeat_ngram_size": 2, "suppress_tokens": [9]}, True),
        # Before 5.23 transformers counts padding in penalties too, so one text serves both.
        ({"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, BEFORE_5_23),
    ],
    ids=str,
)
def test_padding_is_not_penalised(decoder_model, padded_prompts, op_calls, options, fused):
    """transformers passes over the padding in penalties, but counts it in n-grams."""
    same_tokens_and_scores(decoder_model, **padded_prompts, pad_token_id=PAD, **options)
    assert bool(op_calls) is fused


def test_a_users_processor_sees_what_it_sees_in_transformers(beam_model, prompts, op_calls):
    processors = Forbid(5, 9, 30, 33), Forbid(5, 9, 30, 33)
    arguments = {**SEARCH, "repetition_penalty": 1.3, "eos_token_id": [EOS, 7]}
    expected, _ = both(beam_model, prompts, logits_processor=[processors[0]], **arguments)
    steps = len(processors[0].seen) // 2
    _, got = both(beam_model, prompts, logits_processor=[processors[1]], **arguments)
    assert torch.equal(got, expected)
    assert not op_calls
    seen = processors[1].seen[-steps:]
    for (ids, scores), (expected_ids, expected_scores) in zip(
        seen, processors[0].seen[:steps], strict=True
    ):
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)


def test_scores_of_another_dtype(llama, prompts):
    class InFloat64(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.double() * 0.5

    arguments = {**SEARCH, "logits_processor": [InFloat64()]}
    expected, got = both(llama, prompts, **arguments)
    assert torch.equal(got, expected)


REPETITION = RepetitionPenaltyLogitsProcessor(1.5)
NGRAMS = NoRepeatNGramLogitsProcessor(2)
BIAS = SequenceBiasLogitsProcessor({(3,): 1.0})
DIVERSITY = HammingDiversityLogitsProcessor(1.0, 4, 2)
SHORTEST = MinLengthLogitsProcessor(9, EOS)
SHORTEST_NEW = MinNewTokensLengthLogitsProcessor(3, 2, [EOS, 7])
FORCED_BOS = ForcedBOSTokenLogitsProcessor(4)
FORCED_EOS = ForcedEOSTokenLogitsProcessor(20, EOS)
SUPPRESSED = SuppressTokensLogitsProcessor([5, 6])
SUPPRESSED_AT_BEGIN = SuppressTokensAtBeginLogitsProcessor([8], 3)
BAD_WORDS = NoBadWordsLogitsProcessor([[11], [12]])


class SubclassOfNGrams(NoRepeatNGramLogitsProcessor):
    pass


class ListOfAnotherKind(LogitsProcessorList):
    pass


@pytest.mark.parametrize(
    ("processors", "fused"),
    [
        ([], True),
        ([BIAS, DIVERSITY, REPETITION, NGRAMS, BAD_WORDS, SHORTEST, FORCED_EOS, SUPPRESSED], True),
        ([SUPPRESSED, BIAS], True),
        ([SHORTEST, NGRAMS, REPETITION], True),
        ([FORCED_BOS, FORCED_EOS, SHORTEST], True),
        ([SUPPRESSED, SUPPRESSED], True),
        ([REPETITION, BIAS], False),
        ([REPETITION, DIVERSITY], False),
        ([REPETITION, REPETITION], False),
        ([NGRAMS, NGRAMS], False),
        ([FORCED_EOS, BIAS], False),
        ([FORCED_EOS, NGRAMS], False),
        ([ForcedEOSTokenLogitsProcessor(20, [EOS, 7])], False),
        ([SequenceBiasLogitsProcessor({(3,): 1.0, (4, 5): 1.0})], False),
        ([SequenceBiasLogitsProcessor({(3,): math.inf})], False),
        ([SubclassOfNGrams(2)], False),
        ([SUPPRESSED, TemperatureLogitsWarper(0.5)], False),
        ([Forbid(3)], False),
    ],
)
def test_what_is_fused(processors, fused):
    assert FusedProcessors(LogitsProcessorList(processors)).is_fused is fused
    assert not FusedProcessors(ListOfAnotherKind(processors)).is_fused


def test_a_bias_beyond_the_vocabulary_is_left_to_its_processor(llama, prompts):
    fused = FusedProcessors(LogitsProcessorList([BIAS]))
    assert fused.fits(4)
    assert not fused.fits(3)
    with pytest.raises(ValueError, match="vocabulary size is 61"):
        both(llama, prompts, num_beams=2, max_new_tokens=3, sequence_bias={(61,): 1.0})


def _bans(arguments: dict) -> set[int]:
    return set(arguments.get("suppressed_tokens", torch.tensor([])).tolist())


def test_arguments_depend_on_the_length():
    fused = FusedProcessors(
        LogitsProcessorList([SHORTEST, SHORTEST_NEW, SUPPRESSED_AT_BEGIN, BAD_WORDS])
    )
    by_length = {length: torch.zeros((4, length), dtype=torch.int64) for length in (3, 4, 5, 9)}
    assert _bans(fused.arguments(by_length[3], VOCAB)) == {EOS, 7, 8, 11, 12}
    assert _bans(fused.arguments(by_length[4], VOCAB)) == {EOS, 7, 11, 12}
    assert _bans(fused.arguments(by_length[5], VOCAB)) == {EOS, 11, 12}
    assert _bans(fused.arguments(by_length[9], VOCAB)) == {11, 12}


def test_a_forced_token_overrules_what_is_before_it():
    processors = LogitsProcessorList([BIAS, REPETITION, SHORTEST, FORCED_EOS, SUPPRESSED])
    fused = FusedProcessors(processors)
    at_end = fused.arguments(torch.zeros((4, 19), dtype=torch.int64), VOCAB)
    assert at_end.keys() == {"forced_tokens", "suppressed_tokens"}
    assert at_end["forced_tokens"].tolist() == [EOS] * 4
    assert _bans(at_end) == {5, 6}
    before = fused.arguments(torch.zeros((4, 18), dtype=torch.int64), VOCAB)
    assert before.keys() == {"bias", "repetition_penalty", "sequences", "suppressed_tokens"}
    assert _bans(before) == {5, 6}


def test_arguments_follow_a_changed_processor():
    """Whisper moves the place at which tokens are suppressed."""
    processor = SuppressTokensAtBeginLogitsProcessor([8], 3)
    fused = FusedProcessors(LogitsProcessorList([processor]))
    ids = torch.zeros((4, 5), dtype=torch.int64)
    assert not fused.arguments(ids, VOCAB)
    processor.set_begin_index(5)
    assert _bans(fused.arguments(ids, VOCAB)) == {8}


def test_earlier_groups_tokens_are_an_argument():
    fused = FusedProcessors(LogitsProcessorList([DIVERSITY]))
    ids, earlier = torch.zeros((4, 5), dtype=torch.int64), torch.tensor([[3, 4]])
    assert fused.arguments(ids, VOCAB, earlier)["diversity_tokens"] is earlier
    assert fused.arguments(ids, VOCAB, earlier)["diversity_penalty"] == 1.0
    assert not fused.arguments(ids, VOCAB, earlier[:, :0])


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [
        (2, [[2, 3, 4, 5], [8, 9, 10, 11]]),
        pytest.param(
            torch.tensor([0, 3]),
            [[0, 1, 2, 3, 4, 5], [-1, -1, -1, 9, 10, 11]],
            marks=IGNORES_PADDING,
        ),
    ],
)
def test_the_part_of_the_prompt_that_a_penalty_passes_over(ignored, expected):
    ids = torch.arange(12).view(2, 6)
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)
    fused = FusedProcessors(LogitsProcessorList([penalty]))
    assert fused.arguments(ids, VOCAB)["sequences"].tolist() == expected
    assert not FusedProcessors(LogitsProcessorList([penalty, NGRAMS])).is_fused


@pytest.mark.parametrize("is_inference", [False, True])
def test_change_in_place_is_seen_in_the_next_step(is_inference: bool) -> None:
    input_ids, logits = torch.tensor([[1, 2]]), torch.arange(9.0).view(1, 9)
    with torch.inference_mode(is_inference):
        processor = SuppressTokensLogitsProcessor([8])
        fused = FusedProcessors(LogitsProcessorList([processor]))

        def best_token() -> int:
            arguments = fused.arguments(input_ids, 9)
            found = lmdecode.log_softmax_top_k(logits, torch.zeros(1), 1, num_beams=1, **arguments)
            return int(found.tokens)

        assert best_token() == 7
        rules = fused._arguments
        assert best_token() == 7
        assert fused._arguments is rules  # not made again where nothing has changed
        processor.suppress_tokens.fill_(3)
        assert best_token() == 8
