"""What each stage keeps and which token is chosen, on rows small enough to work out by hand."""

import math

import numpy as np
import pytest
import torch

import lmdecode

INF, NAN = math.inf, math.nan
STATUS_NAN, STATUS_EMPTY, STATUS_PARAMETER = 1, 2, 4


def kept(row: list[float], device: torch.device, **arguments: object) -> list[int]:
    """Return the ids of the kept tokens of one row, and check that the outputs agree on them."""
    logits = torch.tensor([row], device=device)
    out = lmdecode.top_k_top_p_sample(logits, return_logits=True, return_logprob=True, **arguments)
    assert out.kept_logits is not None and out.logprob is not None
    tokens = (out.kept_logits[0] > -INF).nonzero().flatten().tolist()
    assert out.kept_count.tolist() == [len(tokens)]
    assert out.status.tolist() == [0]
    assert out.index.item() in tokens
    return tokens


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize("k", [-7, -1, 0, 5, 6, 10**12])
def test_top_k_off(k: int, device: torch.device) -> None:
    assert kept([3.0, 1.0, 2.0, 5.0, 4.0], device, top_k=k) == [0, 1, 2, 3, 4]


def test_top_k_keeps_the_largest(device: torch.device) -> None:
    assert kept([3.0, 1.0, 2.0, 5.0, 4.0], device, top_k=3) == [0, 3, 4]


def test_top_k_keeps_exactly_k_with_the_lowest_indices(device: torch.device) -> None:
    assert kept([1.0, 2.0, 2.0, 0.0, 2.0, 2.0], device, top_k=3) == [1, 2, 4]
    assert kept([7.0] * 9, device, top_k=4) == [0, 1, 2, 3]


def test_top_k_never_keeps_minus_infinity(device: torch.device) -> None:
    assert kept([-INF, 1.0, -INF, 0.0, -INF], device, top_k=4) == [1, 3]


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    assert kept([-0.0, 0.0, -0.0, 0.0], device, top_k=2) == [0, 1]
    out = lmdecode.top_k_top_p_sample(torch.tensor([[-1.0, -0.0, 0.0]], device=device), greedy=True)
    assert out.index.item() == 1


def test_k_larger_than_the_limits_of_other_systems(device: torch.device) -> None:
    row = torch.arange(5000.0, device=device)
    out = lmdecode.top_k_top_p_sample(row[None] * 1e-3, top_k=4321)
    assert out.kept_count.item() == 4321


def test_top_p_keeps_the_smallest_prefix_that_reaches_p(device: torch.device) -> None:
    row = logs(0.1, 0.4, 0.2, 0.3)
    assert kept(row, device, top_p=0.35) == [1]
    assert kept(row, device, top_p=0.45) == [1, 3]
    assert kept(row, device, top_p=0.85) == [1, 2, 3]
    assert kept(row, device, top_p=0.95) == [0, 1, 2, 3]


@pytest.mark.parametrize("j", range(1, 16))
def test_top_p_at_an_exact_boundary(j: int, device: torch.device) -> None:
    """16 equal logits: the mass of a prefix of j is j / 16 exactly."""
    row = [2.5] * 16
    p = np.float32(j / 16)
    above, below = float(np.nextafter(p, np.float32(1))), float(np.nextafter(p, np.float32(0)))
    assert kept(row, device, top_p=below) == list(range(j))
    assert kept(row, device, top_p=j / 16) == list(range(j))
    assert kept(row, device, top_p=above) == list(range(j + 1))


def test_top_p_keeps_the_lowest_indices_of_equal_logits(device: torch.device) -> None:
    assert kept([0.0, 3.0, 0.0, 0.0, 3.0], device, top_p=0.4) == [1]
    assert kept([0.0] * 5, device, top_p=0.5) == [0, 1, 2]


@pytest.mark.parametrize("p", [1.0, 1.5, INF])
def test_top_p_off(p: float, device: torch.device) -> None:
    """Off means off: even a token with no measurable mass stays."""
    row = [0.0, -200.0, -3e38]
    assert kept(row, device, top_p=torch.tensor([p], device=device)) == [0, 1, 2]
    for dialect in ("ascend_v1", "ascend_v2"):  # a number above 1 is an error elsewhere
        assert kept(row, device, top_p=p, dialect=dialect) == [0, 1, 2]
    if p == 1:
        assert kept(row, device, top_p=p) == [0, 1, 2]


@pytest.mark.parametrize("p", [0.0, -0.0, -1.0, 1e-45, 1e-30])
def test_smallest_top_p_keeps_the_first_token(p: float, device: torch.device) -> None:
    assert kept([1.0, 4.0, 4.0, 2.0], device, top_p=p) == [1]


