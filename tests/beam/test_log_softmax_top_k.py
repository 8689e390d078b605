"""``log_softmax_top_k``: equal to the reference bit by bit, close to torch, and to itself."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode import BeamCandidates, log_softmax_top_k
from lmdecode.reference import log_softmax_top_k as reference
from tests.support.cases import BeamCase, assert_same_bits
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.random_cases import beam_cases
from tests.support.random_tensors import randn

INF, NAN = float("inf"), float("nan")
ALL_VOCABS = (1, 2, 5, 63, 64, 65, 200, 1000, 1025, 4099)


@pytest.mark.parametrize(
    ("seed", "count", "vocabs"), [(1, 500, ALL_VOCABS[:6]), (2, 150, ALL_VOCABS), (3, 12, (40000,))]
)
def test_equals_the_reference(
    seed: int, count: int, vocabs: tuple[int, ...], device: torch.device
) -> None:
    for case in beam_cases(seed, count, vocab_sizes=vocabs):
        assert_same_bits(case.to(device).call(log_softmax_top_k), case.call(reference), case)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.floats(width=32, allow_nan=True, allow_infinity=True),
                st.sampled_from([-1.0, 0.0, -0.0, 0.5]),
            ),
            min_size=7,
            max_size=7,
        ),
        min_size=2,
        max_size=2,
    ),
    scores=st.lists(
        st.one_of(
            st.floats(-1e10, 0, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, -1e9])
        ),
        min_size=2,
        max_size=2,
    ),
    count=st.integers(1, 16),
)
def test_any_input_equals_the_reference(
    rows: list[list[float]], scores: list[float], count: int
) -> None:
    case = BeamCase("hypothesis", torch.tensor(rows), torch.tensor(scores), count, 2)
    out = case.call(log_softmax_top_k)
    assert_same_bits(out, case.call(reference), case)
    assert not out.scores.isnan().any()


@pytest.mark.parametrize("vocab", [128256, 151936, 2**20 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_vocabulary(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    case = BeamCase("huge", (randn(2, vocab) * 3).to(dtype), torch.tensor([-1.0, -1.25]), 9, 2)
    assert_same_bits(case.to(device).call(log_softmax_top_k), case.call(reference), case)


@pytest.mark.parametrize("beam_score", [0.0, -1e4, -1e7, -1e9, -3.4e38])
def test_scores_that_swallow_the_logits(beam_score: float, device: torch.device) -> None:
    """Beside a large beam score many logits, or all, have one score: the lowest tokens win."""
    for vocab in (50, 5000):
        for count in (3, 40):
            scores = torch.tensor([beam_score, beam_score])
            case = BeamCase(f"{beam_score}", randn(2, vocab) * 3, scores, count, 2)
            out = case.to(device).call(log_softmax_top_k)
            assert_same_bits(out, case.call(reference), case)
            if beam_score <= -1e9:
                assert out.tokens[0].tolist() == list(range(count))
                assert out.beams[0].tolist() == [0] * count


def torch_scores(case: BeamCase) -> list[torch.Tensor]:
    """[num_beams * vocab] of each request, by torch's own log_softmax."""
    rows = case.logits.float().log_softmax(-1) + case.beam_scores[:, None]
    widths = case.num_beams
    if isinstance(widths, int):
        return [request.flatten() for request in rows.split(widths)]
    return [request.flatten() for request in rows.split(torch.as_tensor(widths).tolist())]


def test_close_to_torch(device: torch.device) -> None:
    """Scores within 1e-5, and the same tokens but where two scores are nearer than that."""
    chosen = [
        *beam_cases(5, 150, vocab_sizes=ALL_VOCABS, extremes=False),
        *beam_cases(6, 4, vocab_sizes=(32000,), extremes=False),
    ]
    for case in chosen:
        out = case.to(device).call(log_softmax_top_k)
        vocab = case.logits.shape[1]
        for request, flat in enumerate(torch_scores(case)):
            count = min(case.num_candidates, len(flat))
            expected = flat.topk(count)
            scores = out.scores[request, :count].cpu()
            tolerance = 1e-5 * (1 + expected.values.abs())
            assert ((scores - expected.values).abs() <= tolerance).all(), case
            chosen_flat = (out.beams * vocab + out.tokens)[request, :count].cpu()
            assert ((flat[chosen_flat] - expected.values).abs() <= tolerance).all(), case
            assert len(chosen_flat.unique()) == count, case
            apart = (expected.values[:-1] - expected.values[1:]) > 4e-5
            if count == len(apart) + 1 and apart.all() and count < len(flat):
                assert torch.equal(chosen_flat[:-1], expected.indices[:-1]), case


