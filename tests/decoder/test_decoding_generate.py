"""Decoding.generate() against the model's own generate(): the same tokens, the same scores."""

import copy
import warnings
from typing import Any

import pytest
import torch

import lmdecode
from tests.decoder.decoder_models import (
    END,
    MODELS,
    VOCAB,
    make_inputs,
    make_model,
    make_whisper_with_timestamps,
    pair,
)
from tests.support.word_tokenizer import word_tokenizer

pytest.importorskip("transformers")
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import utils as generation_utils

# Seeds of models. With seed 1 of mt5 transformers' own scores are 28 times the tolerance of check
# away from float64.
SEEDS = dict.fromkeys(MODELS, (0, 1)) | {"mt5": (0, 2), "t5_gated": (0, 2)}


def check(kind: str, batch: int = 3, seed: int = 0, **arguments: Any) -> torch.Tensor:
    model, decoding = pair(kind, seed)
    inputs = make_inputs(kind, batch, seed + 1)
    arguments.setdefault("max_new_tokens", 14)
    beams = arguments.get("num_beams", 1)
    if kind != "whisper" and beams > 1:
        arguments |= {"return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        expected = model.generate(**inputs, **arguments)
        got = decoding.generate(**inputs, **arguments)
    if isinstance(expected, torch.Tensor):
        assert got.tolist() == expected.tolist()
        return got
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(
        got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
    )
    assert got.beam_indices.tolist() == expected.beam_indices.tolist()
    return got.sequences


@pytest.mark.parametrize("num_beams", [1, 4, 5, 8])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_tokens_are_those_of_generate(kind: str, num_beams: int) -> None:
    for seed in SEEDS[kind]:
        check(kind, seed=seed, num_beams=num_beams)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_when_a_search_ends(early_stopping: bool | str, length_penalty: float) -> None:
    check(
        "marian",
        num_beams=4,
        num_return_sequences=4,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        max_new_tokens=20,
    )


def test_a_pad_token_out_of_the_vocabulary() -> None:
    """It fills results, and no beam is run with it."""
    ends = [END, 55, 16]
    tokens = check("marian", num_beams=4, pad_token_id=10**9, eos_token_id=ends)
    assert (tokens == 10**9).any()


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("pad", [0, 1, 7])
def test_padding_that_m2m_100_generates_has_no_position(pad: int, num_beams: int) -> None:
    model = make_model("m2m_100", pad_token_id=pad)
    bias = torch.zeros(VOCAB)
    bias[pad] = 6.0
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    for keep_model in (True, False):
        decoding = lmdecode.Decoding.from_pretrained(model, keep_model=keep_model)
        inputs = make_inputs("m2m_100")
        inputs["input_ids"][inputs["input_ids"] == pad] = 9
        inputs["input_ids"][inputs["attention_mask"] == 0] = pad
        inputs |= {"num_beams": num_beams, "max_new_tokens": 14, "return_dict_in_generate": True}
        with torch.no_grad():
            expected = model.generate(**inputs, output_scores=True)
            got = decoding.generate(**inputs, output_scores=True)
        is_pad = expected.sequences == pad
        # Some is within a text, where what follows has seen it.
        assert bool((is_pad[:, 1:-1] & ~is_pad[:, 2:]).any())
        assert got.sequences.tolist() == expected.sequences.tolist()
        if num_beams > 1:
            torch.testing.assert_close(
                got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
            )
            continue
        for step, (ours, theirs) in enumerate(zip(got.scores, expected.scores, strict=True)):
            runs = (expected.sequences[:, 1 : step + 1] != END).all(dim=1)
            torch.testing.assert_close(ours[runs], theirs[runs], atol=2e-3, rtol=1e-4)


PROCESSORS: list[dict[str, Any]] = [
    {"min_new_tokens": 6},
    {"min_length": 5},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "no_repeat_ngram_size": 3},
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": END},
    {"forced_bos_token_id": 9, "suppress_tokens": [10, 11]},
    {"suppress_tokens": [11, 12, 13]},
    {"begin_suppress_tokens": [4, 5, 6, 7]},
    {"bad_words_ids": [[14], [15]]},
    {"sequence_bias": {(16,): 3.0, (17,): -4.0}, "repetition_penalty": 1.2},
    {"eos_token_id": [2, 20, 21, 22]},
    {"eos_token_id": [2, 20, 21, 22], "min_new_tokens": 4, "no_repeat_ngram_size": 1},
]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("arguments", PROCESSORS, ids=lambda a: "+".join(a))
def test_processors(arguments: dict[str, Any], num_beams: int) -> None:
    for kind in ("bart", "t5"):
        check(kind, num_beams=num_beams, **arguments)


