"""The samplers that the tests of ``Sampler`` are run with: one list for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lmdecode
from lmdecode.reference.drafts import verify_draft
from lmdecode.reference.sampler import Sampler


class SamplerUnderTest(NamedTuple):
    """A class with the constructor and the methods of ``lmdecode.Sampler``, and its verify_draft.

    ``share``: how many rows it is given of those that a fast one gets.
    """

    make: Callable[..., Any]
    verify_draft: Callable[..., Any]
    share: float


SAMPLERS = {
    "reference": SamplerUnderTest(Sampler, verify_draft, 0.05),
    "op": SamplerUnderTest(lmdecode.Sampler, lmdecode.verify_draft, 1.0),
}