def test_log_probs_are_those_of_the_tokens_alone(device: torch.device) -> None:
    x, scores = (randn(4, 300) * 3).to(device), torch.tensor([-1.0, -1e9, -2.5, -0.5])
    out = log_softmax_top_k(x, scores.to(device), 400, num_beams=2)
    beams = out.beams + torch.tensor([[0], [2]], device=device)
    expected = x.log_softmax(-1)[beams, out.tokens]
    torch.testing.assert_close(out.log_probs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.log_probs + scores.to(device)[beams], out.scores)


def test_ties_go_to_the_lowest_flat_index(device: torch.device) -> None:
    out = log_softmax_top_k(
        torch.zeros(3, 4, device=device), torch.zeros(3, device=device), 6, num_beams=3
    )
    assert out.beams[0].tolist() == [0, 0, 0, 0, 1, 1]
    assert out.tokens[0].tolist() == [0, 1, 2, 3, 0, 1]


def test_fewer_candidates_than_asked(device: torch.device) -> None:
    x = torch.tensor([[1.0, -INF, 0.0], [-INF, 2.0, -INF]], device=device)
    out = log_softmax_top_k(x, torch.zeros(2, device=device), 5, num_beams=2)
    assert out.status.tolist() == [0]
    assert out.tokens[0].tolist() == [1, 0, 2, 0, 0]
    assert out.beams[0].tolist() == [1, 0, 0, 0, 0]
    assert out.scores[0, 3:].tolist() == [-INF, -INF]


@pytest.mark.parametrize(
    ("value", "score", "status"), [(NAN, 0.0, 1), (-INF, 0.0, 2), (0.0, NAN, 4), (0.0, INF, 4)]
)
def test_status_ends_one_request(
    value: float, score: float, status: int, device: torch.device
) -> None:
    x, scores = randn(6, 50).to(device), torch.zeros(6, device=device)
    good = log_softmax_top_k(x, scores, 4, num_beams=2)
    if value == -INF:
        x[3] = value
    else:
        x[3, 49] = value
    scores[3] = score
    out = log_softmax_top_k(x, scores, 4, num_beams=2)
    assert out.status.tolist() == [0, status, 0]
    assert (out.scores[1] == -INF).all() and (out.log_probs[1] == -INF).all()
    assert not out.tokens[1].any() and not out.beams[1].any()
    for field, want in zip(out, good, strict=True):
        assert torch.equal(field[[0, 2]], want[[0, 2]])


def test_a_dead_beam_is_not_looked_at(device: torch.device) -> None:
    x, scores = randn(4, 30).to(device), torch.tensor([-INF, -1.0, -INF, -INF], device=device)
    x[0] = NAN
    out = log_softmax_top_k(x, scores, 3, num_beams=2)
    assert out.status.tolist() == [0, 2]
    assert out.beams[0].tolist() == [1, 1, 1]


def test_infinite_logits_share_the_probability(device: torch.device) -> None:
    x = torch.tensor([[0.0, INF, 3.0, INF]], device=device)
    out = log_softmax_top_k(x, torch.tensor([-1.0], device=device), 3, num_beams=1)
    assert out.tokens[0].tolist() == [1, 3, 0]
    torch.testing.assert_close(
        out.scores[0].cpu(), torch.tensor([-1.6931472, -1.6931472, -INF]), rtol=0, atol=1e-6
    )


def test_widths_in_every_form(device: torch.device) -> None:
    x, scores = randn(6, 40).to(device), randn(6, seed=1).to(device)
    flat = log_softmax_top_k(x, scores, 5, num_beams=3)
    for same in (
        log_softmax_top_k(x, scores.view(2, 3), 5, num_beams=3),
        log_softmax_top_k(x, scores, 5, num_beams=[3, 3]),
        log_softmax_top_k(x, scores, 5, num_beams=(3, 3)),
        log_softmax_top_k(x, scores, 5, num_beams=torch.tensor([3, 3], device=device)),
        log_softmax_top_k(
            x, scores, 5, num_beams=torch.tensor([3, 3], dtype=torch.int32, device=device)
        ),
    ):
        assert_same_bits(same, flat)


