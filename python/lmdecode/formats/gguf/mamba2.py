"""The vectors of Mamba-2 in a GGUF file, which has them as matrices."""

from __future__ import annotations

import re

__all__ = ["is_vector", "shape_in_file"]

_VECTOR = re.compile(r"model\.layers\.\d+\.mamba\.(A_log|D|norm\.weight)")


def is_vector(parameter: str) -> bool:
    """Whether a parameter is a vector that files have as a matrix."""
    return _VECTOR.fullmatch(parameter) is not None


def shape_in_file(parameter: str, size: int, groups: int) -> tuple[int, int]:
    """Return the shape of such a vector: norms are by groups, decays and skips are columns."""
    if parameter.endswith("norm.weight"):
        return groups, size // groups
    return size, 1
