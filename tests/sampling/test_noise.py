"""The internal noise: known answers, distribution, tail, and that no two draws are related."""

import math

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.reference import exponential_noise, philox, token_noise
from tests.support.cases import assert_same_bits

WORD = 0xFFFFFFFF

# (position, token, noise) of seed 42: the noise of one of the tokens 0 to 3 is this small there.
RARE_SEED = 42
RARE = [
    (107591, 3, 8.67726941747992e-07),
    (979102, 1, 3.6183802009295449e-07),
    (1216853, 0, 6.7707330285068988e-07),
    (2516916, 2, 3.2817875095033432e-07),
    (109977917, 3, 6.9677820690842439e-10),
    (356579280, 3, 8.7084273440779135e-12),
    (1247232843, 2, 5.0600824354498292e-10),
    (2347743392, 1, 5.7104460344959663e-10),
]


def chi_square(observed: np.ndarray, probability: np.ndarray) -> float:
    """Pearson's statistic over its degrees of freedom, as a z-score (Wilson and Hilferty)."""
    expected = probability / probability.sum() * observed.sum()
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """The vectors that Random123 is published with (philox4x32-10)."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert philox(c0, c1, c2, c3, key)[0].tolist() == list(words)


def test_noise_is_minus_log_of_the_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    high = torch.randint(0, 2**32, (100_000,), generator=generator)
    low = torch.randint(0, 2**32, (100_000,), generator=generator)
    high[:3000] >>= 29  # small noise
    high[3000:6000] |= 0xFFFFFFF8  # large noise
    r = (high.numpy().astype(object) << 32) | low.numpy().astype(object)
    # 1 - v is exact in neither format for small v, log1p takes v itself.
    v = np.array([(2 * int(x) + 1) / 2**65 for x in r])
    rest = np.array([(2 * (2**64 - int(x)) - 1) / 2**65 for x in r])
    expected = np.where(v < 0.5, -np.log1p(-v), -np.log(rest))
    np.testing.assert_allclose(exponential_noise(high, low).numpy(), expected, rtol=3e-15, atol=0)


def test_noise_extremes() -> None:
    ends = exponential_noise(torch.tensor([0, WORD]), torch.tensor([0, WORD])).tolist()
    assert ends == [2.0**-65, pytest.approx(65 * math.log(2), rel=1e-15)]


def test_noise_increases_with_its_bits() -> None:
    """Also across the seam between the two formulas."""
    seam = 0x40000000 << 32
    for start in (0, seam - 2000, (1 << 63) - 2000, (1 << 64) - 4000):
        r = [start + 2**11 * i if start == seam - 2000 else start + i for i in range(4000)]
        high = torch.tensor([x >> 32 for x in r])
        low = torch.tensor([x & WORD for x in r])
        assert bool((exponential_noise(high, low).diff() >= 0).all())


def count_below(limit: float | np.ndarray) -> np.ndarray:
    """Of the 2^64 values of the random bits, how many give a noise below the limit, in f64."""
    limits = np.atleast_1d(np.asarray(limit, dtype=np.float64))
    low, high = np.zeros(len(limits), dtype=object), np.full(len(limits), 2**64, dtype=object)
    for _ in range(64):
        middle = (low + high) // 2
        words = torch.tensor([[int(m) >> 32, int(m) & WORD] for m in middle])
        below = exponential_noise(words[:, 0], words[:, 1]).numpy() < limits
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return high.astype(np.float64)


@pytest.mark.parametrize("limit", [1e-18, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 0.3, 1.0, 10.0, 40.0])
def test_noise_distribution_down_to_its_resolution(limit: float) -> None:
    """P(noise < t) = 1 - exp(-t), counted over all 2^64 values, for t down to 1e-18."""
    count = count_below(limit)[0]
    expected = -math.expm1(-limit) * 2.0**64
    assert abs(count - expected) <= 1 + 1e-14 * expected


@pytest.mark.parametrize("probability", [1e-12, 1e-9, 1e-6, 1e-3, 0.5])
def test_rare_tokens_win_at_their_rate(probability: float) -> None:
    """The rate at which a token beats all others, one entrant of weight 1 - probability."""
    points = 2000
    quantile = (np.arange(points) + 0.5) / points
    others = -np.log1p(-quantile)
    rate = count_below(others * probability / (1 - probability)).mean() / 2.0**64
    assert rate == pytest.approx(probability, rel=1e-3)


def test_the_op_draws_by_this_noise(device: torch.device) -> None:
    """Token 1 wins iff its noise over that of token 0 is below the ratio of the weights."""
    seeds, positions = range(40), range(50)
    pairs = [(seed, position) for seed in seeds for position in positions]
    noise = torch.stack([token_noise(s, p, torch.tensor([0, 1])) for s, p in pairs])
    logit = (noise[:, 1] / noise[:, 0]).log().float()
    seed, position = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    for shift, winner in ((1e-4, 1), (-1e-4, 0)):
        logits = torch.stack((torch.zeros_like(logit), logit + shift), dim=1).to(device)
        out = lmdecode.top_k_top_p_sample(logits, seed=seed, position=position)
        assert out.index.tolist() == [winner] * len(pairs)


@pytest.mark.parametrize(("position", "token", "noise"), RARE)
def test_the_op_draws_rare_tokens(
    position: int, token: int, noise: float, device: torch.device
) -> None:
    """A token of probability 1e-6 to 1e-11 is drawn where its noise is that small, not else."""
    noises = token_noise(RARE_SEED, position, torch.arange(4))
    assert noises[token].item() == pytest.approx(noise, rel=1e-12)
    others = [other for other in range(4) if other != token]
    # The others have weight 1. The best of them scores 1 / its noise.
    limit = math.log(noises[token].item() / noises[others].min().item())
    assert limit < -11
    for shift, winner in ((1e-4, token), (-1e-4, others[int(noises[others].argmin())])):
        logits = torch.zeros(1, 4, device=device)
        logits[0, token] = limit + shift
        out = lmdecode.top_k_top_p_sample(
            logits, seed=torch.tensor([RARE_SEED], device=device), position=position
        )
        assert out.index.item() == winner
        before = lmdecode.top_k_top_p_sample(
            logits, seed=torch.tensor([RARE_SEED], device=device), position=position - 1
        )
        assert before.index.item() != token


PROBABILITIES = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
DRAWS = 40_000


def draw(device: torch.device, **arguments: object) -> np.ndarray:
    """Draw from PROBABILITIES once a row."""
    logits = torch.from_numpy(PROBABILITIES).log().float().to(device).expand(DRAWS, -1)
    return lmdecode.top_k_top_p_sample(logits, **arguments).index.cpu().numpy()


def draw_after(seed: int, device: torch.device) -> np.ndarray:
    torch.manual_seed(seed)
    return draw(device)


def many_draws(device: torch.device) -> dict[str, np.ndarray]:
    count = torch.arange(DRAWS, device=device)
    one = torch.full((DRAWS,), 7, device=device)
    return {
        "positions": draw(device, seed=one, position=count),
        "large positions": draw(device, seed=one, position=count + 2**33),
        "consecutive seeds": draw(device, seed=count),
        "one seed": draw(device, seed=1234),
        "another seed": draw(device, seed=1235),
        "generator": draw(device, generator=torch.Generator(device).manual_seed(5)),
        "torch's generator": draw_after(5, device),
        "diagonal": draw(device, seed=count, position=count),
    }


def test_draws_follow_the_distribution(device: torch.device) -> None:
    for name, drawn in many_draws(device).items():
        observed = np.bincount(drawn, minlength=len(PROBABILITIES))
        assert abs(chi_square(observed, PROBABILITIES)) < 4, name


def test_draws_follow_the_filtered_distribution(device: torch.device) -> None:
    seed = torch.arange(DRAWS, device=device)
    for arguments, kept in (
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.8}, [0, 1, 2, 3]),
        ({"min_p": 0.2}, [0, 1, 2, 3, 4]),
    ):
        drawn = draw(device, seed=seed, **arguments)
        observed = np.bincount(drawn, minlength=len(PROBABILITIES))
        assert observed.sum() == observed[kept].sum()
        assert abs(chi_square(observed[kept], PROBABILITIES[kept])) < 4
    drawn = draw(device, seed=seed, temperature=2.0)
    observed = np.bincount(drawn, minlength=len(PROBABILITIES))
    assert abs(chi_square(observed, np.sqrt(PROBABILITIES))) < 4


def test_draws_from_a_large_vocabulary(device: torch.device) -> None:
    """2000 draws among 50000 tokens, in 50 bins of equal probability."""
    vocab, rows = 50_000, 2000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(vocab, generator=generator)
    seed = torch.arange(rows, device=device)
    out = lmdecode.top_k_top_p_sample(logits.to(device).expand(rows, vocab), seed=seed)
    cumulated = logits.double().softmax(0).cumsum(0).numpy()
    bins = np.minimum((cumulated * 50).astype(int), 49)
    observed = np.bincount(bins[out.index.cpu().numpy()], minlength=50)
    weights = np.bincount(bins, weights=logits.double().softmax(0).numpy(), minlength=50)
    assert abs(chi_square(observed, weights)) < 4


def test_draws_are_independent(device: torch.device) -> None:
    """Contingency tables of neighbouring draws, and of draws that share a seed or a position."""
    size = len(PROBABILITIES)
    drawn = many_draws(device)
    pairs = {f"neighbours, {name}": (d[:-1], d[1:]) for name, d in drawn.items()}
    pairs |= {f"4 apart, {name}": (d[:-4], d[4:]) for name, d in drawn.items()}
    pairs["position and seed"] = (drawn["positions"], drawn["consecutive seeds"])
    pairs["two int seeds"] = (drawn["one seed"], drawn["another seed"])
    pairs["seed and diagonal"] = (drawn["consecutive seeds"], drawn["diagonal"])
    joint = np.outer(PROBABILITIES, PROBABILITIES).ravel()
    for name, (first, second) in pairs.items():
        observed = np.bincount(first * size + second, minlength=size * size)
        likely = joint * len(first) >= 10
        table = np.append(observed[likely], observed[~likely].sum())
        assert abs(chi_square(table, np.append(joint[likely], joint[~likely].sum()))) < 4, name


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of the ranks of two samples in units of its standard deviation."""
    ranks = torch.stack((a, b)).argsort(dim=1).argsort(dim=1).double()
    return float(torch.corrcoef(ranks)[0, 1] * math.sqrt(len(a)))