@pytest.mark.parametrize("num_beams", [1, 4, [], torch.empty(0, dtype=torch.int64)])
def test_no_requests(num_beams: Any, device: torch.device) -> None:
    if isinstance(num_beams, torch.Tensor):
        num_beams = num_beams.to(device)
    empty = torch.empty(0, 9, device=device)
    out = log_softmax_top_k(empty, empty[:, 0], 3, num_beams=num_beams)
    assert [tuple(field.shape) for field in out] == [(0, 3), (0, 3), (0, 3), (0,), (0, 3)]


def test_a_request_alone_and_in_any_batch(device: torch.device) -> None:
    widths = [3, 1, 4, 2]
    x, scores = (randn(10, 700) * 3).to(device), randn(10, seed=1).to(device)
    whole = log_softmax_top_k(x, scores, 9, num_beams=widths)
    parts = list(zip(x.split(widths), scores.split(widths), strict=True))
    for order in ([0], [1], [2], [3], [3, 1, 0, 2], [2, 2, 0]):
        out = log_softmax_top_k(
            torch.cat([parts[r][0] for r in order]),
            torch.cat([parts[r][1] for r in order]),
            9,
            num_beams=[widths[r] for r in order],
        )
        assert_same_bits(out, BeamCandidates(*(field[order] for field in whole)))


def test_more_candidates_begin_with_fewer() -> None:
    x, scores = randn(4, 3000), torch.tensor([0.0, -1e4, -2.0, -2.0])
    many = log_softmax_top_k(x, scores, 300, num_beams=4)
    for count in (1, 2, 17, 150):
        few = log_softmax_top_k(x, scores, count, num_beams=4)
        for name in ("scores", "tokens", "beams", "log_probs"):
            assert torch.equal(getattr(few, name), getattr(many, name)[:, :count])


Arguments = dict[str, Any]
WRONG_TYPES: dict[str, list[Any]] = {
    "logits": [[[1.0]]],
    "beam_scores": [[0.0] * 6],
    "num_candidates": [2.0, True],
    "num_beams": [True, 2.0, None, "222", [2.0, 4.0]],
}
WRONG_VALUES: dict[str, list[Any]] = {
    "logits": [
        torch.zeros(6), torch.zeros(6, 1, 2), randn(6, 5).double(), randn(6, 5).long(),
        torch.zeros(6, 0),
    ],
    "beam_scores": [
        randn(6).double(), randn(5), randn(2, 3), randn(4, 2), randn(3, 2, 1),
        {"beam_scores": randn(3, 2), "num_beams": [2, 2, 2]}, randn(6).to("meta"),
    ],
    "num_candidates": [0, -1, 2**64, 2**50],
    "num_beams": [
        0, -2, 4, [6, 0], [2, 2], [2, 2, 3], [2**62] * 3, torch.ones(6),
        torch.ones(2, 3, dtype=torch.int64), torch.ones(6, dtype=torch.int64, device="meta"),
    ],
}  # fmt: skip
# What the CPU alone can see in a tensor of widths.
CPU_CASES: dict[str, list[int]] = {"a zero": [6, 0], "negative": [7, -1], "too few": [2, 3]}


def call(device: torch.device, **changes: Any) -> BeamCandidates:
    arguments = {
        "logits": randn(6, 5), "beam_scores": randn(6), "num_candidates": 4, "num_beams": 2,
        **changes,
    }  # fmt: skip
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            arguments[name] = value.to(device)
    return log_softmax_top_k(**arguments)


@wrong_calls(by_argument(TypeError, WRONG_TYPES), by_argument(ValueError, WRONG_VALUES))
def test_error_names_the_argument(wrong: WrongCall, device: torch.device) -> None:
    assert_refused(wrong, lambda: call(device, **wrong[1]))


@pytest.mark.parametrize("case", CPU_CASES)
def test_wrong_widths_in_a_tensor(case: str) -> None:
    widths = torch.tensor(CPU_CASES[case])
    with pytest.raises(ValueError, match="num_beams"):
        call(torch.device("cpu"), num_beams=widths)


def test_candidates_beyond_the_vocabulary(device: torch.device) -> None:
    out = call(device, num_candidates=1000)
    assert out.scores.shape == (3, 1000)
    assert (out.scores[:, :10] > -INF).all() and (out.scores[:, 10:] == -INF).all()
    assert lmdecode.log_softmax_top_k is log_softmax_top_k
