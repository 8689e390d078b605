"""The stages of ``Sampler`` by brute force in float64, and which rows no margin leaves open."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MARGIN = 1e-6
INF = np.inf
Array = np.ndarray

DIALECTS = {
    "lmdecode": "temperature top_k top_p min_p top_n_sigma epsilon eta top_h typical xtc mirostat",
    "transformers": (
        "temperature top_h top_k top_p min_p typical epsilon eta top_n_sigma xtc mirostat"
    ),
    "vllm": "temperature min_p top_k top_p top_n_sigma epsilon eta top_h typical xtc mirostat",
    "llama.cpp": (
        "top_n_sigma top_k typical top_p min_p xtc epsilon eta top_h temperature mirostat"
    ),
    "sglang": "temperature top_p top_k min_p top_n_sigma epsilon eta top_h typical xtc mirostat",
}
# What llama.cpp leaves out where there is mirostat.
ALONE = ("top_k", "top_p", "min_p", "top_n_sigma", "typical", "xtc")
SORT_BASED = ("transformers", "vllm")  # they keep the ties that a sort leaves

# The parameters of each stage, and the value at which it is off.
PARAMETERS: dict[str, dict[str, float]] = {
    "temperature": {
        "temperature": 1.0, "dynamic_temperature_range": 0.0, "dynamic_temperature_exponent": 1.0,
    },
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "epsilon": {"epsilon_cutoff": 0.0},
    "eta": {"eta_cutoff": 0.0},
    "top_h": {"top_h": 0.0},
    "typical": {"typical_p": 1.0},
    "xtc": {"xtc_probability": 0.0, "xtc_threshold": 0.1},
    "mirostat": {"mirostat_tau": 0.0},
}  # fmt: skip
STAGES = tuple(PARAMETERS)


def descending(values: Array) -> Array:
    """[B, V] places of float32 numbers without NaN, largest first, by one fast sort of integers."""
    number = (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0.0 is 0.0
    number = np.where(number < 0, -(number & 0x7FFFFFFF), number)
    keys = np.sort((-number << 32) | np.arange(values.shape[1]), axis=1)
    return keys & 0xFFFFFFFF


@np.errstate(all="ignore")
class Rows:
    """Rows on their way through the stages: y and kept are [B, V], numbers of a row [B, 1]."""

    def __init__(
        self,
        x: Array,
        parameters: Mapping[str, Array],
        dialect: str = "lmdecode",
        margin: float = MARGIN,
    ) -> None:
        batch = len(x)
        self.y = np.where(np.isnan(x), np.float32(-INF), x.astype(np.float32))
        self.kept = self.y > -INF
        self.temperature = np.ones((batch, 1), np.float32)
        self.orders: dict[bool, Array] = {}  # of the values, until a stage changes these
        self.decided = np.ones(batch, bool)
        self.margin = np.full((batch, 1), margin)
        self.infinite = np.zeros((batch, 1), bool)
        self.parameters = parameters
        self.dialect = dialect
        self.greedy = ~(self.parameter("temperature") > 0)
        self.greedy_last = np.zeros((batch, 1), bool)  # where the temperature's stage is
        if dialect == "llama.cpp":
            alone = self.parameter("mirostat_tau") > 0
            off = {name: value for stage, of in PARAMETERS.items() for name, value in of.items()
                   if stage in ALONE or name == "dynamic_temperature_range"}  # fmt: skip
            self.parameters = {
                name: np.where(alone[:, 0], off[name], value) if name in off else value
                for name, value in parameters.items()
            }
            half = self.parameter("dynamic_temperature_range") / 2
            self.greedy_last = self.greedy & (half == 0)
            from_0 = self.greedy & (half > 0)  # to the range
            for name in ("temperature", "dynamic_temperature_range") if from_0.any() else ():
                self.parameters[name] = np.where(from_0, half, self.parameter(name))[:, 0]
            self.greedy = np.zeros((batch, 1), bool)
        self._support()
        self.keep(self.greedy, self.rank() < 1)

    def parameter(self, name: str) -> Array:
        """[B, 1] float64 values of f32 numbers."""
        default = {k: v for stage in PARAMETERS.values() for k, v in stage.items()}[name]
        value = self.parameters.get(name, np.full(len(self.y), default))
        return value.astype(np.float32).astype(np.float64)[:, None]

    def _support(self) -> None:
        """+inf values are the support, equally likely; -inf are none of it."""
        v = self.values()
        self.kept &= v > -INF
        above = self.kept & (v == INF)
        infinite = above.any(axis=1, keepdims=True)
        self.kept = np.where(infinite, above, self.kept)
        self.infinite |= infinite
        self.y = np.where(self.infinite, np.float32(0), self.y)
        self.orders.clear()

    def values(self) -> Array:
        """[B, V] float32 y / T: infinite logits stay."""
        with np.errstate(all="ignore"):
            divided = self.y / self.temperature
        return np.where(np.isinf(self.y), self.y, divided).astype(np.float32)

    def order(self, high_index_first: bool) -> Array:
        """[B, V] tokens, largest value first, kept or not."""
        if high_index_first not in self.orders:
            values = self.values()
            if high_index_first:
                order = values.shape[1] - 1 - descending(values[:, ::-1])
            else:
                order = descending(values)
            self.orders[high_index_first] = order
        return self.orders[high_index_first]

    def rank(self, high_index_first: bool = False) -> Array:
        """[B, V] place among the kept ones: value descending, then index; the others follow."""
        order = self.order(high_index_first)
        kept = np.take_along_axis(self.kept, order, 1)
        before = kept.cumsum(axis=1)
        place = np.where(kept, before, before[:, -1:] + np.arange(1, 1 + kept.shape[1]) - before)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, place - 1, 1)
        return rank

    def log_weights(self) -> Array:
        """[B, V] float64, 0 at the largest kept logit, -inf where filtered."""
        y = np.where(self.kept, self.y.astype(np.float64), -INF)
        return (y - y.max(axis=1, keepdims=True)) / self.temperature.astype(np.float64)

    def log_probabilities(self) -> Array:
        weights = self.log_weights()
        return weights - np.log(np.exp(weights).sum(axis=1, keepdims=True))

    def log_total(self) -> Array:
        return np.log(np.exp(self.log_weights()).sum(axis=1, keepdims=True))

    def entropy(self) -> Array:
        """[B, 1] in nats."""
        log_p = self.log_probabilities()
        return -np.where(self.kept, np.exp(log_p) * log_p, 0).sum(axis=1, keepdims=True)

    def keep(self, on: Array, mask: Array) -> None:
        self.kept &= mask | ~on

    def undecide(self, on: Array, close: Array) -> None:
        self.decided &= ~(on & close & self.kept).any(axis=1)

    def keep_bound(self, on: Array, below_max: Array, keep_ties: bool, scale: Any = 1.0) -> None:
        """Keep values of at least max + below_max; where that is none, the first, or its ties."""
        v = np.where(self.kept, self.values().astype(np.float64), -INF)
        v = v - v.max(axis=1, keepdims=True)
        on = on & self.kept.any(axis=1, keepdims=True)
        self.undecide(on, np.abs(v - below_max) <= self.margin * scale)
        mask = v >= below_max
        none = ~(mask & self.kept).any(axis=1, keepdims=True)
        fallback = (v == 0) if keep_ties else self.rank() < 1
        self.keep(on, np.where(none, fallback, mask))

    def run(self) -> None:
        for stage in DIALECTS[self.dialect].split():
            if self.parameters.keys() & PARAMETERS[stage].keys():  # else it is off
                STAGE_FUNCTIONS[stage](self)


@np.errstate(all="ignore")
def temperature(rows: Rows) -> None:
    t, spread = rows.parameter("temperature"), rows.parameter("dynamic_temperature_range")
    exponent = rows.parameter("dynamic_temperature_exponent")
    count = rows.kept.sum(axis=1, keepdims=True)
    dynamic = (spread > 0) & (count > 1) & ~rows.greedy
    share = np.minimum(rows.entropy() / np.log(np.maximum(count, 2)), 1)
    low, high = np.maximum(t - spread, 0), t + spread
    chosen = np.where(dynamic, low + (high - low) * share**exponent, t).astype(np.float32)
    # The entropy's own rounding moves the temperature, most of all where it is small.
    rows.decided &= ~(dynamic & (low == 0) & (share < 0.02)).any(axis=1)
    rows.margin = np.where(dynamic, 50 * rows.margin, rows.margin)
    rows.temperature = np.where(rows.greedy | rows.greedy_last, np.float32(1), chosen)
    rows._support()
    rows.keep(rows.greedy_last, rows.rank() < 1)


@np.errstate(all="ignore")
def top_k(rows: Rows) -> None:
    k = rows.parameters.get("top_k", np.zeros(len(rows.y), np.int64)).astype(np.int64)[:, None]
    rank = rows.rank()
    mask = rank < k
    if rows.dialect in SORT_BASED:
        last = np.where(mask & rows.kept, rows.values(), INF).min(axis=1, keepdims=True)
        mask = rows.values() >= last
    rows.keep((k > 0) & (k < rows.kept.sum(axis=1, keepdims=True)), mask)


def _prefix_sums(rank: Array, values: Array) -> Array:
    """[B, V] of each token the sum of the values up to and with its rank."""
    order = np.empty_like(rank)
    np.put_along_axis(order, rank, np.arange(rank.shape[1])[None], 1)
    sums = np.take_along_axis(values, order, 1).cumsum(axis=1)
    out = np.empty_like(sums)
    np.put_along_axis(out, order, sums, 1)
    return out


@np.errstate(all="ignore")
def top_p(rows: Rows) -> None:
    p = rows.parameter("top_p")
    rank = rows.rank(high_index_first=rows.dialect in SORT_BASED)
    probability = np.where(rows.kept, np.exp(rows.log_probabilities()), 0)
    sums = _prefix_sums(rank, probability)
    on = (p < 1) & ~rows.greedy
    rows.undecide(on & (p > 0), np.abs(sums - p) <= rows.margin)
    rows.keep(on, np.where(p > 0, sums - probability < p, False) | (rank < 1))


@np.errstate(all="ignore")
def min_p(rows: Rows) -> None:
    p = rows.parameter("min_p")
    on = (p > 0) & ~rows.greedy
    ties = rows.dialect in (*SORT_BASED, "sglang")
    one = on & (p >= 1)
    v = np.where(rows.kept, rows.values(), -INF)
    rows.keep(one, v == v.max(axis=1, keepdims=True) if ties else rows.rank() < 1)
    rows.keep_bound(on & ~one, np.log(p), ties)


@np.errstate(all="ignore")
def top_n_sigma(rows: Rows) -> None:
    n = rows.parameter("top_n_sigma")
    count = np.maximum(rows.kept.sum(axis=1, keepdims=True), 1)
    largest = np.where(rows.kept, rows.values(), -INF).max(axis=1, keepdims=True)
    v = np.where(rows.kept, rows.values().astype(np.float64) - largest, 0)
    mean = v.sum(axis=1, keepdims=True) / count
    squares = np.where(rows.kept, v - mean, 0) ** 2
    sigma = np.sqrt(squares.sum(axis=1, keepdims=True) / count)
    spread = -v.min(axis=1, keepdims=True)
    # Its scale is that of the values.
    scale = np.where(spread > 0, 1 + n * spread, 0)
    bound = np.where(spread > 0, -n * sigma, -INF)
    rows.keep_bound((n > 0) & ~rows.greedy, bound, False, scale)


@np.errstate(all="ignore")
def epsilon(rows: Rows) -> None:
    e = rows.parameter("epsilon_cutoff")
    on = (e > 0) & (e < 1) & ~rows.greedy
    rows.keep_bound(on, np.log(e) + rows.log_total(), rows.dialect == "transformers")


@np.errstate(all="ignore")
def eta(rows: Rows) -> None:
    e = rows.parameter("eta_cutoff")
    on = (e > 0) & (e < 1) & ~rows.greedy
    least = np.log(np.minimum(e, np.sqrt(e) * np.exp(-rows.entropy())))
    rows.keep_bound(on, least + rows.log_total(), rows.dialect == "transformers")


@np.errstate(all="ignore")
def top_h(rows: Rows) -> None:
    h = rows.parameter("top_h")
    on = (h > 0) & ~rows.greedy
    if rows.dialect == "transformers":
        rows.keep(on, rows.rank() < 100)
    log_p = rows.log_probabilities()
    sums = _prefix_sums(rows.rank(), np.where(rows.kept, -np.exp(log_p) * log_p, 0))
    bound = h * rows.entropy()
    on &= h < 1  # else the sum of all is in reach
    rows.undecide(on, (np.abs(sums - bound) <= rows.margin * (1 + bound)) & (rows.rank() > 0))
    rows.keep(on, (sums <= bound) | (rows.rank() < 1))


@np.errstate(all="ignore")
def typical(rows: Rows) -> None:
    p = rows.parameter("typical_p")
    on = (p < 1) & ~rows.greedy & rows.kept.any(axis=1, keepdims=True)
    log_p = rows.log_probabilities()
    key = np.where(rows.kept, np.abs(-log_p - rows.entropy()), INF)
    # Equal logits have equal keys.
    order = np.argsort(key, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(key.shape[1])[None], 1)
    probability = np.where(rows.kept, np.exp(log_p), 0)
    sums = _prefix_sums(rank, probability)
    rows.undecide(on, np.abs(sums - p) <= rows.margin)
    mask = (sums - probability < p) & (p > 0) | (rank < 1)
    last = np.where(mask & rows.kept, key, -INF).max(axis=1, keepdims=True)
    at_last = (key == last) & (rank == np.where(mask, rank, -1).max(axis=1, keepdims=True))
    y_last = np.where(at_last, rows.y, -INF).max(axis=1, keepdims=True)
    near = np.abs(key - last) <= rows.margin * (1 + np.abs(np.where(rows.kept, log_p, 0)))
    rows.undecide(on, near & (rows.y != y_last))
    rows.keep(on, key <= last if rows.dialect == "transformers" else mask)


@np.errstate(all="ignore")
def xtc(rows: Rows) -> None:
    q, t = rows.parameter("xtc_probability"), rows.parameter("xtc_threshold")
    on = (q >= 1) & ~rows.greedy
    v = np.where(rows.kept, rows.values().astype(np.float64), -INF)
    v = v - v.max(axis=1, keepdims=True)
    bound = np.where(t > 0, np.log(t) + rows.log_total(), -INF)
    rows.undecide(on & (t > 0), np.abs(v - bound) <= rows.margin)
    count = ((v >= bound) & rows.kept).sum(axis=1, keepdims=True)
    rows.keep(on & (count >= 2), rows.rank() >= count - 1)


@np.errstate(all="ignore")
def mirostat(rows: Rows) -> None:
    """At the first token: mu = 2 tau."""
    tau = rows.parameter("mirostat_tau")
    on = (tau > 0) & ~rows.greedy & ~rows.greedy_last
    rows.keep_bound(on, rows.log_total() - 2 * tau * np.log(2), False)


STAGE_FUNCTIONS: dict[str, Callable[[Rows], None]] = {
    "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
    "top_n_sigma": top_n_sigma, "epsilon": epsilon, "eta": eta, "top_h": top_h, "typical": typical,
    "xtc": xtc, "mirostat": mirostat,
}  # fmt: skip
