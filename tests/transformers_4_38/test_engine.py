"""``BeamSearch`` with the dialect "scorer" gives what transformers 4.38.2 does, groups included."""

import dataclasses
import random
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from lmdecode import BeamRequest, BeamSearch
from tests.support.beam_searches import (
    TableModel,
    as_transformers_model,
    generate_arguments,
    random_request,
    run_requests,
)

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("4.38."), reason="needs transformers 4.38"
)

VOCAB = 40


def _check(table: TableModel, request: BeamRequest) -> None:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = as_transformers_model(table).generate(
            **generate_arguments(request), use_cache=False
        )
    result = run_requests(BeamSearch(), table, [(0, request)])[0]
    assert torch.equal(result.sequences, expected.sequences), request
    torch.testing.assert_close(
        result.scores.float(), expected.sequences_scores, rtol=1e-5, atol=1e-5, msg=str(request)
    )
    if request.num_beam_groups == 1:  # theirs count those of groups in a batch of one group
        width = min(result.beam_indices.shape[1], expected.beam_indices.shape[1])
        ours, theirs = result.beam_indices[:, :width], expected.beam_indices[:, :width]
        # Of a hypothesis that was never finished, theirs has no beam of the last token.
        known = theirs >= 0
        assert torch.equal(ours[known], theirs[known].to(torch.int32)), request


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("processors", [False, True])
def test_beam_search(seed: int, processors: bool) -> None:
    choice = random.Random(f"{seed}/{processors}")
    for _ in range(12):
        request = random_request(
            choice, VOCAB, processors=processors, dialect="scorer", num_beam_groups=1, patience=1.0,
            num_beams=choice.randint(2, 5), num_return_sequences=2, diversity_penalty=0.0,
            # A token that is forced in the first step leaves torch.topk to choose among equals.
            max_new_tokens=choice.randint(3 if processors else 1, 12),
        )  # fmt: skip
        _check(TableModel(VOCAB, choice.getrandbits(30)), request)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("processors", [False, True])
def test_groups(seed: int, processors: bool) -> None:
    choice = random.Random(f"groups/{seed}/{processors}")
    for _ in range(12):
        groups, size = choice.randint(2, 3), choice.randint(1, 3)
        request = random_request(
            choice, VOCAB, processors=processors, dialect="scorer", num_beams=groups * size,
            num_beam_groups=groups, diversity_penalty=choice.choice((0.5, 1.0, 3.0)), patience=1.0,
            num_return_sequences=choice.randint(1, groups * size),
            max_new_tokens=choice.randint(3 if processors else 1, 12),
        )  # fmt: skip
        _check(TableModel(VOCAB, choice.getrandbits(30)), request)


def test_batch_of_one_after_the_other() -> None:
    """Requests of different groups and widths in one batch, against each alone in transformers."""
    choice = random.Random("batch")
    table = TableModel(VOCAB, 1)
    requests = [
        random_request(
            choice, VOCAB, processors=False, dialect="scorer", num_beams=4, num_return_sequences=2,
            patience=1.0, num_beam_groups=groups, diversity_penalty=1.0 if groups > 1 else 0.0,
        )
        for groups in (1, 2, 4, 2, 1)
    ]  # fmt: skip
    together = run_requests(BeamSearch(), table, list(enumerate(requests)))
    for number, request in enumerate(requests):
        _check(table, dataclasses.replace(request))
        alone = run_requests(BeamSearch(), table, [(0, request)])[0]
        assert torch.equal(together[number].sequences, alone.sequences)
