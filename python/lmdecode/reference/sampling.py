"""``top_k_top_p_sample`` in plain torch, a row at a time.

A row of logits goes through temperature, top-k, top-p and min-p; of the tokens that are left one
is chosen. Every step is defined bit for bit: the weight of a token is one fixed sequence of f32
operations, masses are integers, the top-p threshold is exact rational arithmetic, and the noise is
a function of (seed, position, token) alone. No sum depends on the order of its terms, so a result
depends on its own row only.

Two things are kept in order throughout. ``kept`` holds the ids of the surviving tokens, largest
value first and lowest id first among equal values (-0.0 equals +0.0). Every stage takes it and
returns the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from lmdecode.reference.arithmetic import (
    exponent_factor,
    log_scalar,
    mass_fraction_bits,
    mass_threshold,
    probability_mass,
    round_to_f32,
    sum_masses,
    token_noise,
    token_weight,
)
from lmdecode.sampling.types import (
    DIALECTS,
    STATUS_EMPTY,
    STATUS_NAN,
    STATUS_PARAMETER,
    SampleOutput,
)

_INF = math.inf
_SEED_STEP = 0x9E3779B97F4A7C15


# --- Parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DialectRules:
    """Differences between the dialects of the op, one switch each."""

    keep_top_k_ties: bool = False  # every value equal to the k-th one survives
    high_index_first: bool = False  # order of equal values within top-p
    strict_top_p: bool = False  # a prefix is full once mass > p, not once mass >= p
    skip_nonpositive_top_p: bool = False  # p <= 0: stage off, not one token
    min_p_first: bool = False  # min-p before top-k and top-p
    min_p_one_keeps_ties: bool = False  # min_p >= 1 keeps every value equal to the maximum
    rank_noise: bool = False  # q is indexed by rank where top-k or top-p is on
    probabilities: bool = False  # the inputs are probabilities: no softmax, filler 0
    k_is_on_at_vocab_size: bool = False  # k == V counts as on
    max_k: int | None = None  # a larger k switches the stage off
    round_to_logits: bool = False  # p and min-p are rounded to the dtype of the logits


_SORT_BASED = DialectRules(keep_top_k_ties=True, high_index_first=True, min_p_one_keeps_ties=True)
_ASCEND = DialectRules(
    rank_noise=True, k_is_on_at_vocab_size=True, max_k=1024, round_to_logits=True
)

DIALECT_RULES: dict[str, DialectRules] = {
    "lmdecode": DialectRules(),
    "transformers": _SORT_BASED,
    "vllm": replace(_SORT_BASED, min_p_first=True),
    "ascend_v1": replace(_ASCEND, strict_top_p=True, skip_nonpositive_top_p=True),
    "ascend_v2": _ASCEND,
    "ascend_v2_probabilities": replace(_ASCEND, probabilities=True),
}


@dataclass(frozen=True)
class _RowParameters:
    """The arguments of one row; floats are f32 values."""

    top_k: int
    top_p: float
    min_p: float
    temperature: float
    seed: int  # < 0: no internal noise
    position: int
    eps: float


@dataclass(frozen=True)
class _RowResult:
    """One row of a ``SampleOutput``; ``values`` is what kept_logits shows for the ``kept`` ids."""

    index: int
    kept: torch.Tensor
    values: torch.Tensor
    logprob: float
    status: int


# --- One row --------------------------------------------------------------------------------------


def in_order(y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sort tokens by value, descending; tokens of equal value stay in the order they came in."""
    return tokens[torch.sort(y[tokens] + 0.0, descending=True, stable=True).indices]


def keep_top_k(y: torch.Tensor, kept: torch.Tensor, k: int, rules: DialectRules) -> torch.Tensor:
    in_range = k > 0 and (rules.max_k is None or k <= rules.max_k)
    if not in_range or k >= len(kept):
        return kept
    if rules.keep_top_k_ties:
        return kept[y[kept] >= y[kept[k - 1]]]
    return kept[:k]


def keep_top_p(
    y: torch.Tensor,
    mass: torch.Tensor,
    kept: torch.Tensor,
    p: float,
    fraction_bits: int,
    rules: DialectRules,
) -> torch.Tensor:
    if math.isnan(p) or p >= 1 or (p <= 0 and rules.skip_nonpositive_top_p):
        return kept
    order = in_order(y, kept.flip(0)) if rules.high_index_first else kept
    if p <= 0:
        count = 1
    else:
        total = 1 << fraction_bits if rules.probabilities else sum_masses(mass[order])
        threshold = mass_threshold(p, total, rules.strict_top_p)
        # The prefix up to and with the first token at which the threshold is reached; a sum that
        # never reaches it (probabilities that sum to less than p) keeps all.
        cumulated = mass[order[:-1]].cumsum(0)
        count = int((cumulated < threshold).sum()) + 1
    selected = torch.zeros(len(y), dtype=torch.bool)
    selected[order[:count]] = True
    return kept[selected[kept]]


