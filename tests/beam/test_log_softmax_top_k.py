"""``log_softmax_top_k``: equal to the reference bit by bit, close to torch, and to itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

import lmdecode
from lmdecode import BeamCandidates, log_softmax_top_k
from lmdecode.reference import log_softmax_top_k as reference
from lmdecode.reference.beam import log_softmax_row
from tests.support.cases import BeamCase, assert_same_bits
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.random_cases import beam_cases
from tests.support.random_tensors import randint, randn

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
# What tests/test_op_contracts.py does not make from right calls.
WRONG_TYPES: dict[str, list[Any]] = {"num_beams": ["222", [2.0, 4.0]]}
WRONG_VALUES: dict[str, list[Any]] = {
    "logits": [torch.zeros(6, 0)],
    "beam_scores": [
        randn(2, 3), randn(4, 2), randn(3, 2, 1),
        {"beam_scores": randn(3, 2), "num_beams": [2, 2, 2]},
    ],
    "num_candidates": [0, -1, 2**50],
    "num_beams": [0, -2, 4, [6, 0], [2, 2], [2, 2, 3], [2**62] * 3, torch.ones(2, 3).long()],
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


@pytest.mark.parametrize(
    ("seed", "count", "vocabs"),
    [
        (11, 200, (1, 2, 5, 31, 32, 33, 64, 65, 200)),
        (12, 130, (1000, 1025, 4099)),
        (13, 15, (32000, 50257)),
    ],
)
def test_processors_equal_the_reference(
    seed: int, count: int, vocabs: tuple[int, ...], device: torch.device
) -> None:
    for case in beam_cases(seed, count, vocab_sizes=vocabs, processors=True):
        assert_same_bits(case.to(device).call(log_softmax_top_k), case.call(reference), case)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    history=st.lists(st.integers(-1, 6), max_size=24),
    size=st.integers(0, 4),
    penalty=st.sampled_from([0.5, 1.0, 1.5]),
    length=st.integers(0, 24),
    listed=st.lists(st.integers(-1, 5), max_size=4),
    count=st.integers(1, 12),
)
def test_any_history_equals_the_reference(
    history: list[int], size: int, penalty: float, length: int, listed: list[int], count: int
) -> None:
    """A row of few tokens with a score above the rest, the others of one score."""
    x = torch.zeros(1, 900)
    x[0, :5] = torch.tensor([3.0, 1.0, 0.0, 0.0, -2.0])
    options = {
        "sequences": torch.tensor([history], dtype=torch.int64),
        "lengths": torch.tensor([min(length, len(history))]),
        "repetition_penalty": penalty,
        "no_repeat_ngram_size": size,
        "diversity_tokens": torch.tensor([listed], dtype=torch.int64),
        "diversity_penalty": -2.0,
    }
    case = BeamCase("history", x, torch.tensor([-1.0]), count, 1, options)
    assert_same_bits(case.call(log_softmax_top_k), case.call(reference), case)


@pytest.mark.parametrize("beam_score", [0.0, -1e4, -1e7, -1e9])
@pytest.mark.parametrize("penalty", [0.01, 1.3])
def test_edits_among_equal_scores(beam_score: float, penalty: float, device: torch.device) -> None:
    """Beside a large beam score many tokens tie, edited ones too, in and out of the best."""
    scores = torch.tensor([beam_score, beam_score])
    for vocab, spread in ((3000, 3.0), (3000, 0.0), (20000, 1e-3)):
        for count in (3, 40):
            options = {
                "sequences": torch.cat((randint(60, 2, 20), randint(vocab, 2, 20)), dim=1),
                "repetition_penalty": penalty,
                "suppressed_tokens": torch.tensor([0, 3, 4, 17, vocab - 1]),
            }
            case = BeamCase("ties", randn(2, vocab) * spread, scores, count, 2, options)
            out = case.to(device).call(log_softmax_top_k)
            assert_same_bits(out, case.call(reference), case)


def test_a_history_of_the_most_likely_tokens(device: torch.device) -> None:
    """The edits are the row's own best, so the threshold has to make room for all of them."""
    x = randn(4, 30000) * 4
    for size in (1, 30, 600, 2500):
        best = x.topk(size).indices
        for penalty in (1.5, 0.8):
            options = {"sequences": best, "repetition_penalty": penalty}
            case = BeamCase("best", x, torch.zeros(4), 8, 4, options)
            out = case.to(device).call(log_softmax_top_k)
            assert_same_bits(out, case.call(reference), (size, penalty))


