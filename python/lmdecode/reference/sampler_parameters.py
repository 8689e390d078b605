"""The parameters of ``Sampler``, a row at a time: names, defaults, and what they mean for a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from lmdecode.reference.arithmetic import round_to_f32


@dataclass
class RowParameters:
    """The parameters of one row. Floats are f32 values; the defaults are "off".

    ``lmdecode.Sampler`` says what each means. ``nan`` tells that one was NaN, or the temperature
    negative. ``position`` and ``mu``, mirostat's or adaptive-p's mean, are the row's
    state when a token is drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    top_h: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = round_to_f32(0.1)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    mirostat_tau: float = 0.0
    mirostat_eta: float = round_to_f32(0.1)
    dynamic_temperature_range: float = 0.0
    dynamic_temperature_exponent: float = 1.0
    adaptive_target: float = -1.0
    adaptive_decay: float = round_to_f32(0.9)
    min_tokens: int = 0
    seed: int = -1
    dry_breakers: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    forced_tokens: dict[int, int] = field(default_factory=dict)

    nan: bool = False
    position: int = 0
    mu: float = 0.0


_STATE = ("nan", "position", "mu")
DEFAULTS = {f.name: getattr(RowParameters(), f.name) for f in fields(RowParameters)}
NUMBERS = tuple(
    name
    for name, value in DEFAULTS.items()
    if isinstance(value, (int, float)) and name not in _STATE
)
NAMES = tuple(name for name in DEFAULTS if name not in _STATE)


def _ids(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(int(token) for token in value)


def _number(name: str, value: float) -> tuple[float, bool]:
    """Return the value that a row uses for a parameter, and whether the given one was invalid."""
    default = DEFAULTS[name]
    if isinstance(default, int):
        return int(value), False
    value = round_to_f32(float(value))
    if name == "temperature" and not value >= 0:
        return 0.0, True
    return (default, True) if math.isnan(value) else (value, False)


def row_parameters(values: Mapping[str, Any]) -> RowParameters:
    """Take what one row was given: numbers, and the sequences and dicts of its token rules."""
    row = RowParameters()
    for name, value in values.items():
        if value is None:
            continue
        if name in NUMBERS:
            value, wrong = _number(name, value)
            row.nan |= wrong
        elif name == "logit_bias":
            value = tuple((_ids(tokens), round_to_f32(bias)) for tokens, bias in value.items())
        elif name == "bad_words_ids":
            value = tuple(_ids(word) for word in value)
        elif name == "forced_tokens":
            value = {int(count): int(token) for count, token in value.items()}
        elif name in ("suppress_tokens", "eos_token_id"):
            value = _ids(value)
        elif name == "dry_breakers":
            value = frozenset(_ids(value))
        else:
            raise TypeError(f"Sampler: {name} is no parameter")
        setattr(row, name, value)
    row.mu = row.adaptive_target if row.adaptive_target >= 0 else round_to_f32(2 * row.mirostat_tau)
    return row


def as_llama_cpp(row: RowParameters) -> RowParameters:
    """Return a row in which mirostat stands alone, and at temperature 0 all filters go first."""
    if row.mirostat_tau > 0:
        kept = ("temperature", "seed", "min_tokens", "no_repeat_ngram_size", "mirostat_tau",
                "mirostat_eta", "epsilon_cutoff", "eta_cutoff", "top_h")  # fmt: skip
        return replace(row, **{name: DEFAULTS[name] for name in NUMBERS if name not in kept})
    if row.temperature == 0 and row.dynamic_temperature_range > 0:
        half = row.dynamic_temperature_range / 2
        return replace(row, temperature=half, dynamic_temperature_range=half)
    if row.temperature == 0 and (row.typical_p < 1 or row.xtc_probability > 0):
        return replace(row, temperature=1.0, epsilon_cutoff=0.5, top_h=2.0**-100)
    return row


def split_rows(values: Mapping[str, Any], batch: int) -> list[dict[str, Any]]:
    """Give each row its own number of a list or tensor [batch], and everything else unchanged."""
    rows: list[dict[str, Any]] = [dict(values) for _ in range(batch)]
    for name in NUMBERS:
        value = values.get(name)
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, Sequence):
            for row, number in zip(rows, value, strict=True):
                row[name] = number
    return rows
