"""The random calls of the tests, for the stages: the one place that knows where they are."""

from tests.support.cases import assert_same_bits
from tests.support.random_cases import (
    LARGE_VOCAB_SIZES,
    MEDIUM_VOCAB_SIZES,
    beam_cases,
    sampling_cases,
)

__all__ = [
    "LARGE_VOCAB_SIZES",
    "MEDIUM_VOCAB_SIZES",
    "assert_same_bits",
    "beam_cases",
    "sampling_cases",
]
