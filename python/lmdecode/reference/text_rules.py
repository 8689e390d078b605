"""Edits of the logits before the stages of a ``Sampler``, in plain torch: biases, penalties, bans.

Each edit is one rounded f32 operation per token, in a fixed order. ``text`` is prompt and output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lmdecode.reference.arithmetic import integer_power, round_to_f32
from lmdecode.reference.sampler_parameters import RowParameters
from lmdecode.reference.sampler_stages import SamplerDialect

_INF = math.inf
_MAX_FLOAT = float.fromhex("0x1.fffffep127")


def allowed_tokens(words: Tensor, vocab: int) -> Tensor:
    """[V] bool: bit i % 32 of word i / 32 of a row [ceil(V / 32)] int32 of a bitmask."""
    bits = words.to(torch.int64)[:, None] >> torch.arange(32) & 1
    return bits.flatten()[:vocab].bool()


def _ends_with(text: Sequence[int], tokens: Sequence[int]) -> bool:
    return len(tokens) == 0 or tuple(text[-len(tokens) :]) == tuple(tokens)


def _biases(row: RowParameters, text: Sequence[int]) -> dict[int, float]:
    """The f32 sum of the biases of each token: its own first, then those of sequences."""
    sums: dict[int, float] = {}
    for of_sequences in (False, True):
        for tokens, bias in row.logit_bias:
            if (len(tokens) > 1) == of_sequences and _ends_with(text, tokens[:-1]):
                sums[tokens[-1]] = round_to_f32(sums.get(tokens[-1], 0.0) + bias)
    return sums


def _banned(
    row: RowParameters, text: Sequence[int], output: Sequence[int], dialect: SamplerDialect
) -> set[int]:
    """Tokens that are forbidden whatever their logit."""
    banned = set(row.suppress_tokens)
    banned |= {
        tokens[-1]
        for tokens, bias in row.logit_bias
        if bias == -_INF and _ends_with(text, tokens[:-1])
    }
    for word in row.bad_words_ids:
        end_token = len(word) == 1 and word[0] in row.eos_token_id and dialect.allows_end_tokens
        if _ends_with(text, word[:-1]) and not end_token:
            banned.add(word[-1])
    if len(output) < row.min_tokens:
        banned |= set(row.eos_token_id)
    return banned


def repeated_ngrams(text: Sequence[int], size: int) -> set[int]:
    """Tokens that would complete an n-gram that stands in the text."""
    places = range(len(text) - size + 1)
    return {text[i + size - 1] for i in places if _ends_with(text, text[i : i + size - 1])}


def dry_lengths(text: Sequence[int], breakers: Iterable[int], allowed: int) -> dict[int, int]:
    """Of each token the length of the longest repetition that it would go on with.

    A repetition is an end of the text that stands earlier in it too; it does not reach over the
    last breaker, and counts from ``allowed`` tokens on. Breakers are never penalised.
    """
    length = len(text)
    breakers = set(breakers)
    limit = next((i for i in range(length) if text[length - 1 - i] in breakers), length)
    lengths: dict[int, int] = {}
    if length <= allowed or limit < allowed:
        return lengths
    for i in range(length - 1):
        match = 0
        while match <= i and match < limit and text[i - match] == text[length - 1 - match]:
            match += 1
        token = text[i + 1]
        if match >= allowed and token not in breakers:
            lengths[token] = max(match, lengths.get(token, 0))
    return lengths


def dry_penalty(multiplier: float, base: float, exponent: int) -> float:
    """Return multiplier * base^exponent: f64 by repeated squaring, at most the largest f32, f32."""
    return round_to_f32(min(multiplier * integer_power(base, exponent), _MAX_FLOAT))


def _index(tokens: Iterable[int], vocab: int) -> Tensor:
    """[N] int64, ascending: those of the tokens that the vocabulary has."""
    return torch.tensor(sorted({t for t in tokens if t < vocab}), dtype=torch.int64)


def edited_logits(
    x: Tensor,
    row: RowParameters,
    prompt: Sequence[int],
    output: Sequence[int],
    bitmask: Tensor | None,
    dialect: SamplerDialect,
) -> Tensor:
    """Return the logits y [V] float32 that the stages see; NaN becomes -inf."""
    vocab = len(x)
    y = torch.where(x.isnan(), -_INF, x)
    text = [*prompt, *output]
    if bitmask is not None:
        y = torch.where(allowed_tokens(bitmask, vocab), y, -_INF)

    sums = _biases(row, text)
    if sums:
        tokens = torch.tensor(list(sums))
        y[tokens] = y[tokens] + torch.tensor(list(sums.values()))
    y[_index(_banned(row, text, output, dialect), vocab)] = -_INF

    seen = _index(text, vocab)
    if row.repetition_penalty != 1:
        r = torch.tensor(row.repetition_penalty)
        y[seen] = torch.where(y[seen] < 0, y[seen] * r, y[seen] / r)
    counted = text if dialect.counts_see_prompt else output
    if row.frequency_penalty != 0 or row.presence_penalty != 0:
        seen = _index(counted, vocab)
        counts = Counter(counted)
        count = torch.tensor([counts[token] for token in seen.tolist()], dtype=torch.float32)
        frequency, presence = row.frequency_penalty, row.presence_penalty
        y[seen] = (y[seen] - torch.tensor(frequency) * count) - torch.tensor(presence)
    if row.no_repeat_ngram_size > 0:
        y[_index(repeated_ngrams(text, row.no_repeat_ngram_size), vocab)] = -_INF
    if row.dry_multiplier > 0 and row.dry_base >= 1:
        allowed = row.dry_allowed_length
        for token, length in dry_lengths(text, row.dry_breakers, allowed).items():
            if token < vocab:
                penalty = dry_penalty(row.dry_multiplier, row.dry_base, length - allowed)
                y[token] = y[token] - torch.tensor(penalty)
    return torch.where(y.isnan(), -_INF, y)
