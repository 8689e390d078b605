"""The stages of ``Sampler`` in plain torch: each drops some tokens of one row.

A row is a ``Survivors``: its logits after the edits, the temperature so far, and the ids that are
left, in order (value descending, then id ascending). A stage takes it and makes it smaller. Sums
are integers and comparisons are made in float64, so a result depends on its own row only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmdecode.reference.arithmetic import (
    exponent_factor,
    log_scalar,
    mass_fraction_bits,
    mass_threshold,
    philox,
    position_words,
    power_of_share,
    round_to_f32,
    sum_masses,
    token_weight,
    unit_fraction,
)
from lmdecode.reference.sampler_parameters import RowParameters, as_llama_cpp
from lmdecode.reference.sampling import (
    DIALECT_RULES,
    DialectRules,
    in_order,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)

_INF = math.inf
LN2 = math.log(2.0)  # 0x1.62e42fefa39efp-1
LOG2_E = 1.4426950408889634
MIN_EXPONENT = -125.0
_XTC_BLOCK = 0xFFFFFFFF  # no token's block: those end at 2^30
EXTRA_STREAM = 2  # of Philox: tokens' noise has 0 and 1

STAGES = (
    "temperature top_k top_p min_p top_n_sigma epsilon eta top_h typical xtc mirostat"
).split()
"""The columns of ``stage_counts``."""


@dataclass(frozen=True)
class SamplerDialect:
    """A system's order of the stages, and its rules."""

    stages: list[str]
    filters: DialectRules  # of top-k, top-p and min-p
    keep_ties: bool = False  # of the maximum, where nothing else is kept; and of typical's last key
    top_h_tokens: int | None = None  # top-h reads only this many first tokens
    least_temperature: float = 0.0  # below it a row is greedy
    counts_see_prompt: bool = False  # of the frequency and presence penalties
    allows_end_tokens: bool = False  # a bad word that is just an end token is none
    rank_after_ties: bool = False  # of equal raw logits the chosen one comes last
    of_row: Callable[[RowParameters], RowParameters] = lambda row: row  # what it makes of a row's


SAMPLER_DIALECTS = {
    "lmdecode": SamplerDialect(list(STAGES), DIALECT_RULES["lmdecode"]),
    "transformers": SamplerDialect(
        "temperature top_h top_k top_p min_p typical epsilon eta top_n_sigma xtc mirostat".split(),
        DIALECT_RULES["transformers"],
        keep_ties=True,
        top_h_tokens=100,
        allows_end_tokens=True,
    ),
    "vllm": SamplerDialect(
        "temperature min_p top_k top_p top_n_sigma epsilon eta top_h typical xtc mirostat".split(),
        DIALECT_RULES["vllm"],
        least_temperature=1e-5,
        rank_after_ties=True,
    ),
    "llama.cpp": SamplerDialect(
        "top_n_sigma top_k typical top_p min_p xtc epsilon eta top_h temperature mirostat".split(),
        DIALECT_RULES["lmdecode"],
        counts_see_prompt=True,
        of_row=as_llama_cpp,
    ),
    "sglang": SamplerDialect(
        "temperature top_p top_k min_p top_n_sigma epsilon eta top_h typical xtc mirostat".split(),
        replace(DIALECT_RULES["lmdecode"], strict_top_p=True, min_p_one_keeps_ties=True),
    ),
}


class Survivors:
    """The tokens that are left of a row: ``kept`` are their ids, in order.

    ``y`` [V] float32 are the edited logits, without NaN. ``v`` [V] float32, y / temperature, orders
    the tokens; it is 0 where +inf is the support. The temperature so far is 0 once a dynamic
    temperature came to 0. ``infinite``: the support are +inf values, whose tokens are equal to
    every stage.
    """

    def __init__(self, y: Tensor) -> None:
        self.y = y
        self.temperature = 1.0
        self.infinite = False
        self.kept = torch.nonzero(y > -_INF).flatten()
        self._set_values(y)

    def _set_values(self, v: Tensor) -> None:
        """Take the support of new values, and its order."""
        tokens = self.kept.sort().values
        above = tokens[v[tokens] == _INF]
        if len(above):
            self.infinite = True
            tokens, v = above, torch.zeros_like(v)
        if self.infinite:
            self.y = v = torch.zeros_like(v)
        self.v = v
        self.kept = in_order(v, tokens[v[tokens] > -_INF])

    def divide(self, temperature: float) -> None:
        """Take a temperature > 0."""
        self.temperature = temperature
        divided = self.y / torch.full_like(self.y, temperature)
        self._set_values(torch.where(self.y.isinf(), self.y, divided))

    def keep(self, mask: Tensor) -> None:
        """Keep where ``mask``, in the order of ``kept``, is set."""
        self.kept = self.kept[mask]

    @property
    def fraction_bits(self) -> int:
        return mass_fraction_bits(len(self.y))

    def y_max(self) -> float:
        return self.y[self.kept].max().item()

    def factor(self) -> float:
        return exponent_factor(self.temperature)

    def weights(self) -> Tensor:
        """[kept] float32, in the order of ``kept``."""
        return token_weight(self.y[self.kept], self.y_max(), self.factor())

    def masses(self) -> Tensor:
        """[kept] int64, the weights in fixed point."""
        return (self.weights() * 2.0**self.fraction_bits).to(torch.int64)

    def log_ratios(self) -> Tensor:
        """[kept] float32, >= 0: the logarithm to base 2 of the largest weight over each."""
        exponent = (self.y[self.kept] - self.y_max()) * self.factor()
        return -torch.where(exponent > MIN_EXPONENT, exponent, MIN_EXPONENT)

    def entropy_terms(self) -> Tensor:
        """[kept] int64, weight * log ratio in fixed point."""
        terms = self.weights() * self.log_ratios()
        return (terms * 2.0**self.fraction_bits).to(torch.int64)


