"""Numbers of the host on a device, without a wait of the host for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sent", "uploaded"]


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device.

    From the CPU to a GPU it goes through pinned memory: from other memory the copy would wait until
    the GPU has done all that was asked of it before. Not into a CUDA graph that is being captured,
    whose replays would read the memory when it is another's: there CUDA refuses the copy.
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