def test_noise_is_uncorrelated() -> None:
    """Between tokens, positions and seeds that lie next to one another, and far apart."""
    tokens = torch.arange(100_000)
    noise = token_noise(3, 5, tokens)
    for distance in (1, 2, 3, 4, 5, 8, 64, 4096):
        assert abs(correlation(noise[:-distance], noise[distance:])) < 4, distance
    for other in (
        (3, 6),
        (3, 5 + 2**32),
        (4, 5),
        (3 + 2**32, 5),
        (5, 3),
        ((3 + 0x9E3779B97F4A7C15) % 2**63, 5),
    ):
        assert abs(correlation(noise, token_noise(*other, tokens))) < 4, other
    assert noise.mean().item() == pytest.approx(1, abs=4 / math.sqrt(len(tokens)))
    assert noise.var().item() == pytest.approx(1, abs=4 * math.sqrt(8 / len(tokens)))


def test_an_int_seed_is_a_seed_a_row(device: torch.device) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(device)
    for seed in (0, 1, 12345, 2**63 - 1):
        rows = [(seed + row * 0x9E3779B97F4A7C15) % 2**63 for row in range(9)]
        assert rows[0] == seed
        actual = lmdecode.top_k_top_p_sample(logits, seed=seed, position=3).index
        expected = lmdecode.top_k_top_p_sample(
            logits, seed=torch.tensor(rows, device=device), position=torch.full((9,), 3).to(device)
        ).index
        assert actual.tolist() == expected.tolist()


