"""``verify_draft`` leaves the text or its distribution; ``prompt_lookup`` is plain torch's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode import reference
from tests.support.samplers import SamplerUnderTest

VOCAB = 12


def model(texts: list[list[int]]) -> Tensor:
    """[B, VOCAB] logits that depend on the last three tokens of each text."""
    rows = []
    for text in texts:
        generator = torch.Generator().manual_seed(hash(tuple(text[-3:])) % 2**31)
        rows.append(torch.randn(VOCAB, generator=generator) * 2)
    return torch.stack(rows)


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 4, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
    {"typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"mirostat_tau": 1.5, "mirostat_eta": 0.5},
    {"no_repeat_ngram_size": 2, "dry_multiplier": 0.8, "min_tokens": 7, "eos_token_id": 3},
    {"logit_bias": {(1, 2): 3.0, 4: -1.0}, "bad_words_ids": [[5, 6]], "forced_tokens": {4: 9}},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: "-".join(p))
def test_text_with_and_without_drafts(
    parameters: dict[str, Any], sampler: SamplerUnderTest
) -> None:
    """Drafts that are right and drafts that are not: the same tokens."""
    batch, length = 3, 24
    plain = sampler.make(batch, VOCAB, seed=[5, 6, 7], **parameters)
    texts: list[list[int]] = [[1], [2, 2], [3, 1, 2]]
    for row, prompt in enumerate(texts):
        plain.insert(row, prompt=prompt)
    expected = [list(text) for text in texts]
    for _ in range(length):
        for text, token in zip(expected, plain.sample(model(expected)).index.tolist(), strict=True):
            text.append(token)

    tested = sampler.make(batch, VOCAB, seed=[5, 6, 7], **parameters)
    for row, prompt in enumerate(texts):
        tested.insert(row, prompt=prompt)
    random = np.random.default_rng(0)
    prompts = [len(text) for text in texts]
    accepted = 0
    while min(len(t) - p for t, p in zip(texts, prompts, strict=True)) < length:
        width = int(random.integers(1, 5))
        drafts = []
        for text, whole in zip(texts, expected, strict=True):
            draft = [*whole[len(text) : len(text) + width], *[0] * width][:width]
            if random.random() < 0.5:
                draft[int(random.integers(width))] = int(random.integers(VOCAB))
            drafts.append(draft)
        logits = torch.stack(
            [
                model([text + draft[:i] for text, draft in zip(texts, drafts, strict=True)])
                for i in range(width + 1)
            ],
            dim=1,
        )
        out = sampler.verify_draft(logits, torch.tensor(drafts), tested)
        for row, text in enumerate(texts):
            count = int(out.num_accepted[row])
            tokens = out.tokens[row].tolist()
            assert tokens[:count] == drafts[row][:count]
            assert tokens[count + 1 :] == [-1] * (width - count)
            assert out.path[row].tolist() == [*range(count), *[-1] * (width - count)]
            text += tokens[: count + 1]
            accepted += count
    for row, text in enumerate(texts):
        assert text[: prompts[row] + length] == expected[row][: prompts[row] + length]
    assert accepted > length


def chi_square_is_small(counts: Tensor, probability: Tensor) -> bool:
    """Whether counts [V] may come from these probabilities; once in 10^6 they may not."""
    probability = probability.double() / probability.double().sum()
    expected = probability * counts.sum()
    if counts[expected == 0].sum() > 0:
        return False
    used = expected > 0
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[used].sum().item()
    freedom = int(used.sum()) - 1
    # Wilson and Hilferty: the cube root is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return z < 4.75


def softmax_of_kept(sampler: SamplerUnderTest, x: Tensor, **parameters: Any) -> Tensor:
    tested = sampler.make(1, len(x), seed=-1, return_logits=True, **parameters)
    return tested.sample(x[None]).kept_logits[0].double().softmax(-1)


@pytest.mark.parametrize("one_hot", [False, True], ids=["softmax", "one token"])
@pytest.mark.parametrize("parameters", [{}, {"top_k": 5, "temperature": 1.4}], ids=["all", "top-k"])
def test_rejection_keeps_the_distribution(
    parameters: dict[str, Any], one_hot: bool, sampler: SamplerUnderTest
) -> None:
    """The first token, and the second where the first draft was accepted, come from p."""
    batch, width = max(250, round(4000 * sampler.share)), 2
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(width + 1, VOCAB, generator=generator) * 1.5
    draft_logits = x[:-1] + torch.randn(width, VOCAB, generator=generator)
    q = draft_logits.softmax(-1)
    draft = torch.multinomial(q, batch, replacement=True, generator=generator).T.contiguous()
    if one_hot:
        draft[:] = x[:width].argmax(dim=1)
        q = torch.nn.functional.one_hot(draft[0], VOCAB).float()

    tested = sampler.make(batch, VOCAB, seed=11, **parameters)
    rows = draft_logits.expand(batch, width, VOCAB).contiguous()
    logits = x.expand(batch, width + 1, VOCAB)
    options = {} if one_hot else {"draft_logits": rows}
    out = sampler.verify_draft(logits, draft, tested, mode="rejection", **options)

    p = torch.stack([softmax_of_kept(sampler, row, **parameters) for row in x])
    first = out.tokens[:, 0].bincount(minlength=VOCAB)
    assert chi_square_is_small(first, p[0])
    second = out.tokens[out.num_accepted > 0, 1].bincount(minlength=VOCAB)
    assert chi_square_is_small(second, p[1])
    assert second.sum() > 40
    third = out.tokens[out.num_accepted > 1, 2].bincount(minlength=VOCAB)
    assert chi_square_is_small(third, p[2])
    # Not more is rejected than must be.
    rate = torch.minimum(p[0], q[0].double()).sum().item()
    share = (out.num_accepted > 0).double().mean().item()
    assert abs(share - rate) < 5 * (rate * (1 - rate) / batch) ** 0.5
    assert not chi_square_is_small(first, torch.ones(VOCAB)), "the test can fail"


def test_a_draft_of_the_same_distribution_is_accepted(sampler: SamplerUnderTest) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 4, VOCAB, generator=generator) * 3
    draft = torch.randint(0, VOCAB, (20, 3), generator=generator)
    q = logits[:, :-1].contiguous()
    tested = sampler.make(20, VOCAB, seed=1)
    out = sampler.verify_draft(logits, draft, tested, mode="rejection", draft_logits=q)
    assert out.num_accepted.tolist() == [3] * 20
    assert torch.equal(out.tokens[:, :3], draft)


def test_trees(sampler: SamplerUnderTest) -> None:
    """The path of a tree is what the sampler draws one by one."""
    random = np.random.default_rng(1)
    lengths = []
    for seed in range(20 if sampler.share < 1 else 200):
        width = int(random.integers(1, 9))
        parents = [int(random.integers(-1, i)) for i in range(width)]
        draft = random.integers(0, 2, width).tolist()
        prompt = [int(token) for token in random.integers(0, 2, 4)]

        def text_of(node: int, parents: list[int] = parents, draft: list[int] = draft) -> list[int]:
            return [] if node < 0 else [*text_of(parents[node]), draft[node]]

        # Two tokens alone are likely.
        likely = torch.where(torch.arange(VOCAB) < 2, 0.0, -20.0)
        nodes = range(-1, width)
        logits = torch.stack([model([prompt + text_of(node)])[0] + likely for node in nodes])[None]
        arguments: dict[str, Any] = {"seed": [seed], "repetition_penalty": 1.2}
        plain, tested = (sampler.make(1, VOCAB, **arguments) for _ in range(2))
        plain.insert(0, prompt=prompt)
        tested.insert(0, prompt=prompt)
        node, path, tokens = -1, [], []
        while True:
            token = int(plain.sample(logits[:, node + 1]).index[0])
            tokens.append(token)
            children = [i for i in range(width) if parents[i] == node and draft[i] == token]
            if not children:
                break
            node = children[0]
            path.append(node)
        out = sampler.verify_draft(
            logits, torch.tensor([draft]), tested, parents=torch.tensor([parents])
        )
        assert out.num_accepted.tolist() == [len(path)]
        assert out.path[0].tolist() == [*path, *[-1] * (width - len(path))]
        assert out.tokens[0].tolist() == [*tokens, *[-1] * (width + 1 - len(tokens))]
        lengths.append(len(path))
    assert max(lengths) >= 2


def test_part_of_a_draft_and_rows_without_a_sequence(sampler: SamplerUnderTest) -> None:
    logits = torch.full((3, 4, 5), -9.0)
    logits[:, :, 2] = 9.0
    tested = sampler.make(3, 5, temperature=0)
    tested.remove(1)
    out = sampler.verify_draft(
        logits, torch.full((3, 3), 2), tested, num_draft=torch.tensor([1, 3, 0])
    )
    assert out.num_accepted.tolist() == [1, 0, 0]
    assert out.tokens.tolist() == [[2, 2, -1, -1], [-1] * 4, [2, -1, -1, -1]]
    assert out.status.tolist() == [0, 8, 0]


def test_a_bitmask_for_each_place(sampler: SamplerUnderTest) -> None:
    logits = torch.full((1, 3, 5), -9.0)
    logits[:, :, 2] = 9.0
    bitmask = torch.tensor([[[31], [31 - 4], [31]]], dtype=torch.int32)
    out = sampler.verify_draft(
        logits, torch.tensor([[2, 2]]), sampler.make(1, 5, temperature=0), bitmask=bitmask
    )
    assert out.tokens.tolist() == [[2, 0, -1]]


def test_rejection_of_a_tree_is_refused(sampler: SamplerUnderTest) -> None:
    with pytest.raises(ValueError, match=r"mode|parents"):
        sampler.verify_draft(
            torch.zeros(1, 2, 5), torch.tensor([[1]]), sampler.make(1, 5), mode="rejection",
            parents=torch.tensor([[-1]]),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_texts(dtype: torch.dtype) -> None:
    """Of few tokens, so that n-grams of every length come again."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = set()
    for _ in range(2000):
        batch, length, vocab = number(0, 4), number(0, 40), number(1, 6)
        texts = torch.randint(0, vocab, (batch, length), generator=generator).to(dtype)
        lengths = torch.randint(0, length + 1, (batch,), generator=generator).to(dtype)
        num_tokens, max_ngram = number(1, 7), number(1, 6)
        given: dict[str, Any] = {} if number(0, 2) else {"lengths": lengths}
        got = lmdecode.prompt_lookup(texts, num_tokens, max_ngram, **given)
        assert got.dtype == torch.int64
        assert got.equal(reference.prompt_lookup(texts, num_tokens, max_ngram, **given))
        found |= {int((row >= 0).sum()) for row in got}
    assert found == set(range(7))


