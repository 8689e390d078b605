"""Beam search: its ops and their state, the engine of requests that come and go, the scorers."""

from lmdecode.beam.engine import (
    BeamRequest,
    BeamResult,
    BeamSearch,
    BeamSearchOutput,
    BeamSequences,
    BeamTrace,
    format_trace,
)
from lmdecode.beam.ops import beam_finalize, beam_step, log_softmax_top_k
from lmdecode.beam.scorers import (
    BeamHypotheses,
    BeamSearchScorer,
    ConstrainedBeamSearchScorer,
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from lmdecode.beam.state import (
    BeamFinal,
    BeamParameters,
    BeamState,
    BeamStep,
    beam_parameters,
    new_beam_state,
)
from lmdecode.beam.trie import Trie
from lmdecode.beam.types import BeamCandidates

__all__ = [
    "BeamCandidates",
    "BeamFinal",
    "BeamHypotheses",
    "BeamParameters",
    "BeamRequest",
    "BeamResult",
    "BeamSearch",
    "BeamSearchOutput",
    "BeamSearchScorer",
    "BeamSequences",
    "BeamState",
    "BeamStep",
    "BeamTrace",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
    "Trie",
    "beam_finalize",
    "beam_parameters",
    "beam_step",
    "format_trace",
    "log_softmax_top_k",
    "new_beam_state",
]
