"""``ConstrainedBeamSearchScorer``. Parity with transformers is in transformers_4_38."""

from typing import Any

import pytest
import torch

from lmdecode import ConstrainedBeamSearchScorer, DisjunctiveConstraint, PhrasalConstraint
from lmdecode.beam.scorers.constrained_beam_scorer import _bank_order

END, PAD, VOCAB = 2, 0, 12


def scorer(**changes: Any) -> ConstrainedBeamSearchScorer:
    arguments: dict[str, Any] = {
        "batch_size": 1,
        "num_beams": 2,
        "constraints": [PhrasalConstraint([5, 6])],
        "device": "cpu",
        **changes,
    }
    return ConstrainedBeamSearchScorer(**arguments)


def step(search: ConstrainedBeamSearchScorer, ids: Any, tokens: Any, **options: Any) -> Any:
    """Candidates of beam 0 and 1 in turn, scores -1, -2, ...; every token costs 10 otherwise."""
    count = len(tokens)
    return search.process(
        torch.tensor(ids),
        -torch.arange(1.0, count + 1).unsqueeze(0),
        torch.tensor([tokens]),
        (torch.arange(count) % 2).unsqueeze(0),
        torch.full((2, VOCAB), -10.0),
        **{"pad_token_id": PAD, "eos_token_id": END, **options},
    )


def test_a_beam_is_kept_for_the_phrase() -> None:
    """The first token of the phrase joins the candidates, and takes the first place."""
    result = step(scorer(), [[1], [1]], [7, 8, 9, 3])
    assert result["next_beam_tokens"].tolist() == [5, 7]
    assert result["next_beam_scores"].tolist() == [-10.0, -1.0]
    assert result["next_beam_indices"].tolist() == [0, 0]


def test_only_what_fulfils_the_constraints_is_finished() -> None:
    search = scorer()
    step(search, [[1, 5], [1, 7]], [END, END, 8, 9])
    assert len(search._beam_hyps[0]) == 0
    step(search, [[1, 5, 6], [1, 7, 7]], [END, END, 8, 9])
    assert [beam[1].tolist() for beam in search._beam_hyps[0].beams] == [[1, 5, 6]]
    step(search, [[1, 5, 6], [3, 5, 6]], [END, END, 8, 9])
    assert search.is_done
    result = step(search, [[1, 5, 6], [3, 5, 6]], [8, 8, 8, 8])
    assert [part.tolist() for part in result.values()] == [[0.0, 0.0], [PAD, PAD], [0, 0]]
    with pytest.raises(ValueError, match="pad_token_id None"):
        step(search, [[1, 5, 6], [3, 5, 6]], [8, 8, 8, 8], pad_token_id=None)


def test_finalize_prefers_what_fulfils_the_constraints() -> None:
    ids = torch.tensor([[1, 7, 7], [5, 6, 7]])
    options = {"max_length": 5, "pad_token_id": PAD, "eos_token_id": END}
    indices = ((0, 0), (1, 1))
    search = scorer()
    result = search.finalize(
        ids, torch.tensor([-1.0, -2.0]), None, None, beam_indices=indices, **options
    )
    assert result["sequences"].tolist() == [[5, 6, 7, END]]
    assert result["beam_indices"].tolist() == [[1, 1, -1, -1]]
    # With fewer than asked for, the others come too.
    search = scorer(num_beam_hyps_to_keep=2)
    result = search.finalize(
        ids, torch.tensor([-2.0, -1.0]), None, None, beam_indices=indices, **options
    )
    assert result["sequences"].tolist() == [[5, 6, 7, END], [1, 7, 7, END]]
    assert result["beam_indices"].tolist() == [[1, 1, -1, -1], [-1] * 4]
    assert result["sequence_scores"].tolist() == pytest.approx([-1 / 3, -2 / 3])


def test_constraints_may_be_replaced() -> None:
    search = scorer()
    assert search.check_completes_constraints([5, 6])
    search.constraints = [DisjunctiveConstraint([[5, 7], [8]])]
    assert not search.check_completes_constraints([5, 6])
    assert search.check_completes_constraints([8])


def test_candidates_of_equal_scores_stay_in_their_order() -> None:
    assert _bank_order([1] * 40, torch.zeros(40)) == list(range(40))
    banks = [0, 1] * 20
    order = _bank_order(banks, torch.zeros(40))
    assert order == [place for first in range(0, 40, 2) for place in (first + 1, first)]


def test_bad_input_changes_nothing() -> None:
    search = scorer()
    ids = [[5, 6], [5, 6]]
    with pytest.raises(ValueError, match="next_tokens has 1 candidates that are not end tokens"):
        step(search, ids, [END, END, END, 7])
    assert len(search._beam_hyps[0]) == 0 and not search.is_done
    with pytest.raises(ValueError, match=r"input_ids has shape \[3, 1\]; expected 2 rows"):
        step(search, [[1]] * 3, [7, 8, 9, 3])
    with pytest.raises(ValueError, match=r"expected \[1, candidates\] for each"):
        search.process(
            torch.tensor(ids),
            torch.zeros(2, 4),
            torch.ones(2, 4, dtype=torch.int64),
            torch.zeros(2, 4, dtype=torch.int64),
            torch.zeros(2, VOCAB),
        )
    for changes in ({"num_beams": 1}, {"num_beam_groups": 3}, {"do_early_stopping": "never"}):
        with pytest.raises(ValueError, match=next(iter(changes)).removeprefix("do_")):
            scorer(**changes)
    with pytest.raises(ValueError, match=r"^ConstrainedBeamSearchScorer: constraints is empty"):
        scorer(constraints=[])
    search = scorer()
    search.constraints = []
    with pytest.raises(ValueError, match="constraints is empty"):
        search.check_completes_constraints([1])
