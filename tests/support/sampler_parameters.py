"""Random parameters of ``Sampler``, a value a row."""

from collections.abc import Sequence

import numpy as np

from tests.support.random_rows import Array, pick


def make_parameters(
    random: np.random.Generator, stages: Sequence[str], batch: int, vocab: int
) -> dict[str, Array]:
    """Values of every stage's parameters, [B] each; all on in most rows."""

    def uniform(low: float, high: float) -> Array:
        return random.uniform(low, high, batch)

    def choose(values: dict[float, float], rest: Array) -> Array:
        """One of these values, with these weights; else, with the weight of 4, the rest."""
        picked = pick(random, {**values, np.nan: 4.0}, batch)
        return np.where(np.isnan(picked), rest, picked)

    made: dict[str, Array] = {}
    for stage in stages:
        if stage == "temperature":
            made["temperature"] = choose({0.7: 2, 1.5: 1, 0: 0.3}, uniform(0.2, 3))
            on = random.random(batch) < 0.4
            made["dynamic_temperature_range"] = np.where(on, uniform(0.05, 1.5), 0)
            made["dynamic_temperature_exponent"] = choose({1: 4, 0: 0.3, 2: 1}, uniform(0.3, 2))
        elif stage == "top_k":
            k = random.integers(1, vocab + 1, batch)
            made["top_k"] = choose({1: 0.5, 2: 1, 5: 1, 40: 2, vocab: 0.3, 0: 0.3}, k)
            made["top_k"] = made["top_k"].astype(np.int64)
        elif stage == "top_p":
            made["top_p"] = choose({0: 0.3, 0.5: 1, 0.9: 2, 1: 0.3}, uniform(0, 1))
        elif stage == "min_p":
            made["min_p"] = choose({1: 0.3, 0.05: 2, 1e-4: 1, 0: 0.2}, uniform(0, 1))
        elif stage == "top_n_sigma":
            made["top_n_sigma"] = choose({1: 2, 2: 1, 0.1: 0.5}, uniform(0.01, 4))
        elif stage == "epsilon":
            made["epsilon_cutoff"] = choose({0.25: 1, 1e-3: 2, 1: 0.2}, 10 ** uniform(-6, -0.3))
        elif stage == "eta":
            made["eta_cutoff"] = choose({0.25: 1, 1e-3: 2, 1: 0.2}, 10 ** uniform(-6, -0.3))
        elif stage == "top_h":
            made["top_h"] = choose({1: 0.5, 0.4: 2, 0.9: 1}, uniform(0.01, 1))
        elif stage == "typical":
            made["typical_p"] = choose({0.5: 1, 0.95: 2, 0: 0.2}, uniform(0.01, 0.99))
        elif stage == "xtc":
            made["xtc_probability"] = choose({1: 4, 0: 0.5}, np.ones(batch))
            made["xtc_threshold"] = choose({0.1: 1, 0: 0.1, 0.5: 0.2}, 10 ** uniform(-4, -0.3))
        elif stage == "mirostat":
            made["mirostat_tau"] = choose({5: 1, 1: 1}, uniform(0.05, 6))
    return made
