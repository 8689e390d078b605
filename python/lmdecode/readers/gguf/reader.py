"""Reader of GGUF files: metadata, table of tensors, and tensor bytes.

Files are untrusted input, so this reader checks each count, length and offset against the rest of
the file before it uses it. The package ``gguf`` takes seconds for a vocabulary of 262 144 tokens
and checks no count or length. transformers' reader is as fast as this one, but it allocates by an
unchecked count, and offsets outside of the file give short tensors.
"""

from __future__ import annotations

import math
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from lmdecode._memory import bytes_of
from lmdecode.linear.quantized_weight import KINDS, QuantizedWeight

__all__ = ["GgufFile", "Strings", "TensorInfo", "is_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays within arrays; no known file has any
_MAX_ALIGNMENT = 1 << 20
# Numbers of metadata types, and their names in struct and array. Strings and arrays differ.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12}  # of an element
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_BLOCKS = {kind.number: name for name, kind in KINDS.items()}
_OTHERS = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
           21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
           29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"}  # fmt: skip
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_COUNT_OF_PARTS = "split.count"
_MAX_PARTS = 99_999  # the digits of a name


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name ends in .gguf, or its content begins as such a file's."""
    path = Path(path)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return path.suffix == ".gguf" or file.read(4) == _MAGIC


class TensorInfo(NamedTuple):
    """The place of a tensor in its file, or its part, bytes ``begin`` to ``end``.

    ``shape`` is in torch's order: the last dimension is contiguous. ``kind`` is the dtype of its
    floats, or one of ``KINDS``.
    """

    shape: tuple[int, ...]
    kind: torch.dtype | str
    begin: int
    end: int


class _Cursor:
    """A place in a file's bytes that moves on; it never leaves them."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def error(self, what: str) -> ValueError:
        return _damaged(self.path, what)

    def skip(self, size: int, what: str) -> int:
        """Skip some bytes; return where they begin."""
        if size > len(self.data) - self.at:
            raise self.error(
                f"{what} takes {size} bytes at byte {self.at}; expected at most the "
                f"{len(self.data) - self.at} that are left"
            )
        begin, self.at = self.at, self.at + size
        return begin

    def numbers(self, code: str, what: str) -> tuple[Any, ...]:
        begin = self.skip(struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, begin)

    def number(self, code: str, what: str) -> Any:
        return self.numbers(f"<{code}", what)[0]

    def count(self, count: int, least: int, what: str) -> int:
        """Return a count of things of ``least`` bytes each, if the rest has room for them."""
        left = len(self.data) - self.at
        if count * least > left:
            raise self.error(
                f"{what} has {count} entries at byte {self.at}; expected what fits the {left} "
                "bytes that are left"
            )
        return count

    def text(self, what: str) -> str:
        size = self.number("Q", what)
        return self.decoded(self.skip(size, what), size, what)

    def decoded(self, begin: int, size: int, what: str) -> str:
        """Return the string of these bytes."""
        try:
            return str(self.data[begin : begin + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {begin} is no UTF-8 ({error})") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """Return a value of the metadata.

        Arrays of numbers are an ``array``, those of strings are ``Strings``, and others a list.
        """
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            expected = f"one of 0 to {max(_NUMBERS)}"
            raise self.error(f"{what} has the type {kind}; expected {expected}")
        if depth == _MAX_DEPTH:
            raise self.error(f"{what} has arrays within arrays; expected at most {_MAX_DEPTH}")
        of, count = self.numbers("<IQ", what)
        if of in _NUMBERS:
            code = _NUMBERS[of].replace("?", "B")
            size = self.count(count, struct.calcsize(code), what) * struct.calcsize(code)
            begin = self.skip(size, what)
            return array(code, bytes(self.data[begin : begin + size]))
        if of not in _LEAST_BYTES:
            raise self.error(f"{what} is an array of the type {of}; expected 0 to {max(_NUMBERS)}")
        self.count(count, _LEAST_BYTES[of], what)
        if of == _STRING:
            return Strings(self, count, what)
        return [self.value(of, what, depth + 1) for _ in range(count)]


class Strings(Sequence[str]):
    """An array of strings, each of which is decoded when it is asked for.

    A vocabulary has hundreds of thousands, and a model needs few of them.
    """

    def __init__(self, cursor: _Cursor, count: int, what: str) -> None:
        self._cursor, self._what = cursor, what
        self._begins = array("Q", bytes(8 * count))
        data, at, end = cursor.data, cursor.at, len(cursor.data)
        read = struct.Struct("<Q").unpack_from
        for i in range(count):
            if at + 8 > end:
                break
            self._begins[i] = at
            at += 8 + read(data, at)[0]
        if at > end or (count and not self._begins[-1]):
            raise cursor.error(
                f"{what} has {count} strings that go on beyond its end; expected what fits the "
                f"{end - cursor.at} bytes that are left at byte {cursor.at}"
            )
        cursor.at = at

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        begin = self._begins[index]
        (size,) = struct.unpack_from("<Q", self._cursor.data, begin)
        return self._cursor.decoded(begin + 8, size, self._what)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is no GGUF file that can be read: {what}")


class GgufFile:
    """A GGUF file, mapped: its tensors are views of the file, which must not change meanwhile.

    ``metadata`` has numbers, strings, ``Strings``, and ``array.array`` of numbers, by key;
    ``tensors`` has each ``TensorInfo`` by name. Of a file in parts any part may be named:
    ``metadata`` and ``path`` are those of the first, and ``tensors`` has those of all.

    Raises OSError if there is no such file, or a part is missing, which is named, and ValueError
    that names the fault if it is damaged, of another version, or has unknown types, or if parts do
    not belong together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._of_parts: dict[str, GgufFile] = {}  # tensors of the other parts
        self._read(path)
        if _COUNT_OF_PARTS in self.metadata:
            self._join_parts()

    def _read(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise _damaged(self.path, f"it has {size} bytes; expected 24 at least")
        self._memory = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)
        cursor = _Cursor(bytes_of(self._memory), self.path)
        num_tensors, num_entries = self._read_beginning(cursor)
        self.metadata = self._read_metadata(cursor, num_entries)
        self._end_of_metadata = cursor.at
        self.tensors = self._read_table(cursor, num_tensors)
        self._check_overlaps()

    def _read_beginning(self, cursor: _Cursor) -> tuple[int, int]:
        magic, version, num_tensors, num_entries = cursor.numbers("<4sIQQ", "the beginning")
        if magic != _MAGIC:
            raise cursor.error(f"it begins with {magic!r}; expected {_MAGIC!r}")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            big = ", big-endian" if swapped in _VERSIONS else ""
            raise cursor.error(
                f"it is of version {swapped if big else version}{big}; expected version 2 or 3, "
                "little-endian"
            )
        # A key, a type and a number; a name, a dimension, a type and an offset.
        cursor.count(num_entries, 8 + 4 + 1, "metadata")
        cursor.count(num_tensors, 8 + 4 + 8 + 4 + 8, "the table of tensors")
        return num_tensors, num_entries

    def _read_metadata(self, cursor: _Cursor, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(num_entries):
            key = cursor.text(f"key {i} of the metadata")
            if not key:
                raise cursor.error(f"key {i} of its metadata is empty; expected a name")
            if key in metadata:
                raise cursor.error(f"its metadata has {key!r} twice; expected it once")
            kind = cursor.number("I", f"the type of {key!r}")
            begin = cursor.at
            metadata[key] = cursor.value(kind, repr(key))
            if key == _COUNT_OF_PARTS:
                self._place_of_count = slice(begin, cursor.at)
        return metadata

    def _whole(self, key: str, low: int, high: int) -> int:
        value = self.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _damaged(
                self.path, f"its {key} is {str(value)[:60]}; expected an int, {low} to {high}"
            )
        return value

    def _join_parts(self) -> None:
        """Take the metadata of the first part, and the tensors of all; a whole file stays as is."""
        count = self._whole(_COUNT_OF_PARTS, 0, _MAX_PARTS)
        if count < 2:
            return
        own = self._whole("split.no", 0, count - 1)
        match = _PART_NAME.fullmatch(self.path.name)
        if match is None or (int(match[2]), int(match[3])) != (own + 1, count):
            raise _damaged(
                self.path,
                f"it is part {own + 1} of {count}; expected a name that ends in "
                f"-{own + 1:05}-of-{count:05}.gguf",
            )
        paths = [
            self.path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)
        ]
        for path in paths:  # before any is read
            if not path.is_file():
                raise FileNotFoundError(
                    f"{self.path} is part {own + 1} of {count}: {path} is missing"
                )
        self._read(paths[0])
        total = self._whole("split.tensors.count", 0, (1 << 31) - 1)
        for number, path in enumerate(paths):
            part = self
            if number > 0:
                part = GgufFile.__new__(GgufFile)
                part._of_parts = {}
                part._read(path)
            self._add_part(part, number, count, total)
        if len(self.tensors) != total:
            raise _damaged(
                self.path,
                f"its {count} parts have {len(self.tensors)} tensors; expected {total}, its "
                "split.tensors.count",
            )

    def _add_part(self, part: GgufFile, number: int, count: int, total: int) -> None:
        expected = {"split.no": number, _COUNT_OF_PARTS: count, "split.tensors.count": total}
        for key, value in expected.items():
            if part._whole(key, 0, (1 << 31) - 1) != value:
                raise _damaged(
                    part.path,
                    f"its {key} is {part.metadata[key]}; expected {value}, as in {self.path}",
                )
        if part is self:
            return
        for key, found in part.metadata.items():
            if key not in expected and key != "general.alignment":
                if found != self.metadata.get(key):
                    raise _damaged(
                        part.path, f"it has {key!r}; expected it in the first part alone"
                    )
        for name, info in part.tensors.items():
            if name in self.tensors:
                raise _damaged(
                    part.path, f"it has the tensor {name!r}, as another part of {self.path} has"
                )
            self.tensors[name], self._of_parts[name] = info, part

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_number or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.error(
                f"its general.alignment is {alignment!r}; expected a power of 2 up to "
                f"{_MAX_ALIGNMENT}"
            )
        return alignment

    def _read_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, TensorInfo]:
        alignment = self._alignment(cursor)
        entries: dict[str, tuple[tuple[int, ...], torch.dtype | str, int, int]] = {}
        for i in range(num_tensors):
            name = cursor.text(f"the name of tensor {i}")
            if name in entries:
                raise cursor.error(f"it has two tensors {name!r}; expected one")
            num_dims = cursor.number("I", f"tensor {name!r}")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise cursor.error(f"tensor {name!r} has {num_dims} dimensions; expected 1 to 4")
            shape = cursor.numbers(f"<{num_dims}Q", f"tensor {name!r}")[::-1]
            kind, offset = cursor.numbers("<IQ", f"tensor {name!r}")
            if offset % alignment:
                raise cursor.error(
                    f"tensor {name!r} is at {offset}; expected a multiple of {alignment}"
                )
            entries[name] = shape, *self._size_of(cursor, name, shape, kind), offset
        begin = -(-cursor.at // alignment) * alignment
        tensors = {}
        for name, (shape, kind, size, offset) in entries.items():
            cursor.at = min(begin + offset, len(cursor.data))
            at = cursor.skip(size, f"tensor {name!r} of shape {list(shape)}")
            tensors[name] = TensorInfo(shape, kind, at, at + size)
        return tensors

    def _size_of(
        self, cursor: _Cursor, name: str, shape: tuple[int, ...], number: int
    ) -> tuple[torch.dtype | str, int]:
        """Return the kind of a tensor, and its bytes."""
        if min(shape) < 1 or math.prod(shape) >= 1 << 62:
            raise cursor.error(
                f"tensor {name!r} has shape {list(shape)}; expected numbers of at least 1, and "
                "fewer than 2^62 elements"
            )
        if number in _FLOATS:
            return _FLOATS[number], math.prod(shape) * _FLOATS[number].itemsize
        if number not in _BLOCKS:
            expected = ", ".join(("F32", "F16", "BF16", *_BLOCKS.values()))
            found = _OTHERS.get(number, f"of number {number}")
            raise cursor.error(
                f"tensor {name!r} is of the type {found}; expected one of {expected}"
            )
        kind = _BLOCKS[number]
        block_size, block_bytes, *_ = KINDS[kind]
        if shape[-1] % block_size:
            raise cursor.error(
                f"tensor {name!r} has rows of {shape[-1]} elements; expected a multiple of "
                f"{block_size}, as its type is {kind}"
            )
        return kind, math.prod(shape) // block_size * block_bytes

    def _check_overlaps(self) -> None:
        end, before = 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if info.begin < end:
                raise _damaged(self.path, f"tensors {before!r} and {name!r} overlap; expected none")
            end, before = info.end, name

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def without_tensors(self) -> bytes:
        """Return a GGUF file with the metadata alone, which is whole."""
        data = bytearray(bytes_of(self._memory)[: self._end_of_metadata])
        data[8:16] = bytes(8)
        if _COUNT_OF_PARTS in self.metadata:
            data[self._place_of_count] = bytes(len(data[self._place_of_count]))
        return bytes(data)

    def tensor(self, name: str) -> Tensor | QuantizedWeight:
        """Return a tensor of the file, without a copy: floats, or a matrix in blocks.

        Raises KeyError for an unknown name, ValueError for blocks that are no matrix.
        """
        if name in self._of_parts:
            return self._of_parts[name].tensor(name)
        info = self.tensors[name]
        data = self._memory[info.begin : info.end]
        if isinstance(info.kind, torch.dtype):
            if data.storage_offset() % info.kind.itemsize:
                data = data.clone()  # an alignment of less than an element
            return data.view(info.kind).view(info.shape)
        if len(info.shape) != 2:
            raise _damaged(
                self.path,
                f"tensor {name!r} in blocks has shape {list(info.shape)}; expected a matrix",
            )
        return QuantizedWeight(data.view(info.shape[0], -1), info.kind)

    def matrix(self, name: str, index: int) -> Tensor | QuantizedWeight:
        """Return a matrix of a tensor of three dimensions, without a copy: see ``tensor``."""
        if name in self._of_parts:
            return self._of_parts[name].matrix(name, index)
        info = self.tensors[name]
        count, rows, _ = info.shape
        size = (info.end - info.begin) // count
        data = self._memory[info.begin + index * size : info.begin + (index + 1) * size]
        if isinstance(info.kind, torch.dtype):
            if data.storage_offset() % info.kind.itemsize:
                data = data.clone()
            return data.view(info.kind).view(info.shape[1:])
        return QuantizedWeight(data.view(rows, -1), info.kind)