class StopAtMultiples(StoppingCriteria):
    """Ends sequences at tokens that are multiples of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.number == 0


ANY_RULES: list[dict[str, Any]] = [
    {"bad_words_ids": [[3, 4], [14], [21, 33, 8]], "no_repeat_ngram_size": 2},
    {"sequence_bias": {(16, 17): 5.0, (40,): 3.0}},
    {"encoder_repetition_penalty": 1.3, "min_new_tokens": 5},
    {"prefix_allowed_tokens_fn": lambda batch, ids: range(batch, 60 - batch, 3)},
    {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
    {"stopping_criteria": StoppingCriteriaList([StopAtMultiples(20)])},
    {"max_time": 1000.0, "eos_token_id": [2, 20, 21, 22, 23, 24]},
    {"suppress_tokens": [5], "bad_words_ids": [[3, 4]], "output_logits": True},
]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("arguments", ANY_RULES, ids=lambda a: "+".join(a))
def test_any_processors_and_criteria(arguments: dict[str, Any], num_beams: int) -> None:
    for kind in ("bart", "t5"):
        model, decoding = pair(kind)
        arguments = arguments | make_inputs(kind) | dict(num_beams=num_beams, max_new_tokens=12)
        arguments |= dict(return_dict_in_generate=True, output_scores=True)
        expected, got = model.generate(**arguments), decoding.generate(**arguments)
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert len(got.scores) == len(expected.scores)
        torch.testing.assert_close(got.scores[0], expected.scores[0], atol=1e-3, rtol=1e-4)
        if arguments.get("output_logits"):
            torch.testing.assert_close(got.logits[0], expected.logits[0], atol=1e-3, rtol=1e-4)
        if num_beams > 1:
            torch.testing.assert_close(
                got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
            )
            assert got.beam_indices.tolist() == expected.beam_indices.tolist()
        del arguments["return_dict_in_generate"], arguments["output_scores"]
        assert decoding.generate(**arguments).tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_criteria_without_end_tokens(num_beams: int) -> None:
    """Greedily a prompt that a criterion has ended goes on until all have, and is not padded."""
    for kind in ("bart", "t5"):
        model = make_model(kind)
        model.generation_config.eos_token_id = None
        criteria = StoppingCriteriaList([StopAtMultiples(7)])
        arguments = make_inputs(kind) | dict(num_beams=num_beams, max_new_tokens=12)
        expected = model.generate(stopping_criteria=criteria, **arguments)
        got = lmdecode.Decoding.from_pretrained(model).generate(
            stopping_criteria=criteria, **arguments
        )
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_any_rules_score_a_search_that_has_ended_0(num_beams: int) -> None:
    _, decoding = pair("bart")
    got = decoding.generate(
        **make_inputs("bart"),
        num_beams=num_beams,
        max_new_tokens=12,
        eos_token_id=list(range(2, 20)),
        bad_words_ids=[[3, 4]],
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    ended = 0
    for scores, logits in zip(got.scores, got.logits, strict=True):
        for row in (logits == 0).all(dim=1).nonzero().flatten().tolist():
            assert not scores[row].any()
            ended += 1
    assert ended > 0


def test_any_rules_leave_the_memory_to_the_next_call() -> None:
    decoding = lmdecode.Decoding.from_pretrained(make_model("bart"))
    arguments = make_inputs("bart") | dict(max_new_tokens=4)
    spare = decoding.decoder.spare_memory
    kept = torch.empty(4 << 20, dtype=torch.uint8)
    spare.give(kept)
    for more in ({}, {"bad_words_ids": [[3, 4]]}, {"bad_words_ids": [[3, 4]], "num_beams": 3}):
        decoding.generate(**arguments, **more)
        memory = spare.take(0)
        assert memory.data_ptr() == kept.data_ptr()
        spare.give(memory)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    ("frames", "return_timestamps"), [(40, False), (40, True), (100, True), (100, None)]
)
def test_whisper_with_timestamps_and_long_audio(
    frames: int, return_timestamps: bool | None, num_beams: int
) -> None:
    """Above 40 frames it transcribes window after window, timestamps say where the next is."""
    model = make_whisper_with_timestamps()
    decoding = lmdecode.Decoding.from_pretrained(model)
    features = torch.randn(1, 8, frames, generator=torch.Generator().manual_seed(2))
    arguments = dict(
        num_beams=num_beams, max_new_tokens=8, return_timestamps=return_timestamps, language="en"
    )
    expected = model.generate(features, **arguments)
    assert decoding.generate(features, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_prompt_of_the_decoder(num_beams: int) -> None:
    for kind, length in (("marian", 4), ("t5", 2), ("bart", 70)):
        prompt = torch.randint(3, 60, (3, length), generator=torch.Generator().manual_seed(5))
        check(kind, num_beams=num_beams, decoder_input_ids=prompt)


def test_encoder_outputs_and_a_mask_with_holes() -> None:
    model, decoding = pair("bart")
    inputs = make_inputs("bart")
    encoder_outputs = model.get_encoder()(**inputs)
    mask = inputs["attention_mask"].clone()
    mask[0, 0] = mask[1, 1] = 0
    arguments = dict(attention_mask=mask, num_beams=3, max_new_tokens=8)
    # transformers writes to the outputs that it is given; Decoding leaves them alone.
    expected = model.generate(encoder_outputs=copy.copy(encoder_outputs), **arguments)
    decoding.generate(encoder_outputs=encoder_outputs, **arguments)
    got = decoding.generate(encoder_outputs=encoder_outputs, **arguments)
    assert got.tolist() == expected.tolist()


STEP_RULES: list[dict[str, Any]] = [
    {},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 3},
    {"eos_token_id": [2, 20, 21, 22, 23, 24, 25], "suppress_tokens": [11, 12]},  # ends apart
]


def check_distance(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """Ours is as near to the float64 result as the model's own, or within 1e-3 of that."""
    finite = truth.isfinite()
    assert torch.equal(ours.isfinite(), finite) and torch.equal(theirs.isfinite(), finite)
    own = (theirs[finite] - truth[finite]).abs().max().item()
    torch.testing.assert_close(ours.double(), truth.double(), atol=1e-3 + own, rtol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("arguments", STEP_RULES, ids=lambda a: "+".join(a))
def test_scores_and_logits_of_each_step(arguments: dict[str, Any], num_beams: int) -> None:
    # Here seed 0 of t5 is unsettled: transformers' own scores of one memory are 3e-3 away from
    # float64 at torch's level AVX512, and 11e-3 at DEFAULT. With seed 4: 0.6e-3 and 0.3e-3.
    t5_seed = 4 if "no_repeat_ngram_size" in arguments and num_beams == 4 else 0
    for kind, seed in (("marian", 0), ("t5", t5_seed)):
        model, decoding = pair(kind, seed)
        arguments = arguments | make_inputs(kind)
        # Both of one memory: these models make much of its last bits. How much, float64 tells.
        memory = model.get_encoder()(**make_inputs(kind))
        exact_memory = copy.copy(memory)
        exact_memory.last_hidden_state = memory.last_hidden_state.double()
        arguments |= dict(num_beams=num_beams, max_new_tokens=9, return_dict_in_generate=True)
        asked: dict[str, Any] = dict(output_scores=True, output_logits=True)
        expected = model.generate(encoder_outputs=copy.copy(memory), **asked, **arguments)
        exactly = copy.deepcopy(model).double()
        exact = exactly.generate(encoder_outputs=exact_memory, **asked, **arguments)
        got = decoding.generate(encoder_outputs=memory, **asked, **arguments)
        assert got.sequences.tolist() == expected.sequences.tolist() == exact.sequences.tolist()
        for name in ("scores", "logits"):
            assert len(got[name]) == len(expected[name]) == len(exact[name]) > 2
            steps = zip(got[name], expected[name], exact[name], strict=True)
            for step, (ours, theirs, truth) in enumerate(steps):
                goes_on = (ours != 0).any(dim=1)
                assert ours.shape == theirs.shape
                assert goes_on.all() or step > 0
                check_distance(ours[goes_on], theirs[goes_on], truth[goes_on])
        indices = expected.beam_indices if num_beams > 1 else None
        ours, theirs, truth = (
            model.compute_transition_scores(expected.sequences, each.scores, indices)
            for each in (got, expected, exact)
        )
        # Greedily transformers goes on with padding, and scores it.
        counts = ours != 0 if num_beams == 1 else torch.ones_like(ours, dtype=torch.bool)
        check_distance(ours[counts], theirs[counts], truth[counts])
        only = decoding.generate(output_logits=True, **arguments)
        assert only.scores is None and len(only.logits) == len(got.logits)
        assert decoding.generate(**arguments).logits is None


def test_groups_have_logits_and_no_scores() -> None:
    _, decoding = pair("marian")
    got = decoding.generate(
        **make_inputs("marian"),
        num_beams=4,
        num_beam_groups=2,
        diversity_penalty=0.7,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert got.scores is None and got.sequences_scores.shape == (3,)
    assert [tuple(logits.shape) for logits in got.logits] == [(12, VOCAB)] * 4


@pytest.mark.parametrize("num_beams", [1, 3])
def test_embeddings_for_the_encoder(num_beams: int) -> None:
    model, decoding = pair("bart")
    inputs = make_inputs("bart")
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach() * 1.5
    arguments = dict(inputs, inputs_embeds=embeddings, num_beams=num_beams, max_new_tokens=8)
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_whispers_mask_of_features_is_no_mask_of_the_memory(num_beams: int) -> None:
    model, decoding = pair("whisper")
    inputs = make_inputs("whisper")
    frames = torch.tensor([[40], [11], [3]])
    inputs["attention_mask"] = (torch.arange(40) < frames).long()
    arguments = dict(num_beams=num_beams, max_new_tokens=8)
    expected = model.generate(**inputs, **arguments)
    assert decoding.generate(**inputs, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("more", [{}, {"bad_words_ids": [[3, 4]]}], ids=["rules", "any"])
@pytest.mark.parametrize("num_beam_groups", [2, 4])
def test_groups_are_those_of_the_loop_in_python(num_beam_groups: int, more: dict[str, Any]) -> None:
    from lmdecode.integrations.transformers import beam_search

    for kind in ("marian", "t5"):
        model, decoding = pair(kind)
        arguments: dict[str, Any] = dict(
            num_beams=4,
            num_beam_groups=num_beam_groups,
            diversity_penalty=0.7,
            num_return_sequences=4,
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_scores=True,
            **make_inputs(kind),
        )
        arguments |= more
        expected = model.generate(custom_generate=beam_search, **arguments)
        got = decoding.generate(**arguments)
        assert got.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(
            got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
        )
        assert got.beam_indices.tolist() == expected.beam_indices.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_result_does_not_depend_on_batch_or_threads(num_beams: int) -> None:
    """Bitwise, given the same memory."""
    for kind in ("marian", "t5_gated"):
        model, decoding = pair(kind)
        inputs = make_inputs(kind, batch=4)
        memory = model.get_encoder()(**inputs)
        arguments: dict[str, Any] = dict(
            num_beams=num_beams, max_new_tokens=12, return_dict_in_generate=True
        )
        if num_beams > 1:
            arguments["output_scores"] = True
        mask = inputs["attention_mask"]
        whole = decoding.generate(encoder_outputs=memory, attention_mask=mask, **arguments)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            again = decoding.generate(encoder_outputs=memory, attention_mask=mask, **arguments)
            assert again.sequences.equal(whole.sequences)
            for row in range(4):
                alone = decoding.generate(
                    encoder_outputs=type(memory)(last_hidden_state=memory[0][row : row + 1]),
                    attention_mask=mask[row : row + 1],
                    **arguments,
                )
                length = alone.sequences.shape[1]
                assert alone.sequences[0].equal(whole.sequences[row, :length])
                if num_beams > 1:
                    assert again.sequences_scores.equal(whole.sequences_scores)
                    assert alone.sequences_scores[0].equal(whole.sequences_scores[row])
        finally:
            torch.set_num_threads(threads)


def test_a_generation_config_brings_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() does not want arguments beside it, and this adds none of its own."""
    model, decoding = pair("marian")
    config = GenerationConfig(
        max_new_tokens=7, num_beams=2, decoder_start_token_id=1, eos_token_id=END, pad_token_id=0
    )
    seen: list[str] = []
    logger = generation_utils.logger
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logger, name, lambda text, *rest: seen.append(text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = decoding.generate(**make_inputs("marian"), generation_config=config)
        of_decoding, seen[:] = list(seen), []
        expected = model.generate(**make_inputs("marian"), generation_config=config)
    assert of_decoding == seen
    assert got.tolist() == expected.tolist()
    assert config.use_cache is not False


@pytest.mark.parametrize("kind", ["marian", "whisper"])
def test_it_stands_in_for_the_models_own(kind: str) -> None:
    model, other = make_model(kind), make_model(kind)
    inputs = make_inputs(kind)
    arguments: dict[str, Any] = dict(num_beams=3, max_new_tokens=8)
    expected = other.generate(**inputs, **arguments)
    decoding, second = (lmdecode.Decoding.from_pretrained(model) for _ in range(2))
    model.generate = decoding.generate
    for generate in (model.generate, decoding.generate, second.generate):
        assert generate(**inputs, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stop_strings(num_beams: int) -> None:
    whole = check("marian", num_beams=num_beams)
    stop = {"stop_strings": [f"w{int(whole[0, 4])}"], "tokenizer": word_tokenizer(VOCAB)}
    assert not check("marian", num_beams=num_beams, **stop).equal(whole)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("int8", 0.1), ("int4", 0.4)])
def test_rounded_weights_score_tokens_alike(dtype: str, tolerance: float) -> None:
    """The same tokens, forced, score nearly the same; and as precisely in any batch."""
    model = make_model("marian")
    inputs = make_inputs("marian")
    memory = model.get_encoder()(**inputs)
    mask = inputs["attention_mask"]
    arguments: dict[str, Any] = dict(
        num_beams=4, max_new_tokens=10, return_dict_in_generate=True, output_scores=True
    )
    exact, rounded = (lmdecode.Decoding.from_pretrained(model, kind) for kind in ("float32", dtype))
    expected = exact.generate(encoder_outputs=memory, attention_mask=mask, **arguments)
    got = rounded.generate(encoder_outputs=memory, attention_mask=mask, **arguments)
    difference = (got.sequences_scores - expected.sequences_scores).abs()
    assert 0 < difference.max() < tolerance
    alone = rounded.generate(
        encoder_outputs=type(memory)(last_hidden_state=memory[0][1:2]),
        attention_mask=mask[1:2],
        **arguments,
    )
    assert alone.sequences_scores[0].equal(got.sequences_scores[1])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_more_memories_than_prompts(options: dict[str, Any]) -> None:
    model, decoding = pair("bart")
    with torch.no_grad():
        encoded = model.get_encoder()(**make_inputs("bart", 2))
        with pytest.raises(ValueError, match="encoder_outputs: expected the memories of 1 input"):
            decoding.generate(
                encoder_outputs=encoded, decoder_input_ids=torch.tensor([[2, 19, 49]]),
                logits_processor=[lambda ids, scores: scores], max_new_tokens=4, **options,
            )  # fmt: skip


def test_a_processor_that_changes_the_prompt_sees_the_change() -> None:
    decoding, seen = pair("bart")[1], list[list[int]]()

    def changed(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0, :2].tolist())
        ids[:, 0] = 9
        return scores

    decoding.generate(
        **make_inputs("bart", 1), decoder_input_ids=torch.tensor([[2, 19]]), num_beams=2,
        logits_processor=[changed], max_new_tokens=4,
    )  # fmt: skip
    assert seen == [[2, 19]] + [[9, 19]] * (len(seen) - 1) and len(seen) > 2