def test_largest_top_p_below_one_drops_what_has_no_mass(device: torch.device) -> None:
    assert kept([0.0, 0.0, -100.0], device, top_p=1 - 2**-24) == [0, 1]


def test_top_p_sees_the_softmax_of_what_top_k_left(device: torch.device) -> None:
    row = logs(0.3, 0.25, 0.2, 0.15, 0.1)
    assert kept(row, device, top_p=0.54) == [0, 1]
    assert kept(row, device, top_k=2, top_p=0.54) == [0]  # 0.3 / 0.55 = 0.545


def test_min_p_keeps_a_share_of_the_largest_probability(device: torch.device) -> None:
    row = logs(0.5, 0.24, 0.06, 0.2)
    assert kept(row, device, min_p=0.3) == [0, 1, 3]
    assert kept(row, device, min_p=0.45) == [0, 1]
    assert kept(row, device, min_p=0.1) == [0, 1, 2, 3]


@pytest.mark.parametrize("min_p", [0.0, -1.0])
def test_min_p_off(min_p: float, device: torch.device) -> None:
    assert kept([0.0, -1e30], device, min_p=min_p) == [0, 1]


@pytest.mark.parametrize("min_p", [1.0, 3.0])
def test_min_p_one_keeps_one(min_p: float, device: torch.device) -> None:
    assert kept([0.0, 2.0, 2.0], device, min_p=min_p) == [1]


def test_temperature_comes_first(device: torch.device) -> None:
    row = logs(0.4, 0.3, 0.2, 0.1)
    assert kept(row, device, top_p=0.5) == [0, 1]
    assert kept(row, device, top_p=0.5, temperature=0.5) == [0]  # 16 : 9 : 4 : 1
    assert kept(row, device, top_p=0.5, temperature=100.0) == [0, 1]
    assert kept(row, device, top_p=0.52, temperature=100.0) == [0, 1, 2]


def test_kept_logits_are_divided_by_the_temperature(device: torch.device) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([0.7, 1.0, 3.0])
    out = lmdecode.top_k_top_p_sample(
        logits.to(device), temperature=temperature.to(device), return_logits=True
    )
    expected = logits.numpy() / temperature.numpy()[:, None]
    np.testing.assert_array_equal(out.kept_logits.cpu().numpy(), expected)


def test_temperature_zero_keeps_the_raw_maximum(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 6.0, 6.0, 2.0]] * 2, device=device)
    temperature = torch.tensor([0.0, 1.0], device=device)
    out = lmdecode.top_k_top_p_sample(
        logits, 3, temperature=temperature, seed=3, return_logits=True, return_logprob=True
    )
    assert out.index[0].item() == 1
    assert out.kept_logits[0].tolist() == [-INF, 6.0, -INF, -INF]
    assert out.logprob[0].item() == 0.0
    assert out.kept_count.tolist() == [1, 3]


def test_infinite_temperature_is_uniform(device: torch.device) -> None:
    logits = torch.tensor([[5.0, -3.0, 0.0, 1.0]], device=device)
    out = lmdecode.top_k_top_p_sample(
        logits, top_p=0.5, temperature=INF, return_logits=True, return_logprob=True
    )
    assert out.kept_logits.tolist() == [[0.0, 0.0, -INF, -INF]]
    assert out.logprob.item() == pytest.approx(math.log(0.5))