def test_edits_that_rise_from_below(device: torch.device) -> None:
    x = randn(2, 20000)
    worst = x.topk(50, largest=False).indices
    options = {"sequences": worst, "repetition_penalty": 1e-3}
    case = BeamCase("worst", x, torch.zeros(2), 30, 2, options)
    out = case.to(device).call(log_softmax_top_k)
    assert_same_bits(out, case.call(reference), case)
    assert set(out.tokens[0].tolist()) <= set(worst.flatten().tolist())


def transformers_best(
    x: torch.Tensor,
    chain: list[Any],
    sequences: torch.Tensor,
    beam_scores: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, tokens and beams as generate() finds them, on exact log-probabilities."""
    beams, vocab = beam_scores.shape[1], x.shape[1]
    scores = torch.stack([log_softmax_row(row.float()) for row in x])
    torch.testing.assert_close(scores, x.float().log_softmax(-1), rtol=1e-5, atol=1e-5)
    for processor in chain:
        scores = processor(sequences, scores)
    scores = (scores + beam_scores.view(-1, 1)).view(-1, beams * vocab)
    best, flat = scores.sort(descending=True, stable=True)
    flat = flat[:, :count]
    return best[:, :count], flat % vocab, flat // vocab


def bias_of(values: dict[int, float]) -> torch.Tensor:
    bias = torch.zeros(60)
    for token, value in values.items():
        bias[token] = value
    return bias


TRANSFORMERS: dict[str, tuple[Callable[[int], list[Any]], dict[str, Any]]] = {
    "repetition": (
        lambda length: [logits_process.RepetitionPenaltyLogitsProcessor(1.2)],
        {"repetition_penalty": 1.2},
    ),
    "n-grams of 1": (
        lambda length: [logits_process.NoRepeatNGramLogitsProcessor(1)],
        {"no_repeat_ngram_size": 1},
    ),
    "n-grams of 3": (
        lambda length: [logits_process.NoRepeatNGramLogitsProcessor(3)],
        {"no_repeat_ngram_size": 3},
    ),
    "minimum length": (
        lambda length: [logits_process.MinLengthLogitsProcessor(length + 1, [3, 5])],
        {"end_tokens": torch.tensor([3, 5]), "min_lengths": 25},
    ),
    "minimum length reached": (
        lambda length: [logits_process.MinLengthLogitsProcessor(length, [3, 5])],
        {"end_tokens": torch.tensor([3, 5]), "min_lengths": 24},
    ),
    "minimum of new tokens": (
        lambda length: [logits_process.MinNewTokensLengthLogitsProcessor(length - 4, 10, 3)],
        {"end_tokens": torch.tensor([3]), "min_lengths": 24 - 4 + 10},
    ),
    "suppressed": (
        lambda length: [logits_process.SuppressTokensLogitsProcessor([1, 9, 2])],
        {"suppressed_tokens": torch.tensor([1, 9, 2])},
    ),
    "forced end": (
        lambda length: [logits_process.ForcedEOSTokenLogitsProcessor(length + 1, 7)],
        {"forced_tokens": torch.tensor([7, 7])},
    ),
    "bias": (
        lambda length: [
            logits_process.SequenceBiasLogitsProcessor([[[4], 2.5], [[11], -10.0], [[12], 0.3]])
        ],
        {"bias": bias_of({4: 2.5, 11: -10.0, 12: 0.3})},
    ),
    "all": (
        lambda length: [
            logits_process.SequenceBiasLogitsProcessor([[[4], 2.5], [[11], -10.0]]),
            logits_process.RepetitionPenaltyLogitsProcessor(0.8),
            logits_process.NoRepeatNGramLogitsProcessor(2),
            logits_process.MinLengthLogitsProcessor(length + 3, [3, 5]),
            logits_process.SuppressTokensLogitsProcessor([1, 9]),
        ],
        {
            "bias": bias_of({4: 2.5, 11: -10.0}),
            "repetition_penalty": 0.8,
            "no_repeat_ngram_size": 2,
            "end_tokens": torch.tensor([3, 5]),
            "min_lengths": 27,
            "suppressed_tokens": torch.tensor([1, 9]),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("seed", range(5))
def test_equals_transformers(name: str, seed: int, device: torch.device) -> None:
    make, options = TRANSFORMERS[name]
    vocab, length, count = 60, 24, 12
    x = randn(6, vocab, seed=seed) * 3
    sequences = randint(9, 6, length, seed=seed)
    beam_scores = -randn(2, 3, seed=seed + 1).abs()
    scores, tokens, beams = transformers_best(x, make(length), sequences, beam_scores, count)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = log_softmax_top_k(
        x.to(device), beam_scores.to(device), count, num_beams=3,
        sequences=sequences.to(device), **options,
    )  # fmt: skip
    found = scores > -INF
    torch.testing.assert_close(out.scores.cpu(), scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.tokens.cpu()[found], tokens[found])
    assert torch.equal(out.beams.cpu()[found], beams[found])


def test_forced_first_token_of_transformers(device: torch.device) -> None:
    x, start = randn(2, 30), torch.zeros(2, 1, dtype=torch.int64)
    chain = [logits_process.ForcedBOSTokenLogitsProcessor(8)]
    scores, tokens, _ = transformers_best(x, chain, start, torch.zeros(1, 2), 2)
    forced = torch.tensor([8], device=device)
    out = log_softmax_top_k(
        x.to(device), torch.zeros(1, 2, device=device), 2, num_beams=2, forced_tokens=forced
    )
    assert torch.equal(out.tokens.cpu(), tokens) and torch.equal(out.scores.cpu(), scores)


def one_row(device: torch.device, count: int = 4, **options: Any) -> BeamCandidates:
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device).log()
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return log_softmax_top_k(x, torch.zeros(1, device=device), count, num_beams=1, **options)


def test_penalty_for_a_group(device: torch.device) -> None:
    """f32: one product, one difference."""
    out = one_row(device, diversity_tokens=torch.tensor([[0, 0, 2, -1]]), diversity_penalty=0.3)
    plain = one_row(device)
    expected = plain.log_probs[0].cpu() - torch.tensor(0.3) * torch.tensor([2.0, 0.0, 1.0, 0.0])
    assert torch.equal(out.log_probs[0].cpu(), expected[out.tokens[0].cpu()])


def test_bitmask(device: torch.device) -> None:
    x = randn(2, 70).to(device)
    words = torch.tensor([[0, -(2**31), 0b10]], dtype=torch.int32)
    out = log_softmax_top_k(
        x, torch.zeros(2, device=device), 5, num_beams=2, token_bitmask=words.to(device)
    )
    assert {*out.tokens[0, :4].tolist()} == {63, 65}
    assert out.scores[0, 4].item() == -INF


def test_a_suppressed_token_is_not_forced(device: torch.device) -> None:
    out = one_row(device, forced_tokens=torch.tensor([2]), suppressed_tokens=torch.tensor([0, 1]))
    assert (out.tokens[0, 0].item(), out.scores[0].tolist()) == (2, [0.0, -INF, -INF, -INF])
    out = one_row(device, forced_tokens=torch.tensor([2]), suppressed_tokens=torch.tensor([2]))
    assert out.status.tolist() == [2] and (out.scores == -INF).all()


def test_a_forced_token_needs_no_permission(device: torch.device) -> None:
    """It comes behind n-grams, end tokens and the bitmask, as in transformers."""
    out = one_row(
        device,
        forced_tokens=torch.tensor([1]),
        sequences=torch.tensor([[1, 1]]),
        no_repeat_ngram_size=1,
        end_tokens=torch.tensor([1]),
        min_lengths=9,
        token_bitmask=torch.tensor([[0]], dtype=torch.int32),
    )
    assert out.tokens[0, 0].item() == 1 and out.log_probs[0, 0].item() == 0.0


def test_a_beam_without_candidates_is_none(device: torch.device) -> None:
    x, scores = randn(4, 40).to(device), torch.zeros(4, device=device)
    mask = torch.tensor([[0, 0], [-1, -1], [0, 0], [0, 0]], dtype=torch.int32, device=device)
    out = log_softmax_top_k(x, scores, 3, num_beams=2, token_bitmask=mask)
    assert out.status.tolist() == [0, 2]
    assert out.beams[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("logit", "bias", "status"),
    [(0.0, NAN, 1), (-INF, INF, 1), (-INF, 1.0, 0), (0.0, -INF, 0), (0.0, INF, 0), (NAN, 0.0, 1)],
)
def test_nan_of_a_bias(logit: float, bias: float, status: int, device: torch.device) -> None:
    """A NaN counts wherever it stands, also where the token is banned or another forced."""
    x, biases = randn(4, 90).to(device), torch.zeros(4, 90, device=device)
    x[2, 70], biases[2, 70] = logit, bias
    for options in (
        {},
        {"suppressed_tokens": torch.tensor([70], device=device)},
        {"forced_tokens": torch.tensor([-1, 3], device=device)},
        {"token_bitmask": torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32, device=device)},
    ):
        out = log_softmax_top_k(
            x, torch.zeros(4, device=device), 3, num_beams=2, bias=biases, **options
        )
        assert out.status.tolist() == [0, status]
        if bias == INF and status == 0 and not options:
            assert (out.tokens[1, 0].item(), out.scores[1, 0].item()) == (70, INF)


def test_nan_of_a_penalty(device: torch.device) -> None:
    x = randn(2, 500)
    x[:, 7] = -INF
    penalty = torch.tensor([0.0, 1.0], device=device)
    sequences = torch.full((2, 3), 7, device=device)
    out = log_softmax_top_k(
        x.to(device), torch.zeros(2, device=device), 3, num_beams=1, sequences=sequences,
        repetition_penalty=penalty,
    )  # fmt: skip
    assert out.status.tolist() == [1, 0]


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    """A row's list is longer than its candidates until it is cut: a NaN comes before that."""
    x = torch.randn(2, 40000, generator=torch.Generator().manual_seed(0))
    x[1, 7] = -INF
    options: dict[str, Any] = {
        "diversity_tokens": torch.tensor([[3], [7]]),
        "diversity_penalty": torch.tensor([0.5, -INF]),
    }
    both = log_softmax_top_k(x, torch.zeros(2), 50, num_beams=1, **options)
    assert both.status.tolist() == [0, 1]
    for name in options:
        options[name] = options[name][:1]
    alone = log_softmax_top_k(x[:1], torch.zeros(1), 50, num_beams=1, **options)
    assert_same_bits(BeamCandidates(*(field[:1] for field in both)), alone)


def test_processors_that_are_off_change_nothing(device: torch.device) -> None:
    x, scores = (randn(6, 900) * 2).to(device), randn(6, seed=1).to(device)
    none = torch.full((2, 3), -1, device=device)
    plain = log_softmax_top_k(x, scores, 9, num_beams=3)
    off: list[dict[str, Any]] = [
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "sequences": randint(9, 6, 5)},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "sequences": randint(9, 6, 0)},
        {"repetition_penalty": 1.5, "sequences": randint(9, 6, 4), "lengths": randint(1, 2)},
        {"end_tokens": none, "min_lengths": 9, "lengths": randint(4, 2)},
        {"suppressed_tokens": none, "forced_tokens": none[:, 0]},
        {"diversity_tokens": none, "diversity_penalty": 2.0},
        {"diversity_tokens": randint(9, 2, 3), "diversity_penalty": 0.0},
        {"bias": torch.zeros(900)},
        {"token_bitmask": torch.full((2, 29), -1, dtype=torch.int32)},
    ]
    for options in off:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        assert_same_bits(log_softmax_top_k(x, scores, 9, num_beams=3, **moved), plain, options)


