"""``generate()`` with beams, by the ops of beam search."""

from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.beam.generate_beam_search import beam_search
from lmdecode.integrations.transformers.beam.trace import BeamComparison, compare_with_transformers

__all__ = [
    "BeamComparison",
    "HammingDiversityLogitsProcessor",
    "beam_search",
    "compare_with_transformers",
]
