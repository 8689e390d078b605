"""The beam search scorers of transformers 4.38, and their constraints."""

from lmdecode.beam.scorers.beam_scorer import BeamSearchScorer
from lmdecode.beam.scorers.constrained_beam_scorer import ConstrainedBeamSearchScorer
from lmdecode.beam.scorers.constraints import (
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from lmdecode.beam.scorers.hypotheses import BeamHypotheses

__all__ = [
    "BeamHypotheses",
    "BeamSearchScorer",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
]
