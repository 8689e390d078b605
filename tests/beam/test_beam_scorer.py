"""``BeamSearchScorer`` on the ops. Parity with transformers is in transformers_4_38."""

from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import BeamHypotheses, BeamSearchScorer
from lmdecode.reference.beam_scorer import BeamSearchScorer as ReferenceScorer
from tests.support.scorer_walks import scorer_cases, walk

END, PAD = 2, 0


def scorer(**changes: Any) -> BeamSearchScorer:
    return BeamSearchScorer(**{"batch_size": 1, "num_beams": 2, "device": "cpu", **changes})


def step(search: Any, ids: Any, tokens: Any, *scores: torch.Tensor, **options: Any) -> Any:
    """Candidates of beam 0 and 1 in turn, scores -1, -2, ..."""
    count = len(tokens)
    return search.process(
        torch.tensor(ids),
        -torch.arange(1.0, count + 1).unsqueeze(0),
        torch.tensor([tokens]),
        (torch.arange(count) % 2).unsqueeze(0),
        *scores,
        **{"pad_token_id": PAD, "eos_token_id": END, **options},
    )


def plain(hypotheses: BeamHypotheses) -> list[Any]:
    return [(score, tokens.tolist(), indices) for score, tokens, indices in hypotheses.beams]


@pytest.mark.parametrize("seed", range(4))
def test_random_searches(seed: int) -> None:
    """The reference is what is compared with transformers, in its environment."""
    steps = sum(
        walk(
            case,
            BeamSearchScorer(device="cpu", **case.arguments),
            ReferenceScorer(device="cpu", **case.arguments),
        )
        for case in scorer_cases(60, seed + 100)
    )
    assert steps >= 500


def test_an_end_token_closes_a_hypothesis() -> None:
    search = scorer(batch_size=1)
    result = step(search, [[4, 5], [6, 7]], [8, END, 9, 3])
    assert list(result) == ["next_beam_scores", "next_beam_tokens", "next_beam_indices"]
    assert result["next_beam_tokens"].tolist() == [8, 9]
    assert result["next_beam_scores"].tolist() == [-1.0, -3.0]
    assert result["next_beam_indices"].tolist() == [0, 0]
    hypotheses = search._beam_hyps[0]
    assert isinstance(hypotheses, BeamHypotheses) and len(hypotheses) == 1
    assert plain(hypotheses) == [(-2.0 / 3, [6, 7], None)]
    assert hypotheses.worst_score == -2.0 / 3
    assert search.is_done.dtype == torch.bool and not search.is_done


def test_an_end_token_ranked_below_the_beams_is_dropped() -> None:
    search = scorer()
    result = step(search, [[4], [6]], [END, 8, END, 9])
    assert result["next_beam_tokens"].tolist() == [8, 9]
    assert len(search._beam_hyps[0]) == 1


def test_a_candidate_of_minus_infinity_goes_on_where_there_is_no_other() -> None:
    """What a forced end token leaves."""
    search = scorer(num_beam_hyps_to_keep=2)
    result = search.process(
        torch.tensor([[4], [6]]),
        torch.tensor([[-1.0, -float("inf"), -float("inf"), -float("inf")]]),
        torch.tensor([[END, END, 8, 9]]),
        torch.tensor([[0, 1, 1, 0]]),
        pad_token_id=PAD,
        eos_token_id=END,
    )
    assert result["next_beam_tokens"].tolist() == [8, 9]
    assert result["next_beam_scores"].tolist() == [-float("inf")] * 2
    assert plain(search._beam_hyps[0]) == [(-0.5, [4], None), (-float("inf"), [6], None)]
    search = scorer(num_beam_hyps_to_keep=2)
    result = search.finalize(
        torch.tensor([[4], [6]]), torch.tensor([-1.0, -float("inf")]), None, None, max_length=1
    )
    assert result["sequences"].tolist() == [[4], [6]]
    assert result["sequence_scores"].tolist() == [-1.0, -float("inf")]


def test_a_search_that_is_done_is_padded() -> None:
    search = scorer(do_early_stopping=True)
    step(search, [[4], [6]], [END, END, 8, 9])
    assert search.is_done and search._done.tolist() == [True]
    result = step(search, [[4, 8], [6, 9]], [7, 7, 7, 7])
    assert [part.tolist() for part in result.values()] == [[0.0, 0.0], [PAD, PAD], [0, 0]]
    assert len(search._beam_hyps[0]) == 2
    for missing in ("pad_token_id", "eos_token_id"):
        with pytest.raises(ValueError, match=f"{missing}.* None"):
            step(search, [[4, 8], [6, 9]], [7, 7, 7, 7], **{missing: None})


def test_dtypes_are_those_of_the_input() -> None:
    result = scorer().process(
        torch.tensor([[4], [6]], dtype=torch.int32),
        torch.tensor([[-1.0, -1.5, -2.0, -3.0]], dtype=torch.bfloat16),
        torch.tensor([[7, 8, 9, 3]], dtype=torch.int32),
        torch.tensor([[1, 0, 0, 0]], dtype=torch.int32),
    )
    assert [part.dtype for part in result.values()] == [torch.bfloat16, torch.int32, torch.int32]
    assert result["next_beam_indices"].tolist() == [1, 0]