def test_position_is_zero_by_default(device: torch.device) -> None:
    logits = torch.zeros(5, 1000, device=device)
    draws = [
        lmdecode.top_k_top_p_sample(logits, seed=1, **p).index.tolist()
        for p in ({}, {"position": 0}, {"position": 1})
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_generator_draws_one_seed_a_row(device: torch.device) -> None:
    logits = torch.zeros(6, 1000, device=device)
    generator = torch.Generator(device).manual_seed(11)
    actual = [
        lmdecode.top_k_top_p_sample(logits, generator=generator).index.tolist() for _ in range(2)
    ]
    assert actual[0] != actual[1]
    generator.manual_seed(11)
    for drawn in actual:
        seeds = torch.randint(0, 2**63 - 1, (6,), generator=generator, device=device)
        assert lmdecode.top_k_top_p_sample(logits, seed=seeds).index.tolist() == drawn


def test_without_noise_of_its_own_a_call_draws_from_torchs_generator(device: torch.device) -> None:
    """As torch.multinomial does, and ``Sampler``."""
    logits = torch.zeros(6, 1000, device=device)
    for arguments in ({}, {"temperature": 0.7}, {"top_k": torch.full((6,), 900, device=device)}):
        torch.manual_seed(11)
        drawn = [lmdecode.top_k_top_p_sample(logits, **arguments).index for _ in range(2)]
        assert not torch.equal(*drawn)
        torch.manual_seed(11)
        for index in drawn:
            seeds = torch.randint(0, 2**63 - 1, (6,), device=device)
            again = lmdecode.top_k_top_p_sample(logits, seed=seeds, **arguments).index
            assert torch.equal(again, index)
        torch.manual_seed(11)
        want = lmdecode.reference.top_k_top_p_sample(logits, **arguments).index
        assert torch.equal(want, drawn[0])


def test_a_greedy_call_has_no_noise_and_draws_nothing(device: torch.device) -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    options = {"top_k": 50, "return_logits": True, "return_logprob": True}
    before = torch.get_rng_state()
    greedy = lmdecode.top_k_top_p_sample(logits, greedy=True, **options)
    assert_same_bits(greedy, lmdecode.top_k_top_p_sample(logits, seed=-1, **options))
    assert torch.equal(greedy.index, logits.argmax(-1))
    for zero in (0, 0.0, -0.0):
        cold = lmdecode.top_k_top_p_sample(logits, temperature=zero)
        assert torch.equal(cold.index, logits.argmax(-1))
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_a_batch_draw_independently(device: torch.device) -> None:
    logits = torch.zeros(64, 100_000, device=device)
    assert len(set(lmdecode.top_k_top_p_sample(logits, seed=0).index.tolist())) == 64
