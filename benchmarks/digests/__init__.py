"""Digests of all bits that random calls give, to compare builds by."""
