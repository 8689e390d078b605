"""``BeamSearch`` gives what ``generate(num_beams=...)`` of this transformers gives."""

import random

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from lmdecode import BeamRequest, BeamResult, BeamSearch
from tests.support.beam_searches import (
    TableModel,
    as_transformers_model,
    generate_arguments,
    random_request,
    run_requests,
)


def _generate(model, request: BeamRequest, **more):
    """Run stock transformers."""
    return model.generate(**generate_arguments(request), **more)


def _assert_equal(result: BeamResult, expected, case: object) -> None:
    assert torch.equal(result.sequences, expected.sequences), case
    assert torch.equal(result.beam_indices, expected.beam_indices), case
    torch.testing.assert_close(
        result.scores.float(), expected.sequences_scores, rtol=1e-5, atol=1e-5, msg=str(case)
    )


@pytest.mark.parametrize("seed", [*range(8), *(f"processors/{n}" for n in range(8))])
def test_table_models(seed: int | str) -> None:
    """With fewer tokens than candidates, or forced, banned and penalized tokens."""
    choice = random.Random(seed)
    processors = isinstance(seed, str)
    given = {"diversity_penalty": 0.0} if processors else {}
    for _ in range(12):
        vocab = 40 if processors else choice.choice((7, 13, 40))
        table = TableModel(vocab, choice.getrandbits(30))
        request = random_request(
            choice, vocab, processors=processors, dialect="generate",
            num_beams=choice.randint(2, 5), num_beam_groups=1, patience=1.0,
            num_return_sequences=1 if processors else 2, **given,
        )  # fmt: skip
        expected = _generate(as_transformers_model(table), request, use_cache=False)
        result = run_requests(BeamSearch(), table, [(0, request)])[0]
        _assert_equal(result, expected, request)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_models(make_model, name: str, early_stopping: bool | str, length_penalty: float) -> None:
    """In one batch, entering one after the other, without a cache; theirs alone, with one."""
    model = make_model(name)
    choice = random.Random(f"{early_stopping}/{length_penalty}")
    requests = [
        BeamRequest(
            [choice.randrange(3, 61) for _ in range(choice.randint(1, 7))],
            max_new_tokens=choice.randint(3, 12),
            num_beams=num_beams,
            num_return_sequences=2,
            eos_token_id=ends,
            pad_token_id=0 if ends is None else None,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        for num_beams, ends in ((2, 2), (3, [2, 5, 9]), (4, None), (5, list(range(2, 12))))
    ]

    @torch.no_grad()
    def logits(input_ids, lengths):
        # Causal: what stands behind the end of a row does not reach it.
        mask = (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long()
        out = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        return out[torch.arange(len(lengths)), lengths - 1]

    results = run_requests(BeamSearch(), logits, list(enumerate(requests)))
    for number, request in enumerate(requests):
        _assert_equal(results[number], _generate(model, request), request)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_follows_parents(make_model, name: str) -> None:
    """The prompt runs once; its cache widens to the beams and follows ``parents``."""
    from transformers import DynamicCache

    model = make_model(name)
    request = BeamRequest(
        [7, 8, 9], max_new_tokens=10, num_beams=4, num_return_sequences=4, eos_token_id=[2, 5, 11]
    )
    engine, cache = BeamSearch(), DynamicCache()
    engine.insert(request)
    ids = torch.tensor([request.prompt_ids])
    calls = []
    with torch.no_grad():
        while engine.num_rows:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            calls.append(tuple(ids.shape))
            out = engine.step(logits)
            ids = out.tokens[:, None]
            cache.reorder_cache(out.parents)
    assert calls == [(1, 3)] + [(4, 1)] * (len(calls) - 1)
    _assert_equal(engine.pop_finished()[0], _generate(model, request), request)