def test_beam_indices_go_with_the_hypotheses() -> None:
    search = scorer(num_beam_hyps_to_keep=2)
    indices = ((torch.tensor(0), 1), (1, torch.tensor(1)))
    step(search, [[4, 5, 6], [6, 7, 8]], [8, END, 9, 3], beam_indices=indices)
    assert plain(search._beam_hyps[0]) == [(-0.5, [6, 7, 8], (1, 1, 1))]
    result = search.finalize(
        torch.tensor([[4, 5, 6, 8], [4, 5, 6, 9]]),
        torch.tensor([-1.0, -3.0]),
        None,
        None,
        max_length=6,
        pad_token_id=PAD,
        eos_token_id=END,
        beam_indices=((0, 0, 0), (0, 0, 1)),
    )
    assert result["sequences"].tolist() == [[4, 5, 6, 8, END], [6, 7, 8, END, PAD]]
    assert result["sequence_scores"].tolist() == [-0.25, -0.5]
    assert result["beam_indices"].tolist() == [[0, 0, 0, -1, -1], [1, 1, 1, -1, -1]]


def test_finalize_again_returns_as_many_as_asked_for() -> None:
    """It keeps what the first call added, and reads the attribute anew."""
    search = scorer(num_beams=3)
    ids, scores = torch.tensor([[4, 5], [4, 6], [4, 7]]), torch.tensor([-1.0, -2.0, -4.0])
    options = {"max_length": 3, "pad_token_id": PAD, "eos_token_id": END}
    first = search.finalize(ids, scores, None, None, **options)
    assert first["sequences"].tolist() == [[4, 5, END]] and first["beam_indices"] is None
    search.num_beam_hyps_to_keep = 3
    again = search.finalize(ids, scores, None, None, **options)
    # -1 and -2 replace -4 and the first -2: of equal scores the last to come is the first.
    assert again["sequence_scores"].tolist() == [-0.5, -0.5, -1.0]
    search.num_beam_hyps_to_keep = 4
    with pytest.raises(ValueError, match="num_beam_hyps_to_keep is 4; expected an int from 1 to 3"):
        search.finalize(ids, scores, None, None, **options)


def test_hypotheses_added_by_hand_are_the_scorers() -> None:
    search = scorer(do_early_stopping=True)
    hypotheses = search._beam_hyps[0]
    hypotheses.add(torch.tensor([5, 6, 7]), -3.0)
    hypotheses.add(torch.tensor([8]), -3.0, beam_indices=(1,), generated_len=2)
    assert hypotheses.is_done(-0.1, 5)
    assert plain(hypotheses) == [(-1.0, [5, 6, 7], None), (-1.5, [8], (1,))]
    hypotheses.add(torch.tensor([9, 9]), -2.4)
    assert plain(hypotheses) == [(-1.0, [5, 6, 7], None), (-1.2, [9, 9], None)]
    assert hypotheses.worst_score == -1.2
    hypotheses.add(torch.tensor([9, 9]), -2.4)  # no better
    assert len(hypotheses) == 2
    result = step(search, [[4], [6]], [7, 8, 9, 3])
    assert search.is_done and result["next_beam_tokens"].tolist() == [7, 8]


def test_groups_are_searches_of_their_own() -> None:
    search = scorer(num_beams=4, num_beam_groups=2, do_early_stopping=True)
    assert len(search._beam_hyps) == 2 and search._beam_hyps[0].num_beams == 2
    step(search, [[4], [6]], [END, END, 8, 9], group_index=1)
    assert search._done.tolist() == [False, True]
    step(search, [[4], [6]], [END, END, 8, 9], group_index=0)
    assert search.is_done
    with pytest.raises(ValueError, match="group_index is 2; expected 0 to 1"):
        step(search, [[4], [6]], [7, 8, 9, 3], group_index=2)


def test_minus_one_is_an_end_token_that_never_comes() -> None:
    search = scorer()
    step(search, [[4], [6]], [7, 8, 9, 3], eos_token_id=-1)
    result = search.finalize(
        torch.tensor([[4, 7], [6, 8]]), torch.tensor([-1.0, -2.0]), None, None,
        max_length=4, pad_token_id=PAD, eos_token_id=-1,
    )  # fmt: skip
    assert result["sequences"].tolist() == [[4, 7, -1]]


def test_bad_input() -> None:
    for changes in (
        {"batch_size": 0},
        {"num_beams": 1},
        {"num_beam_groups": 3},
        {"do_early_stopping": "never"},
    ):
        with pytest.raises(ValueError, match=next(iter(changes)).removeprefix("do_")):
            scorer(**changes)
    with pytest.raises(ValueError, match=r"input_ids has shape \[3, 1\]; expected 2 rows"):
        step(scorer(), [[1]] * 3, [7, 8, 9, 3])
    with pytest.raises(ValueError, match="expected at least 2 other tokens for each search"):
        step(scorer(), [[4], [6]], [END, END, END, 7])
    ids, scores = torch.tensor([[4, 5], [4, 6]]), torch.tensor([-1.0, -2.0])
    options: dict[str, Any] = {"max_length": 3, "pad_token_id": PAD, "eos_token_id": END}
    for message, changes in (
        ("max_length is 1; expected at least 2", {"max_length": 1}),
        ("eos_token_id is None", {"eos_token_id": None}),
        ("decoder_prompt_len is 2; expected less than 2", {"decoder_prompt_len": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            scorer().finalize(ids, scores, None, None, **{**options, **changes})
    search = scorer()
    step(search, [[4], [6]], [7, END, 9, 3])
    search.num_beam_hyps_to_keep = 2
    with pytest.raises(ValueError, match="pad_token_id is None"):
        search.finalize(ids, scores, None, None, max_length=3, eos_token_id=END)
    with pytest.raises(ValueError, match=r"final_beam_scores has shape \[1\]"):
        scorer().finalize(ids, scores[:1], None, None, **options)


def test_the_package_has_them() -> None:
    for name in ("BeamSearchScorer", "ConstrainedBeamSearchScorer", "BeamHypotheses"):
        assert name in lmdecode.__all__
