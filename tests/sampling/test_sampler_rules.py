"""The rules of ``Sampler`` by hand: what edits, chances and sequences do, each in a small row."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.samplers import SamplerUnderTest

INF = float("inf")
SIX = torch.tensor([[0.6, 0.2, 0.1, 0.05, 0.03, 0.02]]).log()
FLAT = torch.zeros(1, 6)


def edited(
    sampler: SamplerUnderTest,
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    **parameters: Any,
) -> list[float]:
    """The logits of one row after the edits."""
    tested = sampler.make(1, logits.shape[1], seed=-1, return_logits=True, **parameters)
    tested.insert(0, prompt=prompt)
    tested.accept(0, output)
    return tested.sample(logits).kept_logits[0].tolist()


def test_dry(sampler: SamplerUnderTest) -> None:
    """After 1 2 3, 1 2 again: a 3 goes on with a repetition of two."""

    def dry(text: list[int], **parameters: Any) -> list[float]:
        cut = len(text) // 2
        arguments = {"dry_multiplier": 0.5, "dry_base": 2.0, **parameters}
        return edited(sampler, FLAT, text[:cut], text[cut:], **arguments)

    assert dry([1, 2, 3, 1, 2]) == [0, 0, 0, -0.5, 0, 0]
    assert dry([4, 1, 2, 3, 4, 1, 2]) == [0, 0, 0, -1, 0, 0]
    assert dry([1, 2, 3, 1, 2], dry_allowed_length=1) == [0, 0, 0, -1, 0, 0]
    assert dry([1, 2, 3, 1, 2], dry_allowed_length=3) == [0] * 6
    # The longest repetition of each token counts.
    assert dry([1, 2, 3, 0, 1, 2, 3, 1, 2], dry_allowed_length=1) == [0, 0, 0, -1, 0, 0]
    # A breaker within the repetition, as its last token, and as the token itself.
    assert dry([4, 1, 2, 3, 4, 1, 2], dry_breakers=[4]) == [0, 0, 0, -0.5, 0, 0]
    assert dry([4, 1, 2, 3, 4, 1, 2], dry_breakers=[1]) == [0] * 6
    assert dry([1, 2, 3, 1, 2], dry_breakers=[2]) == [0] * 6
    assert dry([1, 2, 3, 1, 2], dry_breakers=[3]) == [0] * 6
    # Less than a factor of 1: off.
    assert dry([1, 2, 3, 1, 2], dry_base=0.5) == [0] * 6


def test_a_huge_dry_penalty_is_finite(sampler: SamplerUnderTest) -> None:
    text = [1, 2] * 200
    row = edited(sampler, FLAT, text, [], dry_multiplier=1e30, dry_base=1e30)
    assert row[1] == -torch.finfo(torch.float32).max


def test_counts(sampler: SamplerUnderTest) -> None:
    """Presence and frequency see the output; dialect "llama.cpp": the prompt too."""
    arguments = {"frequency_penalty": 0.5, "presence_penalty": 2.0}
    output = edited(sampler, FLAT, [1, 2, 2], [2, 3, 3], **arguments)
    assert output == [0, 0, -2.5, -3, 0, 0]
    both = edited(sampler, FLAT, [1, 2, 2], [2, 3, 3], dialect="llama.cpp", **arguments)
    assert both == [0, -2.5, -3.5, -3, 0, 0]


def test_repetition(sampler: SamplerUnderTest) -> None:
    row = torch.tensor([[3.0, -3.0, 3.0, -3.0, 0.0, 1.0]])
    assert edited(sampler, row, [0], [1, 1, 4], repetition_penalty=2.0) == [1.5, -6, 3, -3, 0, 1]


def test_ngrams(sampler: SamplerUnderTest) -> None:
    text = [1, 2, 3, 1, 2]
    assert edited(sampler, FLAT, text, [], no_repeat_ngram_size=3) == [0, 0, 0, -INF, 0, 0]
    assert edited(sampler, FLAT, text, [], no_repeat_ngram_size=1) == [0, -INF, -INF, -INF, 0, 0]
    assert edited(sampler, FLAT, text, [], no_repeat_ngram_size=6) == [0] * 6


def test_biases_and_bans(sampler: SamplerUnderTest) -> None:
    biases = {0: 1.0, (1,): -INF, (2, 3): 0.5, (9, 3): 4.0, (1, 2, 3): 0.25}
    big = torch.zeros(1, 10)
    assert edited(sampler, big, [1], [2], logit_bias=biases)[:5] == [1, -INF, 0, 0.75, 0]
    assert edited(sampler, FLAT, [], [], suppress_tokens=[1, 4]) == [0, -INF, 0, 0, -INF, 0]
    words = [[0], [1, 2], [3, 1, 4], [4, 1, 5]]
    assert edited(sampler, FLAT, [3], [1], bad_words_ids=words) == [-INF, 0, -INF, 0, -INF, 0]
    infinite = torch.tensor([[INF, 0.0]])
    assert edited(sampler, infinite, [], [], suppress_tokens=[0]) == [-INF, 0]


def test_the_order_of_the_edits(sampler: SamplerUnderTest) -> None:
    """Bias, then repetition, then frequency, then presence."""
    row = edited(
        sampler, torch.tensor([[1.0, 0.0]]), [], [0, 0], logit_bias={0: 3.0},
        repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.125,
    )  # fmt: skip
    assert row == [(1 + 3) / 2 - 0.5 - 0.125, 0]


def test_end_tokens_wait(sampler: SamplerUnderTest) -> None:
    arguments = {"min_tokens": 2, "eos_token_id": [0, 3]}
    assert edited(sampler, FLAT, [1, 1, 1], [1], **arguments) == [-INF, 0, 0, -INF, 0, 0]
    assert edited(sampler, FLAT, [1, 1, 1], [1, 1], **arguments) == [0] * 6


def test_forced_tokens(sampler: SamplerUnderTest) -> None:
    """They come whatever the logits, after so many tokens of output, and then are text."""
    tested = sampler.make(1, 6, temperature=0, forced_tokens={1: 4, 2: 5}, no_repeat_ngram_size=1)
    tested.insert(0, prompt=[3])
    row = torch.full((1, 6), float("nan"))
    drawn = [int(tested.sample(SIX if i not in (1, 2) else row).index[0]) for i in range(4)]
    assert drawn == [0, 4, 5, 1]


def test_a_bitmask(sampler: SamplerUnderTest) -> None:
    vocab = 70
    tested = sampler.make(1, vocab, seed=-1, return_logits=True)
    words = torch.tensor([[1 << 3, -(1 << 31), 1 << 5]], dtype=torch.int32)
    kept = tested.sample(torch.zeros(1, vocab), words).kept_logits[0]
    assert (kept > -INF).nonzero().flatten().tolist() == [3, 63, 69]


def test_the_chance_of_xtc(sampler: SamplerUnderTest) -> None:
    """It applies with its probability, by seed and position, whatever is drawn."""
    batch = 2000 if sampler.share == 1 else 300
    tested = sampler.make(
        batch, 6, seed=0, xtc_probability=0.3, xtc_threshold=0.15, return_logits=True
    )
    first = tested.sample(SIX.expand(batch, 6)).kept_logits[:, 0].isinf()
    second = tested.sample(SIX.expand(batch, 6)).kept_logits[:, 0].isinf()
    sigma = (0.3 * 0.7 / batch) ** 0.5
    for applied in (first, second):
        assert abs(applied.double().mean().item() - 0.3) < 5 * sigma
    both = (first & second).double().mean().item()
    assert abs(both - 0.09) < 5 * sigma
    # Without noise there is no chance.
    tested = sampler.make(1, 6, seed=-1, xtc_probability=0.99, return_logits=True)
    assert tested.sample(SIX).kept_count.tolist() == [6]


LOGITS = torch.tensor([[0.35, 0.3, 0.2, 0.1, 0.05]]).log()


@pytest.mark.parametrize(
    ("parameters", "token"),
    [
        ({}, 0),
        ({"typical_p": 0.25}, 1),
        ({"typical_p": 0.25, "top_p": 0.5, "min_p": 0.1, "top_k": 3}, 1),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.15}, 2),
        ({"typical_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.01}, 3),
        ({"typical_p": 0.25, "mirostat_tau": 5.0}, 0),
        ({"typical_p": 0.25, "adaptive_target": 0.1}, 1),
    ],
)
def test_temperature_0_of_llama_cpp_is_a_stage(
    parameters: dict[str, Any], token: int, sampler: SamplerUnderTest
) -> None:
    """It chooses the largest logit that typical and XTC left (b11434), first of equal ones."""
    twice = torch.cat([LOGITS, LOGITS], 1)  # each token again, 5 behind it
    for seed in (-1, 3):
        for row in (LOGITS, twice):
            made = sampler.make(
                1, row.shape[1], dialect="llama.cpp", seed=seed, temperature=0.0, num_logprobs=1,
                logprobs_mode="processed_logprobs", **parameters,
            )  # fmt: skip
            out = made.sample(row)
            assert out.kept_count.item() == 1 and out.logprob.item() == 0.0
            if row is LOGITS:
                assert out.index.item() == token
            elif "xtc_probability" not in parameters:  # which leaves the last of equal ones
                assert out.index.item() < 5
        made = sampler.make(1, 5, dialect="lmdecode", seed=seed, temperature=0.0, **parameters)
        assert made.sample(LOGITS).index.item() == 0


def test_mirostat_of_llama_cpp_leaves_out_filters_and_penalties(sampler: SamplerUnderTest) -> None:
    """Biases and bans stay, and so does the temperature (common_sampler_init of b11434)."""
    left_out = {
        "top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "top_n_sigma": 0.1,
        "xtc_probability": 1.0, "dynamic_temperature_range": 1.0, "repetition_penalty": 2.0,
        "presence_penalty": 9.0, "frequency_penalty": 9.0, "dry_multiplier": 9.0,
    }  # fmt: skip
    kept = {"temperature": 0.7, "mirostat_tau": 5.0, "logit_bias": {2: 1.0}, "suppress_tokens": [3]}
    found = []
    for more in ({}, left_out):
        made = sampler.make(1, 5, dialect="llama.cpp", seed=1, return_logits=True, **kept, **more)
        made.accept(0, [0, 1, 0])
        found.append(made.sample(LOGITS).kept_logits[0].tolist())
    assert found[0] == found[1]
    assert found[0] == pytest.approx(
        [(x + (i == 2)) / 0.7 if i != 3 else -INF for i, x in enumerate(LOGITS[0].tolist())]
    )


def test_a_dynamic_temperature_of_llama_cpp_begins_at_0(sampler: SamplerUnderTest) -> None:
    """A temperature of 0 with a range is not greedy: from 0 to the range, by the entropy."""
    made = sampler.make(
        1, 6, dialect="llama.cpp", seed=1, temperature=0.0, dynamic_temperature_range=0.5,
        return_logits=True,
    )  # fmt: skip
    p = SIX[0].exp()
    share = float(-(p * p.log()).sum() / np.log(6))
    assert made.sample(SIX).kept_logits[0].tolist() == pytest.approx(
        (SIX[0] / (0.5 * share)).tolist(), rel=1e-5
    )


def test_adaptive_p(sampler: SamplerUnderTest) -> None:
    """The logits that it draws from, and the mean of what was drawn, by hand."""
    x = torch.tensor([[0.6, 0.3, 0.1]]).log()
    tested = sampler.make(1, 3, seed=3, adaptive_target=0.3, adaptive_decay=0.75, num_logprobs=3,
                          return_logits=True, logprobs_mode="processed_logprobs")  # fmt: skip
    mean = 0.3
    for _ in range(6):
        target = min(max(2 * 0.3 - mean, 0), 1)
        distance = (torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64) - target).abs() / 0.3
        expected = 5 - 10 * distance**2 / (1 + distance)
        out = tested.sample(x)
        torch.testing.assert_close(out.kept_logits[0].double(), expected, rtol=1e-5, atol=1e-5)
        logprobs = expected.log_softmax(0)
        torch.testing.assert_close(
            out.top_logprobs[0].double(),
            logprobs.sort(descending=True).values,
            rtol=1e-5,
            atol=1e-5,
        )
        assert out.kept_count.item() == 3
        assert out.top_ids[0].tolist() == logprobs.argsort(descending=True).tolist()
        mean = 0.75 * mean + 0.25 * [0.6, 0.3, 0.1][out.index.item()]


def test_adaptive_p_holds_its_target(sampler: SamplerUnderTest) -> None:
    steps = 300
    logits = torch.randn(steps, 1, 20, generator=torch.Generator().manual_seed(0)) * 2

    def mean_of(tested: Any) -> float:
        drawn = [x.softmax(1)[0, tested.sample(x).index.item()].item() for x in logits]
        return sum(drawn) / steps

    plain = mean_of(sampler.make(1, 20, seed=1, min_p=0.01))
    for target in (0.15, 0.5):
        tested = sampler.make(1, 20, seed=1, adaptive_target=target, min_p=0.01)
        assert abs(mean_of(tested) - target) < min(0.07, abs(plain - target))
        tested.rewind(0, steps)  # and the mean is that of the beginning
        new = sampler.make(1, 20, seed=1, adaptive_target=target, min_p=0.01, return_logits=True)
        x = logits[0]
        assert torch.equal(tested.sample(x).index, new.sample(x).index)


EVERYTHING: dict[str, Any] = {
    "temperature": 1.3, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "mirostat_tau": 2.0,
    "mirostat_eta": 0.4, "no_repeat_ngram_size": 3, "dry_multiplier": 0.4, "xtc_probability": 0.3,
    "dry_allowed_length": 1, "bad_words_ids": [[1, 2]],
}  # fmt: skip


def logits_of(step: int, batch: int, vocab: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(batch, vocab, generator=generator) * 2


def draw(tested: Any, steps: range, rows: slice = slice(None)) -> list[list[int]]:
    return [tested.sample(logits_of(s, 3)[rows]).index.tolist() for s in steps]


def test_rewinding_is_as_if_nothing_had_been_accepted(sampler: SamplerUnderTest) -> None:
    tested = sampler.make(3, 12, seed=4, **EVERYTHING)
    before = draw(tested, range(6))
    after = draw(tested, range(6, 12))
    for row in range(3):
        tested.rewind(row, 6)
    assert draw(tested, range(6, 12)) == after
    for row in range(3):
        tested.rewind(row, 12)
    assert draw(tested, range(12)) == before + after
    with pytest.raises(ValueError, match="rewind"):
        tested.rewind(0, 13)


def test_a_row_draws_the_same_in_any_batch(sampler: SamplerUnderTest) -> None:
    seeds = [8, 9, 10]
    prompts = [[1, 2, 3], [], [5]]
    batch = sampler.make(3, 12, seed=seeds, **EVERYTHING)
    for row, prompt in enumerate(prompts):
        batch.insert(row, prompt=prompt)
    together = np.array(draw(batch, range(10)))
    for row in range(3):
        alone = sampler.make(1, 12, **EVERYTHING)
        alone.insert(0, prompt=prompts[row], seed=seeds[row])
        assert np.array_equal(
            draw(alone, range(10), slice(row, row + 1)), together[:, row : row + 1]
        )


def test_rows_change_places(sampler: SamplerUnderTest) -> None:
    tested = sampler.make(3, 12, seed=[1, 2, 3], **EVERYTHING)
    plain = sampler.make(3, 12, seed=[1, 2, 3], **EVERYTHING)
    draw(tested, range(5)), draw(plain, range(5))
    tested.reorder_(torch.tensor([2, 0, 0]))
    for step in range(5, 10):
        logits = logits_of(step, 3)
        ours = tested.sample(logits[[2, 0, 0]]).index.tolist()
        drawn = plain.sample(logits).index.tolist()
        assert ours == [drawn[2], drawn[0], drawn[0]]


def test_state_is_saved(sampler: SamplerUnderTest) -> None:
    tested = sampler.make(3, 12, seed=6, **EVERYTHING)
    draw(tested, range(5))
    tested.remove(1)
    state = tested.state_dict()
    after = draw(tested, range(5, 9))
    other = sampler.make(3, 12, seed=99)
    other.load_state_dict(state)
    assert draw(other, range(5, 9)) == after
    assert {row[1] for row in after} == {-1}


def test_tokens_chosen_elsewhere(sampler: SamplerUnderTest) -> None:
    """accept() of what sample(accept=False) chose is a step, but that mirostat does not learn."""
    parameters = {k: v for k, v in EVERYTHING.items() if not k.startswith("mirostat")}
    one = sampler.make(3, 12, seed=6, **parameters)
    two = sampler.make(3, 12, seed=6, **parameters)
    expected = draw(one, range(8))
    found = []
    for step in range(8):
        chosen = two.sample(logits_of(step, 3), accept=False).index.tolist()
        assert two.sample(logits_of(step, 3), accept=False).index.tolist() == chosen
        for row, token in enumerate(chosen):
            two.accept(row, token)
        found.append(chosen)
    assert found == expected


def test_seeds(sampler: SamplerUnderTest) -> None:
    """Unset: from torch's generator, a new one for each sequence."""
    logits = torch.zeros(8, 4000)

    def tokens(**arguments: Any) -> list[int]:
        torch.manual_seed(0)
        return sampler.make(8, 4000, **arguments).sample(logits).index.tolist()

    assert tokens() == tokens()
    assert len(set(tokens())) > 6
    assert tokens(seed=-1) == [0] * 8
    tested = sampler.make(8, 4000)
    first = tested.sample(logits).index.tolist()
    for row in range(8):
        tested.insert(row)
    assert sum(a == b for a, b in zip(first, tested.sample(logits).index.tolist(), strict=True)) < 3