@pytest.mark.parametrize("num_beams", [2, []])
def test_processors_of_no_requests(num_beams: Any, device: torch.device) -> None:
    empty = torch.empty(0, 9, device=device)
    out = log_softmax_top_k(
        empty, empty[:, 0], 3, num_beams=num_beams, sequences=empty[:, :4].long(),
        lengths=empty[:, 0].long(), repetition_penalty=1.5, bias=empty,
    )  # fmt: skip
    assert [tuple(field.shape) for field in out] == [(0, 3), (0, 3), (0, 3), (0,), (0, 3)]


def test_a_processed_request_alone_and_in_any_batch(device: torch.device) -> None:
    widths, vocab = [3, 1, 4, 2], 3000
    rows = [torch.arange(10).split(widths)[r] for r in range(4)]
    x, scores = (randn(10, vocab) * 3).to(device), randn(10, seed=1).to(device)
    by_row = {
        "sequences": randint(50, 10, 30).to(device),
        "bias": randn(10, vocab, seed=5).to(device),
    }
    by_request = {
        "lengths": torch.tensor([30, 7, 22, 0]),
        "repetition_penalty": torch.tensor([1.2, 1.0, 0.7, 2.0]),
        "no_repeat_ngram_size": torch.tensor([2, 1, 0, 3]),
        "end_tokens": randint(vocab, 4, 2),
        "min_lengths": torch.tensor([31, 0, 23, 5]),
        "diversity_tokens": randint(50, 4, 3),
        "diversity_penalty": torch.tensor([0.0, 0.5, 1.0, 2.0]),
    }
    by_request = {name: value.to(device) for name, value in by_request.items()}
    for names in ([*by_row, *by_request], ["sequences", *by_request]):

        def call(order: list[int], names: list[str] = names) -> BeamCandidates:
            picked = torch.cat([rows[r] for r in order]).to(device)
            options = {n: by_row[n][picked] for n in names if n in by_row}
            options |= {n: by_request[n][order] for n in names if n in by_request}
            beams = [widths[r] for r in order]
            return log_softmax_top_k(x[picked], scores[picked], 9, num_beams=beams, **options)

        whole = call([0, 1, 2, 3])
        for order in ([0], [1], [2], [3], [3, 1, 0, 2], [2, 2, 0]):
            assert_same_bits(call(order), BeamCandidates(*(field[order] for field in whole)))
