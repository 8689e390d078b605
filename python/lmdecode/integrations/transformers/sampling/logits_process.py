"""Temperature, top-k, top-p and min-p as one logits processor."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from transformers import LogitsProcessor

from lmdecode._checks import is_int, is_real
from lmdecode.generation_options import FUSED
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.types import STATUS_NAN

_OP_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_RESULT_DTYPES = (*_OP_DTYPES, torch.float64)  # -inf is one of their values


def as_op_logits(scores: torch.Tensor) -> torch.Tensor:
    """Return ``scores``, converted to float32 if the op does not read their dtype."""
    return scores if scores.dtype in _OP_DTYPES else scores.to(torch.float32)


@functools.lru_cache(maxsize=64)
def is_valid_temperature(temperature: float) -> bool:
    """Tell whether a temperature is positive and finite in float32, in which the op divides."""
    rounded = torch.tensor(temperature, dtype=torch.float64, device="cpu").to(torch.float32).item()
    return 0.0 < rounded < math.inf


def _check_probability(name: str, value: float | None) -> None:
    if value is not None and not (is_real(value) and 0 <= value <= 1):
        raise ValueError(f"{name}: expected a number from 0 to 1 or None, got {value!r}")


class TopKTopPLogitsProcessor(LogitsProcessor):
    """Temperature, top-k, top-p and min-p in one pass over the scores.

    Returns what ``TemperatureLogitsWarper``, ``TopKLogitsWarper``, ``TopPLogitsWarper`` and
    ``MinPLogitsWarper`` of transformers return when they are applied in this order to
    ``scores.float()``, in the dtype of ``scores``: every value tied with the k-th one is kept, kept
    scores are divided by the temperature, the others are -inf. transformers adds up probabilities
    in floating point; a token at which the exact sum lies within 1e-6 of ``top_p`` (or its
    probability within 1e-6 of the ``min_p`` bound, relatively) may be kept by one and dropped by
    the other.

    It keeps no state, reads no ``input_ids``, treats every row by itself and never waits for the
    device, hence ``supports_continuous_batching``; its parameters hold for all requests of a batch.

    Parameters
    ----------
    top_k
        int >= 1: keep the k largest scores. None, or k >= V: no such filter.
    top_p
        float in [0, 1]: keep the most probable tokens up to and with the one at which their
        probability reaches ``top_p``; 0 keeps one token. None or 1: no such filter.
    min_p
        float in [0, 1]: keep tokens whose probability is at least ``min_p`` times that of the most
        probable one. None: no such filter.
    temperature
        float > 0 that the scores are divided by. None: 1.

    Raises
    ------
    ValueError
        If an argument is of another type or out of its range.

    Examples
    --------
    >>> processor = TopKTopPLogitsProcessor(top_k=50, top_p=0.9)
    >>> model.generate(**inputs, do_sample=True, top_k=0, logits_processor=[processor])
    """

    supports_continuous_batching = True

    def __init__(
        self,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        temperature: float | None = None,
    ) -> None:
        if top_k is not None and not (is_int(top_k) and int(top_k) > 0):
            raise ValueError(f"top_k: expected an int >= 1 or None, got {top_k!r}")
        _check_probability("top_p", top_p)
        _check_probability("min_p", min_p)
        if temperature is not None and not (
            is_real(temperature) and is_valid_temperature(temperature)
        ):
            raise ValueError(
                "temperature: expected a number that is > 0 and finite in float32, or None, "
                f"got {temperature!r}"
            )
        self.top_k = None if top_k is None else int(top_k)
        self.top_p = None if top_p is None else float(top_p)
        self.min_p = None if min_p is None else float(min_p)
        self.temperature = None if temperature is None else float(temperature)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.stages().items())
        return f"{type(self).__name__}({arguments})"

    def stages(self) -> dict[str, Any]:
        """Return the stages that are on, as keyword arguments of ``top_k_top_p_sample``."""
        values = {name: getattr(self, name) for name in FUSED}
        return {name: value for name, value in values.items() if value is not None}

    def __call__(self, input_ids: torch.LongTensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Return filtered scores, a new [B, V] tensor of their dtype; ``input_ids`` is unused.

        Filters and the division compute in float32, and the result is rounded once. The result is
        float32 for dtypes other than float16, bfloat16, float32 and float64, which may have no
        -inf. A row with NaN has NaN in its first entry, so its softmax is NaN, as after the
        warpers, and sampling from it fails. Raises ValueError if ``scores`` is not [B, V].
        """
        filtered = top_k_top_p_sample(
            as_op_logits(scores), **self.stages(), greedy=True, return_logits=True,
            dialect="transformers",
        )  # fmt: skip
        kept_logits = filtered.kept_logits
        assert kept_logits is not None  # it was asked for
        has_nan = (filtered.status & STATUS_NAN).to(torch.bool)
        kept_logits[:, 0].masked_fill_(has_nan, math.nan)
        return kept_logits.to(scores.dtype) if scores.dtype in _RESULT_DTYPES else kept_logits