# --- Statistics of what is left -------------------------------------------------------------------


def total_weight(row: Survivors) -> float:
    """W, the sum of the weights, float64."""
    return float(sum_masses(row.masses())) * 2.0**-row.fraction_bits


def mean_log_ratio(row: Survivors) -> float:
    """c, the mean of the log ratios under the distribution, in bits, float64."""
    return float(sum_masses(row.entropy_terms())) / float(sum_masses(row.masses()))


def entropy(row: Survivors) -> float:
    """H, in nats, float64."""
    return log_scalar(total_weight(row)) + LN2 * mean_log_ratio(row)


def reaches(row: Survivors, log_bound: float) -> Tensor:
    """[kept] bool: the value is at least the largest one plus ``log_bound``, in float64."""
    v = row.v[row.kept].to(torch.float64)
    # Beside a huge value a bound above 0 would be lost.
    return v >= v[0] + log_bound if log_bound <= 0 else torch.zeros_like(v, dtype=torch.bool)


def keep_reaching(row: Survivors, log_bound: float, keep_ties: bool) -> None:
    """Keep what reaches the bound; where nothing does the first token, or all that equal it."""
    mask = reaches(row, log_bound)
    if not mask.any():
        if keep_ties:
            mask = row.v[row.kept] == row.v[row.kept[0]]
        else:
            mask[0] = True
    row.keep(mask)


# --- The stages -----------------------------------------------------------------------------------


