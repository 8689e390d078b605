"""The ops of a decoder's step on the CPU: the reference, for tests of the loop of a device."""

from __future__ import annotations

import torch

from lmdecode import _library  # noqa: F401  the schemas must be there first
from lmdecode.reference import decoder_step

for _name in decoder_step.__all__:
    torch.library.impl(f"lmdecode::{_name}", "cpu", func=getattr(decoder_step, _name))
