"""Masks of a sliding window, for other attention; ``sliding_window_attention`` needs none."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_count, type_error

__all__ = ["compressed_swa_mask", "expand_compressed_swa_mask", "swa_mask"]

#: What a float mask adds to the score of a masked key; in float16 it is -inf.
MASKED_SCORE = -65536.0
#: A compressed mask is a square of this size, whatever the tile.
COMPRESSED_SIZE = 512

_FORMS = ("float", "bool")
_VARIANTS = (None, "python", "cpp")


def _check_form(op: str, form: object) -> None:
    if form not in _FORMS:
        raise ValueError(f"{op}: form is {form!r}; expected 'float' or 'bool'")


def tile_size(head_size: int) -> int:
    """Return the side of a tile of a compressed mask, in tokens."""
    return 128 if head_size <= 128 else 64


def _band(size: int, width: int, form: str) -> Tensor:
    """[size, size]: each row sees ``width`` keys up to its own."""
    row = torch.arange(size, device="cpu")
    distance = row[:, None] - row
    masked = (distance < 0) | (distance >= width)
    if form == "bool":
        return masked
    mask = torch.zeros(size, size, dtype=torch.float32, device="cpu")
    return mask.masked_fill_(masked, MASKED_SCORE)


def swa_mask(seq_len: int, window: int, *, form: str = "float") -> Tensor:
    """Make the mask of a causal sliding window: row m sees keys n with m - window < n <= m.

    Parameters
    ----------
    seq_len : int
        Tokens, at least 0.
    window : int
        Number of visible keys, the query's own included, at least 1. At ``seq_len`` and above, the
        mask is causal.
    form : str
        "float": float32, 0 or -65536, to be added to scores; "bool": True = masked, the opposite
        of what ``torch.nn.functional.scaled_dot_product_attention`` takes.

    Returns
    -------
    Tensor
        ``[seq_len, seq_len]`` float32 or bool. Cast to float16, the float form has -inf: a plain
        softmax of a row without a visible key would then give NaN. In float32 such a row would
        attend to its masked keys.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "swa_mask"
    seq_len = check_count(op, "seq_len", seq_len, 0)
    window = check_count(op, "window", window)
    _check_form(op, form)
    return _band(seq_len, window, form)


def _cpp_width(window: int, head_size: int) -> int:
    tile = 16384 // head_size // 16 * 16 if head_size > 128 else 128
    return 2 * tile + window % tile if window > 3 * tile else window


def _python_width(window: int, head_size: int) -> int:
    tile = tile_size(head_size)
    if window <= 3 * tile:
        return window
    return 3 * tile if window % tile == 0 else 2 * tile + window % tile


def compressed_swa_mask(
    window: int, head_size: int, *, form: str = "float", variant: str | None = None
) -> Tensor:
    """Make a mask of fixed size that represents a sliding window over any number of tokens.

    Tiled attention needs four tiles of the mask: the diagonal, a full one, and the two that the
    lower edge of the window crosses. The compressed mask is a band whose first column consists of
    these tiles; ``expand_compressed_swa_mask`` documents their order.

    Parameters
    ----------
    window : int
        Number of visible keys, the query's own included, at least 1.
    head_size : int
        Size of an attention head, at least 1. A tile has 128 tokens for sizes up to 128, else 64.
    form : str
        "float": float32, 0 or -65536; "bool": True = masked.
    variant : str, optional
        "python" or "cpp": bitwise the masks of the two published listings. These differ for every
        window that is a multiple of the tile, from four tiles up, 4096 among them: each follows the
        tile rule of another kernel. The band of "python" is ours. "cpp" takes head sizes up to
        1024.

    Returns
    -------
    Tensor
        ``[512, 512]`` float32 or bool.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "compressed_swa_mask"
    window = check_count(op, "window", window)
    head_size = check_count(op, "head_size", head_size)
    _check_form(op, form)
    if variant not in _VARIANTS:
        raise ValueError(f"{op}: variant is {variant!r}; expected None, 'python' or 'cpp'")
    if variant == "cpp":
        if head_size > 1024:
            raise ValueError(
                f"{op}: head_size is {head_size}; expected at most 1024 for variant 'cpp', "
                "whose tile has no tokens from there on"
            )
        return _band(COMPRESSED_SIZE, _cpp_width(window, head_size), form)
    return _band(COMPRESSED_SIZE, _python_width(window, head_size), form)


def expand_compressed_swa_mask(mask: Tensor, seq_len: int, window: int, head_size: int) -> Tensor:
    """Expand a compressed mask to the full mask.

    With tiles of B tokens, d tiles below the diagonal, and q = ceil(window / B): where
    window <= 3 B a tile is the one in row d of the mask's first column, else row 0 for d = 0, row 1
    for 0 < d < q - 1, row 2 for d = q - 1, row 3 for d = q. All others are masked. From
    ``compressed_swa_mask(window, head_size)`` it makes ``swa_mask(seq_len, window)``.

    Parameters
    ----------
    mask : Tensor
        ``[512, 512]``, of ``compressed_swa_mask``, any dtype.
    seq_len : int
        Tokens, at least 0.
    window, head_size : int
        Those that the mask was made for.

    Returns
    -------
    Tensor
        ``[seq_len, seq_len]``, with the dtype of the mask.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "expand_compressed_swa_mask"
    if not isinstance(mask, Tensor):
        raise type_error(op, "mask", mask, "a tensor")
    if mask.shape != (COMPRESSED_SIZE, COMPRESSED_SIZE):
        raise ValueError(
            f"{op}: mask has shape {list(mask.shape)}; "
            f"expected [{COMPRESSED_SIZE}, {COMPRESSED_SIZE}]"
        )
    seq_len = check_count(op, "seq_len", seq_len, 0)
    window = check_count(op, "window", window)
    head_size = check_count(op, "head_size", head_size)
    tile = tile_size(head_size)
    tiles, last = -(-seq_len // tile), -(-window // tile)
    # The first row sees itself alone: mask[0, 1] is what stands for masked.
    expanded = mask[0, 1].repeat(tiles * tile, tiles * tile)
    blocks = expanded.view(tiles, tile, tiles, tile).transpose(1, 2)
    for distance in range(min(tiles, last + 1)):
        if window <= 3 * tile or distance == 0:
            row = distance
        else:
            row = max(1, distance - last + 3)
        below = torch.arange(tiles - distance, device=mask.device)
        blocks[below + distance, below] = mask[row * tile : (row + 1) * tile, :tile]
    return expanded[:seq_len, :seq_len].contiguous()