def test_the_earliest_place_of_the_longest_n_gram() -> None:
    text = torch.tensor([7, 9, 1, 2, 9, 3, 2, 9, 4, 5, 2, 9])
    assert lmdecode.prompt_lookup(text, 4).tolist() == [3, 2, 9, 4]  # behind "2 9", not behind "9"
    assert lmdecode.prompt_lookup(text, 4, 1).tolist() == [1, 2, 9, 3]
    assert lmdecode.prompt_lookup(text[:6], 2).tolist() == [-1, -1]
    assert lmdecode.prompt_lookup(torch.tensor([5, 5]), 3).tolist() == [5, -1, -1]


def test_strides() -> None:
    texts = torch.arange(24).view(2, 12) % 5
    wide = torch.stack((texts, texts + 1), dim=2)[:, :, 0]
    assert lmdecode.prompt_lookup(wide, 3).equal(lmdecode.prompt_lookup(texts, 3))
    assert lmdecode.prompt_lookup(wide[0], 3).equal(lmdecode.prompt_lookup(texts, 3)[0])


def test_bad_input() -> None:
    for name, message in (("num_tokens", r"0; expected 1 to 2\^24"), ("max_ngram", "0")):
        numbers = {"num_tokens": 2, name: 0}
        with pytest.raises(ValueError, match=f"^prompt_lookup: {name} is {message}"):
            lmdecode.prompt_lookup(torch.ones(2, 3, dtype=torch.int64), **numbers)
