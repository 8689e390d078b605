"""Tensors of random bytes, and all the memory behind a tensor."""

import random

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


def random_map(rows: int, seed: int) -> torch.Tensor:
    """Parents of rows: a permutation, most of them their own, sorted, or any."""
    choice = random.Random(seed)
    kind = seed % 4
    if kind == 0:
        return torch.tensor(choice.sample(range(rows), rows))
    if kind == 1:  # most stay
        return torch.tensor([choice.choice((r, r, choice.randrange(rows))) for r in range(rows)])
    if kind == 2:  # as of a beam search: sorted
        return torch.tensor(sorted(choice.randrange(rows) for _ in range(rows)))
    return torch.tensor([choice.randrange(rows) for _ in range(rows)])
