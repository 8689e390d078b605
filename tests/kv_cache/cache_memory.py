"""Tensors of random bytes, and all the memory behind a tensor."""

import torch

from tests.support.contracts import raw


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes: every bit pattern, NaNs with payloads too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.tensor([], dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[..., 0]


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides, storage offset and surroundings."""
    storage = raw(tensor).to(device, copy=True)
    copy = torch.tensor([], dtype=tensor.dtype, device=device)
    copy.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy
