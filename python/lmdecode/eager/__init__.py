"""Eager models of torch, whose rows have the same bits in every batch."""

from lmdecode.eager.mode import Memory, batch_invariant

__all__ = ["Memory", "batch_invariant"]