def keep_min_p(
    y: torch.Tensor, kept: torch.Tensor, min_p: float, rules: DialectRules
) -> torch.Tensor:
    if math.isnan(min_p) or min_p <= 0:
        return kept
    y_max = y[kept[0]].item()
    if min_p >= 1:
        bound = y_max
        if not rules.min_p_one_keeps_ties:
            return kept[:1]
    elif rules.probabilities:
        bound = min(y_max, y_max * min_p)  # the maximum stays, be it negative
    else:
        bound = y_max + log_scalar(min_p)
    return kept[y[kept].to(torch.float64) >= bound]


def best_score(kept: torch.Tensor, score: torch.Tensor) -> int:
    """Return the place in ``kept`` of the largest score: at ties the lowest id, not the first."""
    best = torch.nonzero(score == score.max()).flatten()
    return int(best[kept[best].argmin()])


def _choose(
    kept: torch.Tensor,
    weight: torch.Tensor,
    row: _RowParameters,
    q: torch.Tensor | None,
    rank_noise: bool,
) -> tuple[int, int]:
    """Return the position in ``kept`` of the chosen token, and status bits."""
    if q is None and row.seed < 0:
        return 0, 0
    status = 0
    if q is None:
        score = weight.to(torch.float64) / token_noise(row.seed, row.position, kept)
    else:
        noise = q[: len(kept)] if rank_noise else q[kept]
        score = weight / (noise.abs() + row.eps)
        score = torch.where(score.isnan(), -1.0, score)  # NaN noise, or 0 / 0
        if noise.isnan().any():
            status = STATUS_NAN
    if rank_noise:
        return int(score.argmax()), status
    return best_score(kept, score), status


