"""The step-by-step comparison with transformers: no difference, and each kind of difference."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0")

from lmdecode.beam.engine import device_passes, search
from lmdecode.integrations.transformers import compare_with_transformers

OPTIONS = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": [2, 5]}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bart", "t5"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_no_difference(make_model, prompts, name: str, early_stopping: bool | str) -> None:
    model = make_model(name)
    comparison = compare_with_transformers(
        model, prompts, **OPTIONS, early_stopping=early_stopping, num_return_sequences=2
    )
    assert comparison.difference is None
    assert comparison.num_steps >= 3
    assert comparison.num_candidates == sum(len(trace.candidates) for trace in comparison.traces)
    assert str(comparison) == (
        f"no difference: {comparison.num_steps} steps, {comparison.num_candidates} candidates"
    )


def test_no_difference_with_processors(make_model, padded_prompts) -> None:
    comparison = compare_with_transformers(
        make_model("llama"), padded_prompts["input_ids"],
        attention_mask=padded_prompts["attention_mask"], **OPTIONS, min_new_tokens=4,
        repetition_penalty=1.3, no_repeat_ngram_size=2, suppress_tokens=[7, 8],
        forced_eos_token_id=2, sequence_bias={(9,): 2.0}, length_penalty=2.0,
    )  # fmt: skip
    assert comparison.difference is None


def test_model_is_left_as_it_was(make_model, prompts) -> None:
    model = make_model("gpt2")
    before = set(vars(model))
    compare_with_transformers(model, prompts, **OPTIONS)
    with pytest.raises(ValueError, match="num_beams above 1"):
        compare_with_transformers(model, prompts, max_new_tokens=2, do_sample=False)
    assert set(vars(model)) == before


@pytest.fixture
def of_ops(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let steps be made of ops, as on devices, which a test can replace."""
    monkeypatch.setattr(search, "CpuChooser", device_passes.DeviceChooser)
    return monkeypatch


def _swapped(at: int):
    """Return a log_softmax_top_k whose first two candidates change places in one step."""
    original, calls = device_passes.log_softmax_top_k, []

    def op(*args, **kwargs):
        candidates = original(*args, **kwargs)
        calls.append(None)
        if len(calls) == at + 1:
            candidates.tokens[1, :2] = candidates.tokens[1, :2].flip(0)
        return candidates

    return op


def test_first_difference_among_candidates(make_model, prompts, of_ops) -> None:
    of_ops.setattr(device_passes, "log_softmax_top_k", _swapped(2))
    comparison = compare_with_transformers(make_model("llama"), prompts, **OPTIONS)
    assert comparison.num_steps == 3 and str(comparison) == comparison.difference
    candidate = next(
        t for t in comparison.traces if (t.step, t.request_id) == (2, 1)
    ).candidates[0]  # fmt: skip
    assert comparison.difference.startswith(
        f"step 2, request 1: candidate 0 is {candidate.token} of beam {candidate.beam}, score "
        f"{candidate.score:.7g}; in transformers "
    )


def test_equal_scores_are_called_so(make_model, prompts, of_ops) -> None:
    of_ops.setattr(device_passes, "log_softmax_top_k", _swapped(2))
    comparison = compare_with_transformers(make_model("llama"), prompts, **OPTIONS, tolerance=1e3)
    assert comparison.difference.endswith(" (equal scores, within the tolerance)")


def test_first_difference_among_hypotheses(make_model, prompts, of_ops) -> None:
    original = device_passes.beam_step

    def longer(state, parameters, *args, **kwargs):
        parameters = parameters._replace(length_penalty=parameters.length_penalty + 1.0)
        return original(state, parameters, *args, **kwargs)

    of_ops.setattr(device_passes, "beam_step", longer)
    comparison = compare_with_transformers(
        make_model("llama"), prompts, **{**OPTIONS, "eos_token_id": list(range(2, 20))}
    )
    assert "hypothesis 0 is " in comparison.difference


def test_difference_of_the_end(make_model, prompts, of_ops) -> None:
    original = device_passes.beam_step

    def ends(state, *args, **kwargs):
        step = original(state, *args, **kwargs)
        if int(state.lengths.max()) == prompts.shape[1] + 4:
            state.done.fill_(1)
        return step

    of_ops.setattr(device_passes, "beam_step", ends)
    comparison = compare_with_transformers(
        make_model("llama"), prompts, num_beams=2, max_new_tokens=6, do_sample=False,
        eos_token_id=60,
    )  # fmt: skip
    assert comparison.difference == "step 4: all is done; transformers goes on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids is \[\[3, 4\]\]; expected none"),
        ({"do_sample": True}, "do_sample is True"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor is given"),
        ({"sequence_bias": {(3, 4): 1.0}}, "sequence_bias has sequences"),
    ],
)
def test_settings_that_are_not_compared(make_model, prompts, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"^compare_with_transformers: {message}"):
        compare_with_transformers(make_model("gpt2"), prompts, **{**OPTIONS, **arguments})