def test_insert_goes_on_with_what_the_constructor_was_told(sampler: SamplerUnderTest) -> None:
    tested = sampler.make(2, 6, seed=-1, top_k=[1, 3])
    logits = SIX.expand(2, 6)
    assert tested.sample(logits).kept_count.tolist() == [1, 3]
    tested.insert(1, prompt=[2], top_p=0.5)
    tested.insert(0, top_k=5)
    assert tested.sample(logits).kept_count.tolist() == [5, 1]
    tested.insert(1)
    assert tested.sample(logits).kept_count.tolist() == [5, 3]


def test_log_probabilities_and_the_kept_set(sampler: SamplerUnderTest) -> None:
    for mode, total in (("raw_logprobs", 1.0), ("processed_logprobs", 0.9)):
        tested = sampler.make(
            1, 6, seed=-1, top_k=3, logit_bias={5: 20.0, 0: -INF, 1: 0.0}, num_logprobs=4,
            logprobs_mode=mode, return_kept_set=True, return_stages=True,
        )  # fmt: skip
        out = tested.sample(SIX)
        assert out.index.tolist() == [5]
        assert out.rank.tolist() == [6]
        ids, logprobs = out.kept_set.ids, out.kept_set.logprobs
        assert ids.tolist() == [1, 2, 5]
        assert out.kept_set.indptr.tolist() == [0, 3]
        biased = SIX[0].double() + torch.tensor([-INF, 0, 0, 0, 0, 20.0])
        expected = biased[ids].log_softmax(0)
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-6)
        assert out.stage_counts.tolist() == [[-1, 3, *[-1] * 9]]
        if total == 1:
            np.testing.assert_allclose(out.logprob, SIX[:, 5], rtol=1e-5)
            assert out.top_ids.tolist() == [[0, 1, 2, 3]]
            np.testing.assert_allclose(out.top_logprobs, SIX[:, :4], rtol=1e-5)
        else:
            np.testing.assert_allclose(out.logprob, expected[2:], rtol=1e-5, atol=1e-6)
            assert out.top_ids.tolist() == [[5, 1, 2, -1]]
            assert out.top_logprobs[0, 3] == -INF


def test_rows_without_a_token(sampler: SamplerUnderTest) -> None:
    tested = sampler.make(3, 4, seed=1, num_logprobs=1, suppress_tokens=[3])
    tested.remove(2)
    rows = torch.full((3, 4), -INF)
    rows[0, 3] = 1.0
    rows[1, 0] = float("nan")
    out = tested.sample(rows)
    assert out.index.tolist() == [0, 0, -1]
    assert out.kept_count.tolist() == [0, 0, 0]
    assert out.status.tolist() == [2, 3, 8]