def _weights(
    x: torch.Tensor,
    kept: torch.Tensor,
    temperature: float,
    fraction_bits: int,
    infinite: bool,
    rules: DialectRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [V] f32 and mass [V] int64 of the tokens that top-p sees; 0 for all others."""
    values = x[kept]
    if infinite:
        weights = torch.ones_like(values)
        masses = torch.full_like(kept, 1 << fraction_bits)
    elif rules.probabilities:
        weights = torch.where(values > 0, values, 0.0)
        masses = probability_mass(weights, fraction_bits)
    else:
        # The largest logit, which the first token in order need not have: different logits can be
        # equal after the temperature.
        x_max, factor = values.max().item(), exponent_factor(temperature)
        weights = token_weight(values, x_max, factor)
        masses = probability_mass(weights, fraction_bits)
    weight, mass = torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.int64)
    weight[kept], mass[kept] = weights, masses
    return weight, mass


def _sample_row(
    x: torch.Tensor, row: _RowParameters, q: torch.Tensor | None, rules: DialectRules
) -> _RowResult:
    """Sample one row; x is [V] f32, q is [V] f32 or None."""
    vocab = len(x)
    status = 0
    if x.isnan().any():
        status |= STATUS_NAN
        x = torch.where(x.isnan(), -_INF, x)
    if not row.temperature >= 0 or math.isnan(row.top_p) or math.isnan(row.min_p):
        status |= STATUS_PARAMETER

    # Temperature.
    greedy = not row.temperature > 0
    y = x
    if not greedy:
        y = torch.where(x.isinf(), x, x / torch.full_like(x, row.temperature))

    # The support: every value above -inf, or the +inf ones alone where there are any.
    infinite = bool((y == _INF).any())
    support = torch.nonzero(y == _INF if infinite else y > -_INF).flatten()
    if len(support) == 0:
        return _RowResult(0, support, y[support], -_INF, status | STATUS_EMPTY)
    kept = in_order(y, support)
    if greedy:
        kept = kept[:1]
        return _RowResult(int(kept[0]), kept, x[kept], 0.0, status)

    if rules.min_p_first:
        kept = keep_min_p(y, kept, row.min_p, rules)
    kept = keep_top_k(y, kept, row.top_k, rules)
    fraction_bits = mass_fraction_bits(vocab)
    weight, mass = _weights(x, kept, row.temperature, fraction_bits, infinite, rules)
    kept = keep_top_p(y, mass, kept, row.top_p, fraction_bits, rules)
    if not rules.min_p_first:
        kept = keep_min_p(y, kept, row.min_p, rules)

    last_k = vocab if rules.k_is_on_at_vocab_size else vocab - 1
    last_k = last_k if rules.max_k is None else min(last_k, rules.max_k)
    top_k_on = 0 < row.top_k <= last_k
    top_p_on = row.top_p < 1 and (row.top_p > 0 or not rules.skip_nonpositive_top_p)
    rank_noise = q is not None and rules.rank_noise and (top_k_on or top_p_on)
    chosen, noise_status = _choose(kept, weight[kept], row, q, rank_noise)

    index = int(kept[chosen])
    chosen_weight, kept_mass = weight[index].item(), sum_masses(mass[kept])
    logprob = -_INF
    if chosen_weight > 0 and kept_mass > 0:
        logprob = log_scalar(chosen_weight) - log_scalar(float(kept_mass) * 2.0**-fraction_bits)
    values = x[kept] if rules.probabilities else y[kept]
    return _RowResult(index, kept, values, logprob, status | noise_status)


# --- The op ---------------------------------------------------------------------------------------


def _float_rows(value: float | torch.Tensor | None, batch: int, default: float) -> list[float]:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32).tolist()
    return [round_to_f32(default if value is None else value)] * batch


def _round_to(dtype: torch.dtype, values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).to(dtype).tolist()


def _int_rows(value: int | torch.Tensor | None, batch: int, default: int) -> list[int]:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [default if value is None else value] * batch


def seed_rows(
    seed: int | torch.Tensor | None, generator: torch.Generator | None, batch: int
) -> list[int]:
    if generator is not None:
        device = generator.device
        return torch.randint(0, 2**63 - 1, (batch,), generator=generator, device=device).tolist()
    if isinstance(seed, int) and seed >= 0:
        return [(seed + row * _SEED_STEP) % 2**63 for row in range(batch)]
    return _int_rows(seed, batch, -1)


def top_k_top_p_sample(
    logits: torch.Tensor,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    *,
    min_p: float | torch.Tensor | None = None,
    temperature: float | torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    greedy: bool = False,
    eps: float = 1e-8,
    return_logits: bool = False,
    return_logprob: bool = False,
    dialect: str = "lmdecode",
) -> SampleOutput:
    """See ``lmdecode.top_k_top_p_sample``: the same parameters and the same bits, without checks.

    ``logits`` are [B, V]; parameters may be numbers or [B], and ``q`` is [B, V]. The result is a
    ``SampleOutput``.
    """
    assert set(DIALECT_RULES) == set(DIALECTS)
    rules = DIALECT_RULES[dialect]
    batch, vocab = logits.shape
    is_greedy = not isinstance(temperature, torch.Tensor) and temperature == 0
    if seed is None and generator is None and q is None and not greedy and not is_greedy:
        seed = torch.randint(0, 2**63 - 1, (batch,), device=logits.device)
    p, low = _float_rows(top_p, batch, 1.0), _float_rows(min_p, batch, 0.0)
    if rules.round_to_logits:
        p, low = _round_to(logits.dtype, p), _round_to(logits.dtype, low)
    columns = (
        _int_rows(top_k, batch, 0),
        p,
        low,
        _float_rows(temperature, batch, 1.0),
        seed_rows(seed, generator, batch),
        _int_rows(position, batch, 0),
        [round_to_f32(eps)] * batch,
    )
    rows = [_RowParameters(*column) for column in zip(*columns, strict=True)]
    noise = None if q is None else q.cpu()

    index = torch.zeros(batch, dtype=torch.int64)
    filler = 0.0 if rules.probabilities else -_INF
    kept_logits = torch.full((batch, vocab), filler) if return_logits else None
    logprob = torch.zeros(batch) if return_logprob else None
    kept_count = torch.zeros(batch, dtype=torch.int32)
    status = torch.zeros(batch, dtype=torch.uint8)
    for b, row in enumerate(rows):
        x = logits[b].cpu().to(torch.float32)
        result = _sample_row(x, row, None if noise is None else noise[b], rules)
        index[b] = result.index
        kept_count[b] = len(result.kept)
        status[b] = result.status
        if kept_logits is not None:
            kept_logits[b, result.kept] = result.values
        if logprob is not None:
            logprob[b] = round_to_f32(result.logprob)
    return SampleOutput(
        index.to(logits.device),
        None if kept_logits is None else kept_logits.to(logits.device),
        None if logprob is None else logprob.to(logits.device),
        kept_count.to(logits.device),
        status.to(logits.device),
    )