def test_nan_counts_as_minus_infinity(device: torch.device) -> None:
    out = lmdecode.top_k_top_p_sample(
        torch.tensor([[NAN, 1.0, NAN, 2.0], [0.0, 1.0, 2.0, 3.0]], device=device),
        top_k=3,
        greedy=True,
        return_logits=True,
    )
    assert out.kept_logits.tolist() == [[-INF, 1.0, -INF, 2.0], [-INF, 1.0, 2.0, 3.0]]
    assert out.index.tolist() == [3, 3]
    assert out.kept_count.tolist() == [2, 3]
    assert out.status.tolist() == [STATUS_NAN, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_rows(temperature: float, device: torch.device) -> None:
    out = lmdecode.top_k_top_p_sample(
        torch.tensor([[-INF] * 3, [NAN] * 3, [-INF, NAN, -INF]], device=device),
        2,
        0.5,
        temperature=temperature,
        seed=1,
        return_logits=True,
        return_logprob=True,
    )
    assert out.index.tolist() == [0, 0, 0]
    assert out.kept_logits.tolist() == [[-INF] * 3] * 3
    assert out.logprob.tolist() == [-INF] * 3
    assert out.kept_count.tolist() == [0, 0, 0]
    assert out.status.tolist() == [STATUS_EMPTY, STATUS_EMPTY | STATUS_NAN, 3]


def test_plus_infinity_is_the_support(device: torch.device) -> None:
    row = [1.0, INF, 5.0, INF, INF, -INF]
    assert kept(row, device) == [1, 3, 4]
    assert kept(row, device, top_k=2) == [1, 3]
    assert kept(row, device, top_p=0.5) == [1, 3]
    assert kept(row, device, min_p=0.1) == [1, 3, 4]
    assert kept(row, device, temperature=0.0) == [1]
    out = lmdecode.top_k_top_p_sample(
        torch.tensor([row], device=device), return_logits=True, return_logprob=True
    )
    assert out.kept_logits.tolist() == [[-INF, INF, -INF, INF, INF, -INF]]
    assert out.logprob.item() == pytest.approx(-math.log(3))


def test_parameters_that_are_no_numbers(device: torch.device) -> None:
    """A stage without a number is off; a temperature without one is 0, so nothing is random."""
    row = torch.tensor([[0.0, 3.0, 1.0]], device=device)
    for name, value, count in (
        ("top_p", NAN, 2),
        ("min_p", NAN, 2),
        ("temperature", NAN, 1),
        ("temperature", -1.0, 1),
        ("temperature", -INF, 1),
    ):
        arguments = {name: torch.tensor([value], device=device)}
        out = lmdecode.top_k_top_p_sample(row, top_k=2, seed=1, **arguments)
        assert (out.kept_count.item(), out.status.item()) == (count, STATUS_PARAMETER)
        assert count == 2 or out.index.item() == 1
    greedy = lmdecode.top_k_top_p_sample(row, temperature=-0.0, seed=1)
    assert (greedy.index.item(), greedy.status.item()) == (1, 0)


def test_without_noise_the_largest_is_chosen(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 9.0, 9.0, 3.0]], device=device)
    assert lmdecode.top_k_top_p_sample(logits, greedy=True).index.item() == 1
    assert lmdecode.top_k_top_p_sample(logits, seed=-1).index.item() == 1
    seeds = torch.tensor([-5], device=device)
    assert lmdecode.top_k_top_p_sample(logits, seed=seeds).index.item() == 1


def test_external_noise_divides_the_probabilities(device: torch.device) -> None:
    logits = torch.tensor([logs(0.5, 0.3, 0.2)], device=device)
    for noise, index in (
        ([1.0, 1.0, 1.0], 0),
        ([1.0, 0.5, 1.0], 1),
        ([1.0, -0.5, 1.0], 1),  # the magnitude counts
        ([1.0, 1.0, 0.1], 2),
        ([INF, INF, INF], 0),
        ([INF, INF, 5.0], 2),
        ([0.0, 0.0, 1.0], 0),
    ):
        q = torch.tensor([noise], device=device)
        assert lmdecode.top_k_top_p_sample(logits, q=q).index.item() == index


def test_equal_scores_go_to_the_lowest_index(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]], device=device)
    q = torch.tensor([[9.0, 2.0, 1.0, 1.0]], device=device)
    assert lmdecode.top_k_top_p_sample(logits, q=q).index.item() == 2
    zeros = torch.zeros(1, 4, device=device)
    assert lmdecode.top_k_top_p_sample(logits, q=zeros, eps=0.0).index.item() == 0  # all infinite


def test_nan_noise_never_wins_over_a_number(device: torch.device) -> None:
    logits = torch.tensor([[3.0, 0.0, 1.0]], device=device)
    q = torch.tensor([[NAN, 1.0, 1.0]], device=device)
    out = lmdecode.top_k_top_p_sample(logits, q=q)
    assert (out.index.item(), out.status.item()) == (2, STATUS_NAN)
    out = lmdecode.top_k_top_p_sample(logits, 1, q=q)  # the only one left
    assert (out.index.item(), out.status.item()) == (0, STATUS_NAN)
    q = torch.tensor([[1.0, NAN, 1.0]], device=device)  # NaN where nothing was kept
    out = lmdecode.top_k_top_p_sample(logits, 2, q=q)
    assert (out.index.item(), out.status.item()) == (0, 0)


def test_logprob_is_of_the_filtered_distribution(device: torch.device) -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 2
    out = lmdecode.top_k_top_p_sample(
        logits.to(device), 40, 0.9, temperature=0.8, seed=1, return_logits=True, return_logprob=True
    )
    expected = out.kept_logits.double().log_softmax(-1).gather(1, out.index[:, None])[:, 0]
    torch.testing.assert_close(out.logprob.double(), expected, rtol=1e-6, atol=1e-6)
