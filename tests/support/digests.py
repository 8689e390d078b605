"""A digest of every output bit of many calls, to compare processes by."""

import hashlib
from collections.abc import Iterable

from torch import Tensor

from tests.support.cases import bits

__all__ = ["digest_of"]


def digest_of(outputs: Iterable[Iterable[Tensor | None]]) -> str:
    """Digest the tensors of calls, those that there are, in their order."""
    result = hashlib.sha256()
    for fields in outputs:
        for field in fields:
            if field is not None:
                result.update(bits(field.contiguous()).numpy().tobytes())
    return result.hexdigest()
