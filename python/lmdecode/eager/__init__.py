"""Eager models of torch, whose rows have the same bits in every batch."""

from lmdecode.eager.mode import batch_invariant
from lmdecode.eager.packed_weights import Memory

__all__ = ["Memory", "batch_invariant"]
