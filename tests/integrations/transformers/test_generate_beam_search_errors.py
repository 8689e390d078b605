"""``generate(custom_generate=beam_search)``: what it refuses, and scores that leave no token."""

import math

import pytest
import transformers
from beam_parity import assert_same, both
from transformers import LogitsProcessor, LogitsProcessorList
from user_processors import Overwrite

from lmdecode.integrations.transformers import beam_search
from tests.support.tiny_models import EOS, PAD


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 1}, r"^num_beams: expected at least 2 for beam search, got 1$"),
        ({"num_beams": 2, "low_memory": True}, r"^low_memory: expected None, .* got True$"),
        ({"num_beams": 3, "prompt_lookup_num_tokens": 2},
         r"^prompt_lookup_num_tokens: expected None, this is beam search, got 2$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_options_that_are_refused(llama, prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        llama.generate(
            prompts, max_new_tokens=5, do_sample=False, **arguments, custom_generate=beam_search
        )


def test_more_results_than_beams_are_refused(llama, prompts):
    config = transformers.GenerationConfig(num_beams=2, max_new_tokens=3, pad_token_id=PAD)
    config.num_return_sequences = 3
    with pytest.raises(ValueError, match="num_return_sequences"):
        llama.generate(prompts, generation_config=config, custom_generate=beam_search)
    config.max_length, config._eos_token_tensor, config._pad_token_tensor = 9, None, None
    with pytest.raises(ValueError, match=r"^num_return_sequences: expected at most num_beams = 2"):
        beam_search(llama, prompts, LogitsProcessorList(), [], config)


def test_a_streamer_is_refused(llama, prompts):
    class Streamer:
        def put(self, value):
            pass

    with pytest.raises(ValueError, match=r"^streamer: expected None for beam search"):
        llama.generate(
            prompts, num_beams=2, max_new_tokens=3, streamer=Streamer(), custom_generate=beam_search
        )


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "NaN in its logits"),
        (-math.inf, "no candidate above -inf"),
        (math.inf, r"a score of \+inf or NaN"),
    ],
)
def test_scores_without_a_token_raise(llama, prompts, do_sample, value, message):
    length = prompts.shape[1] + 2
    with pytest.raises(RuntimeError, match=f"step 2: .*prompt 1 has .*{message}$"):
        llama.generate(
            prompts,
            do_sample=do_sample,
            num_beams=3,
            max_new_tokens=5,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([Overwrite(slice(3, 6), value, length)]),
            custom_generate=beam_search,
        )


@pytest.mark.parametrize(("value", "message"), [(math.nan, "NaN"), (-math.inf, "no candidate")])
def test_the_models_own_logits_without_a_token_raise(llama, prompts, value, message):
    def poison(module, inputs, outputs):
        outputs.logits[7, -1] = value

    hook = llama.register_forward_hook(poison)
    try:
        with pytest.raises(RuntimeError, match=f"step 0: .*prompt 2 has {message}"):
            llama.generate(prompts, num_beams=3, max_new_tokens=5, custom_generate=beam_search)
    finally:
        hook.remove()


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_scores_of_searches_that_are_done_do_not_matter(llama, prompts, do_sample):
    """All beams of prompt 1 end in the second step; what follows is nobody's error."""

    class EndPrompt1(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, EOS] = -math.inf
            scores[3:6] = -20.0
            scores[3:6, EOS] = 0.0
            return scores

    processors = [EndPrompt1(), Overwrite(slice(3, 6), math.nan, prompts.shape[1] + 2)]
    ids = llama.generate(
        prompts,
        do_sample=do_sample,
        num_beams=3,
        max_new_tokens=5,
        early_stopping=True,
        logits_processor=LogitsProcessorList(processors),
        custom_generate=beam_search,
    )
    assert ids[1, prompts.shape[1]] == EOS


def test_a_beam_without_a_token_does_not_end_the_others(llama, prompts):
    """A processor may leave nothing of one beam, as long as others go on."""
    processor = Overwrite(slice(1, 2), -math.inf, prompts.shape[1] + 1)
    arguments = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": None}
    assert_same(
        *both(llama, prompts[:1], logits_processor=LogitsProcessorList([processor]), **arguments)
    )
