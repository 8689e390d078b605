"""The samplers that the tests of ``Sampler`` are run with: one list for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lmdecode
from lmdecode.reference.sampler import Sampler


class SamplerUnderTest(NamedTuple):
    """A class with the constructor and the methods of ``lmdecode.Sampler``.

    ``share``: how many rows it is given of those that a fast one gets.
    """

    make: Callable[..., Any]
    share: float


SAMPLERS = {
    "reference": SamplerUnderTest(Sampler, 0.05),
    "op": SamplerUnderTest(lmdecode.Sampler, 1.0),
}
