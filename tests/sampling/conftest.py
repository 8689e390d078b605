"""The samplers that one test is run with, one after the other."""

import pytest

from tests.support.samplers import SAMPLERS, SamplerUnderTest


@pytest.fixture(params=SAMPLERS.values(), ids=list(SAMPLERS))
def sampler(request: pytest.FixtureRequest) -> SamplerUnderTest:
    return request.param
