"""A strict reader of CTranslate2's ``model.bin``: it maps the file and copies requested variables.

The file has no padding and no checksum. Each item follows its length. So every length is compared
with the rest of the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ModelFile", "Variable"]

_NEWEST_VERSION = 6
# By their number in the file since version 4; before it, by the bytes of an element.
_DTYPES = (
    torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16,
)  # fmt: skip
_DTYPES_BY_SIZE = {4: torch.float32, 2: torch.int16, 1: torch.int8}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Variable(NamedTuple):
    """The location of a variable in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    size: int


class _Scanner:
    """A position in a mapped file, which advances with each read."""

    def __init__(self, path: Path, memory: mmap.mmap | bytes) -> None:
        self.path, self.memory, self.at = path, memory, 0

    def damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path} {what}; expected a model.bin that CTranslate2 wrote, whole and unchanged"
        )

    def take(self, size: int, what: str) -> int:
        """Advance by a number of bytes; return where they begin."""
        begin, left = self.at, len(self.memory) - self.at
        if size > left:
            raise self.damaged(f"ends within {what}: {size} bytes from {begin}, {left} are there")
        self.at += size
        return begin

    def number(self, code: str, what: str) -> int:
        begin = self.take(struct.calcsize(code), what)
        (value,) = struct.unpack_from(code, self.memory, begin)
        return int(value)

    def text(self, what: str) -> str:
        """Read a string; its length counts the zero byte at its end."""
        size = self.number("<H", f"the length of {what}")
        begin = self.take(size, what)
        data = self.memory[begin : begin + size]
        if size < 1 or data[-1] != 0 or 0 in data[:-1]:
            raise self.damaged(f"has, at {begin}, no zero at the end of {what}")
        try:
            return data[:-1].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"has, at {begin}, bytes in {what} that are no UTF-8") from error


class ModelFile:
    """The variables of a ``model.bin``; each is read when it is requested.

    Parameters
    ----------
    path
        The file, which must not change while this is in use.

    Attributes
    ----------
    spec, revision
        The name of the model's kind in CTranslate2, and the number of its layout.
    variables : dict of str to Variable
        Variables by name; ``aliases`` has their other names.

    Raises
    ------
    OSError
        There is no such file.
    ValueError
        It is truncated, damaged, or of an unknown version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise _Scanner(self.path, b"").damaged("is empty")
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.variables: dict[str, Variable] = {}
        self.aliases: dict[str, str] = {}
        self._scan(_Scanner(self.path, self._memory))

    def _scan(self, scanner: _Scanner) -> None:
        version = scanner.number("<I", "its version")
        if not 1 <= version <= _NEWEST_VERSION:
            raise scanner.damaged(f"is of version {version}, and 1 to {_NEWEST_VERSION} are read")
        self.spec, self.revision = "", 1
        if version >= 2:
            self.spec = scanner.text("the name of its kind")
            self.revision = scanner.number("<I", "its revision")
        for i in range(scanner.number("<I", "the count of its variables")):
            name = self._new_name(scanner, f"the name of variable {i}")
            self.variables[name] = self._variable(scanner, version, name)
        if version >= 3:
            for i in range(scanner.number("<I", "the count of its aliases")):
                alias = self._new_name(scanner, f"alias {i}")
                target = scanner.text(f"the variable of alias {alias!r}")
                if target not in self:
                    raise scanner.damaged(f"has {alias!r} stand for {target!r}, which is not there")
                self.aliases[alias] = self.resolve(target)
        if scanner.at != len(self._memory):
            more = len(self._memory) - scanner.at
            raise scanner.damaged(f"has {more} bytes behind its end at {scanner.at}")

    def _new_name(self, scanner: _Scanner, what: str) -> str:
        name = scanner.text(what)
        if not name or name in self:
            raise scanner.damaged(f"has {name!r} twice" if name else f"has nothing for {what}")
        return name

    def _variable(self, scanner: _Scanner, version: int, name: str) -> Variable:
        rank = scanner.number("<B", f"the rank of {name!r}")
        begin = scanner.take(4 * rank, f"the shape of {name!r}")
        shape = struct.unpack_from(f"<{rank}I", scanner.memory, begin)
        kind = scanner.number("<B", f"the dtype of {name!r}")
        count = scanner.number("<I", f"the size of {name!r}")
        dtype: torch.dtype | None
        if version >= 4:
            dtype, size = (_DTYPES[kind] if kind < len(_DTYPES) else None), count
        else:
            dtype, size = _DTYPES_BY_SIZE.get(kind), count * kind
        if dtype is None:
            raise scanner.damaged(f"has {name!r} with a dtype of number {kind}")
        if size != math.prod(shape) * dtype.itemsize or size == 0:
            raise scanner.damaged(
                f"has {name!r} with {size} bytes for shape {list(shape)} of {dtype}"
            )
        return Variable(shape, dtype, scanner.take(size, repr(name)), size)

    def __contains__(self, name: object) -> bool:
        return name in self.variables or name in self.aliases

    def resolve(self, name: str) -> str:
        """Return the name of the variable of a name or an alias.

        Raises
        ------
        ValueError
            There is no such variable.
        """
        name = self.aliases.get(name, name)
        if name not in self.variables:
            raise ValueError(f"{self.path} has no variable {name!r}")
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable; raises as ``resolve``."""
        return self.variables[self.resolve(name)].shape

    def read(self, name: str) -> Tensor:
        """Return a copy of a variable in its own dtype."""
        shape, dtype, begin, size = self.variables[self.resolve(name)]
        memory = bytearray(memoryview(self._memory)[begin : begin + size])
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def weights(self, name: str) -> Tensor:
        """Return the floats of a variable: unchanged, or float32 from integers and their scales.

        int8 has a scale for each row, int16 one for all: a value is the integer times the
        reciprocal of its scale, both rounded to float32, as CTranslate2 has it.

        Raises
        ------
        ValueError
            Integers have no scale, or an invalid one.
        """
        name = self.resolve(name)  # the scale belongs to the variable, not to its aliases
        values = self.read(name)
        if values.dtype in _FLOATS:
            return values
        where = f"{self.path} has {name!r} in {values.dtype}"
        if f"{name}_zero" in self or values.dtype == torch.int32 or f"{name}_scale" not in self:
            raise ValueError(f"{where}; expected floats, or int8 or int16 with a scale")
        scale = self.read(f"{name}_scale").float()
        rows = values.shape[0] if values.dim() else 1
        if scale.numel() not in (1, rows) or not bool((scale > 0).all() & scale.isfinite().all()):
            raise ValueError(
                f"{where} with a scale of shape {list(scale.shape)}; expected 1 or {rows} finite "
                "values above 0"
            )
        scale = scale.reshape(-1, *[1] * (values.dim() - 1))
        return values.float() * (1.0 / scale)
