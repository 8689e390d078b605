"""The samplers that the tests of ``Sampler`` are run with: one list for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lmdecode
from lmdecode.reference.drafts import verify_draft
from lmdecode.reference.sampler import Sampler


class SamplerUnderTest(NamedTuple):
    """A class like ``lmdecode.Sampler``; ``share``: how many of a fast one's rows it gets."""

    make: Callable[..., Any]
    verify_draft: Callable[..., Any]
    share: float


SAMPLERS = {
    "reference": SamplerUnderTest(Sampler, verify_draft, 0.05),
    "op": SamplerUnderTest(lmdecode.Sampler, lmdecode.verify_draft, 1.0),
}
