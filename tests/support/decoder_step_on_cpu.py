"""The ops of a decoder's step on the CPU: the reference, for tests of the loop of a device."""

import functools

import torch

import lmdecode
from lmdecode.reference import decoder_step

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Make the references the CPU kernels of their ops, which have none, in this process."""
    assert lmdecode.__version__  # the schemas must be there first
    for name in decoder_step.__all__:
        torch.library.impl(f"lmdecode::{name}", "cpu", func=getattr(decoder_step, name))
