"""Copies numbers of the host to a device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sent", "uploaded"]


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device.

    A copy from the CPU to a GPU goes through pinned memory: from other memory it would wait for all
    earlier work of the GPU. During the capture of a CUDA graph memory is not pinned, as replays
    would read it after it was freed: there CUDA refuses the copy.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded(values: Sequence[object], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return numbers as a tensor on a device, as ``sent`` does."""
    return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)