def temperature(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Divide by the temperature; with a range D by one within T - D .. T + D, by the entropy."""
    chosen = p.temperature
    count = len(row.kept)
    if p.dynamic_temperature_range > 0 and count > 1:
        low = max(0.0, p.temperature - p.dynamic_temperature_range)
        high = p.temperature + p.dynamic_temperature_range
        share = min(entropy(row) / log_scalar(float(count)), 1.0)
        power = power_of_share(share, p.dynamic_temperature_exponent)
        chosen = round_to_f32(low + (high - low) * power)
    if chosen > 0:
        row.divide(chosen)
    else:
        row.kept = row.kept[:1]


def top_k(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    row.kept = keep_top_k(row.v, row.kept, p.top_k, dialect.filters)


def top_p(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    mass = torch.zeros(len(row.y), dtype=torch.int64)
    mass[row.kept] = row.masses()
    row.kept = keep_top_p(row.v, mass, row.kept, p.top_p, row.fraction_bits, dialect.filters)


def min_p(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    row.kept = keep_min_p(row.v, row.kept, p.min_p, dialect.filters)


def top_n_sigma(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep v >= max - n sigma, sigma the standard deviation of the values that are left."""
    v = row.v[row.kept]
    if row.infinite:
        return
    top, bottom = 0.5 * v[0], 0.5 * v[-1]  # halves: their range is finite in f32
    spread = top - bottom
    if not spread > 0:
        return
    scale = min((torch.tensor(2.0**21) / spread).item(), 2.0**127)
    share = ((top - v * 0.5).double() * scale).round().to(torch.int64)
    count = len(v)
    exact = count * int((share * share).sum()) - int(share.sum()) ** 2
    sigma = 2.0 * math.sqrt(float(exact)) / (scale * float(count))
    keep_reaching(row, -(p.top_n_sigma * sigma), False)


def epsilon(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep probabilities >= epsilon."""
    keep_reaching(row, log_scalar(p.epsilon_cutoff * total_weight(row)), dialect.keep_ties)


def eta(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep probabilities >= min(eta, sqrt(eta) * exp(-H))."""
    log_eta = log_scalar(p.eta_cutoff)
    log_bound = log_scalar(total_weight(row)) + min(log_eta, 0.5 * log_eta - entropy(row))
    keep_reaching(row, log_bound, dialect.keep_ties)


def top_h(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep the longest front whose terms -p ln p sum to at most top_h times the entropy."""
    row.kept = row.kept[: dialect.top_h_tokens]
    # Every prefix sum is at most the sum, which only as the sum can be 2^63.
    scale = 2.0**-row.fraction_bits
    mass = _prefix_sums(row.masses()) * scale
    term = _prefix_sums(row.entropy_terms()) * scale
    weight = total_weight(row)
    prefix = (LN2 * term + log_scalar(weight) * mass) / weight
    mask = prefix <= p.top_h * prefix[-1]
    mask[0] = True
    row.keep(mask)


def _prefix_sums(values: Tensor) -> Tensor:
    """Cumulated sums of int64 values that sum to at most 2^63, as float64."""
    sums = values.cumsum(0).to(torch.float64)
    return torch.where(sums < 0, 2.0**63, sums)


def typical(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep the smallest set of mass >= p whose -log p are nearest to the entropy."""
    tokens = row.kept.sort().values
    y, factor = row.y[tokens].to(torch.float64), row.factor()
    distance = torch.zeros(len(tokens))  # in logits: one rounding from f64
    if not row.infinite and factor > 0:
        distance = ((y - y.max()) + mean_log_ratio(row) / factor).to(torch.float32).abs()
    key, places = distance.sort(stable=True)
    mass = torch.zeros_like(row.y, dtype=torch.int64)
    mass[row.kept] = row.masses()
    count = 1
    if p.typical_p > 0:
        threshold = mass_threshold(p.typical_p, sum_masses(mass), strict=False)
        cumulated = mass[tokens[places[:-1]]].cumsum(0)
        count = int((cumulated < threshold).sum()) + 1
    if dialect.keep_ties:
        count = int((key <= key[count - 1]).sum())
    row.keep(torch.isin(row.kept, tokens[places[:count]]))


def xtc(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """With a probability: of the tokens that reach a threshold keep the least likely alone."""
    if p.seed >= 0:
        block = torch.tensor([_XTC_BLOCK])
        words = philox(block, *position_words(p.position), EXTRA_STREAM, p.seed)[0]
        applies = unit_fraction(words[0], words[1]).item() < p.xtc_probability
    else:
        applies = p.xtc_probability >= 1
    if not applies:
        return
    log_bound = -_INF
    if p.xtc_threshold > 0:
        log_bound = log_scalar(p.xtc_threshold * total_weight(row))
    reached = int(reaches(row, log_bound).sum())
    if reached >= 2:
        row.kept = row.kept[reached - 1 :]


def mirostat(row: Survivors, p: RowParameters, dialect: SamplerDialect) -> None:
    """Keep the tokens with a surprise of at most mu bits."""
    log_bound = log_scalar(total_weight(row)) - p.mu * LN2
    keep_reaching(row, log_bound, False)


_Stage = Callable[[Survivors, RowParameters, SamplerDialect], None]
# Each with the condition under which it is on.
_STAGES: dict[str, tuple[_Stage, Callable[[RowParameters], bool]]] = {
    "temperature": (temperature, lambda p: p.temperature != 1 or p.dynamic_temperature_range > 0),
    "top_k": (top_k, lambda p: p.top_k > 0),
    "top_p": (top_p, lambda p: p.top_p < 1),
    "min_p": (min_p, lambda p: p.min_p > 0),
    "top_n_sigma": (top_n_sigma, lambda p: p.top_n_sigma > 0),
    "epsilon": (epsilon, lambda p: 0 < p.epsilon_cutoff < 1),
    "eta": (eta, lambda p: 0 < p.eta_cutoff < 1),
    "top_h": (top_h, lambda p: p.top_h > 0),
    "typical": (typical, lambda p: p.typical_p < 1),
    "xtc": (xtc, lambda p: p.xtc_probability > 0),
    "mirostat": (mirostat, lambda p: p.mirostat_tau > 0),
}


def adapt(row: Survivors, p: RowParameters) -> Tensor:
    """Give the kept tokens adaptive-p's logits; return the probabilities before: [V] float32."""
    probability = torch.zeros_like(row.y)
    probability[row.kept] = row.weights() / round_to_f32(total_weight(row))
    target = round_to_f32(min(max(2.0 * p.adaptive_target - p.mu, 0.0), 1.0))
    distance = ((probability - target) * round_to_f32(1.0 / round_to_f32(0.3))).abs()
    logits = 5.0 - 10.0 * distance * distance / (1.0 + distance)
    row.temperature, row.infinite = 1.0, False
    row.y = row.v = logits
    row.kept = in_order(logits, row.kept.sort().values)
    return probability


def run_stages(
    row: Survivors, parameters: RowParameters, dialect: SamplerDialect
) -> dict[str, int]:
    """Run the stages that are on, and return how many tokens each left, by name.

    A row that comes to have no token is left at once.
    """
    counts = {}
    for name in dialect.stages:
        stage, is_on = _STAGES[name]
        if is_on(parameters) and len(row.kept) > 0:
            stage(row, parameters, dialect)
            counts[name] = len(row.kept)
    return counts
