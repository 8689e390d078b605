"""``Trie``: the token sequences that a search may generate, and their file."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_count, dtype_name, is_int, type_error
from lmdecode._ops import ops
from lmdecode._upload import uploaded

__all__ = ["Trie"]

_MAGIC = b"lmdtrie\0"
_VERSION = 1
# Magic, version, CRC-32 of the arrays, nodes, sequences, largest token, longest sequence; then
# the CRC-32 of all that, and zeros up to the size. Little-endian.
_HEADER = struct.Struct("<8sIIqqqq")
_HEADER_CRC = struct.Struct("<I")
_HEADER_SIZE = 64


class TrieArrays(NamedTuple):
    """A trie as tensors on the CPU, the form of csrc/beam/token_trie.h.

    ``tokens`` [nodes] int32 lead to each node (-1 for the root), ``child_begin`` is [nodes + 1]
    int32, and ``ends`` [nodes] uint8 is 1 where a sequence ends.
    """

    tokens: Tensor
    child_begin: Tensor
    ends: Tensor
    num_sequences: int
    max_token: int
    longest: int

    @classmethod
    def of(cls, tokens: Tensor, child_begin: Tensor, ends: Tensor) -> TrieArrays:
        """Return the arrays with the numbers that follow from them."""
        # A level of the trie is the children of the one before; levels are consecutive.
        depth, last = 0, 1
        while (next_last := int(child_begin[last])) > last:
            last, depth = next_last, depth + 1
        num_sequences = int(ends.sum(dtype=torch.int64))
        return cls(tokens, child_begin, ends, num_sequences, int(tokens.max()), depth)


def _sizes(nodes: int) -> tuple[int, int, int]:
    """Return the bytes of child_begin, tokens and ends, as they follow each other in the file."""
    return 4 * (nodes + 1), 4 * nodes, nodes


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which has to outlive it."""
    kind = ctypes.c_char * (tensor.numel() * tensor.element_size())
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def write_trie(path: Path, trie: TrieArrays) -> None:
    """Write a trie under another name, then put it in its place."""
    parts = [_bytes_of(tensor) for tensor in (trie.child_begin, trie.tokens, trie.ends)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    header = _HEADER.pack(
        _MAGIC, _VERSION, checksum, len(trie.tokens), trie.num_sequences, trie.max_token,
        trie.longest,
    )  # fmt: skip
    header += _HEADER_CRC.pack(zlib.crc32(header))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header.ljust(_HEADER_SIZE, b"\0"))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"Trie.load: {path} {what}; expected a file that Trie.save wrote")


def read_trie(path: Path) -> TrieArrays:
    """Map a trie; raise ValueError for another or a damaged file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_SIZE:
            raise _damaged(path, f"has {size} bytes, less than a header")
        # A private mapping: torch wants memory that could be written to.
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    magic, version, checksum, nodes, *numbers = _HEADER.unpack_from(memory)
    if magic != _MAGIC:
        raise _damaged(path, f"begins with {magic!r}")
    if version != _VERSION:
        raise _damaged(path, f"has version {version}, and this is version {_VERSION}")
    (of_header,) = _HEADER_CRC.unpack_from(memory, _HEADER.size)
    rest = memory[_HEADER.size + _HEADER_CRC.size : _HEADER_SIZE]
    if zlib.crc32(memory[: _HEADER.size]) != of_header or any(rest):
        raise _damaged(path, "has a damaged header")
    sizes = _sizes(nodes)
    if nodes < 1 or size != _HEADER_SIZE + sum(sizes):
        raise _damaged(path, f"has {size} bytes for {nodes} nodes")
    with memoryview(memory) as whole:
        if zlib.crc32(whole[_HEADER_SIZE:]) != checksum:
            raise _damaged(path, "does not fit its checksum")
    tensors, begin = [], _HEADER_SIZE
    for bytes_, dtype, width in zip(
        sizes, (torch.int32, torch.int32, torch.uint8), (4, 4, 1), strict=True
    ):
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=bytes_ // width, offset=begin))
        begin += bytes_
    child_begin, tokens, ends = tensors
    return TrieArrays(tokens, child_begin, ends, *numbers)


_OP = "Trie"


class Trie:
    """A set of token sequences, to which searches can be constrained.

    A search with a trie generates one of its sequences after the prompt, as in generative
    recommendation from a catalogue of items. The children of a node are contiguous and ascending by
    token, so a step of a search reads only the tokens that may follow: docs/reference/trie.md.

    Parameters
    ----------
    sequences : iterable of sequences of int, or Tensor
        The allowed sequences, each at least one token, and with the end token at its end if the
        search has one. Duplicates count once. A tensor has integers ``[sequences, longest]``, with
        -1 after the end of each.

    Raises
    ------
    ValueError, TypeError
        Names the sequence that is empty, or the token that is invalid.

    Examples
    --------
    >>> trie = Trie([[5, 7, 2], [5, 9, 2], [6, 2]])
    >>> len(trie), [5, 9, 2] in trie, [5, 9] in trie
    (3, True, False)
    >>> trie.allowed([5])
    tensor([7, 9])
    """

    def __init__(self, sequences: Iterable[Sequence[int] | Tensor] | Tensor) -> None:
        if isinstance(sequences, Tensor):
            tokens, offsets = _of_matrix(sequences)
        else:
            tokens, offsets = _of_lists(sequences)
        self._take(_build(tokens, offsets))

    @classmethod
    def from_flat(cls, tokens: Tensor, offsets: Tensor) -> Trie:
        """Build a trie from concatenated sequences, which is the fastest way.

        Parameters
        ----------
        tokens : Tensor
            [n] integers.
        offsets : Tensor
            [sequences + 1] integers: sequence i is ``tokens[offsets[i]:offsets[i + 1]]``.

        Raises
        ------
        ValueError, TypeError
            As the class.
        """
        trie = cls.__new__(cls)
        trie._take(_build(_integers("tokens", tokens, 1), _integers("offsets", offsets, 1)))
        return trie

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trie:
        """Load a trie that ``save`` wrote; its file is mapped, so processes share it.

        The file must not change while the trie is in use. It is read once to verify its checksum.

        Raises
        ------
        OSError
            It cannot be read.
        ValueError
            It is not a trie, of another version, truncated or damaged.
        """
        trie = cls.__new__(cls)
        trie._take(read_trie(Path(path)))
        return trie

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trie; an existing file is replaced once this one is written completely.

        Raises
        ------
        OSError
            It cannot be written.
        """
        write_trie(Path(path), self._arrays)

    def _take(self, arrays: TrieArrays, tensors: tuple[Tensor, Tensor] | None = None) -> None:
        self._arrays = arrays
        self._tensors = (arrays.tokens, arrays.child_begin) if tensors is None else tensors

    @property
    def device(self) -> torch.device:
        """Device of ``tensors`` and of the tensors of ``step``: the CPU, unless moved."""
        return self._tensors[0].device

    def to(self, device: torch.device | str) -> Trie:
        """Return the trie for searches on a device; itself if it is already there.

        ``tensors`` are copied, 8 bytes per node, and live as long as the returned trie: keep it for
        all searches. Queries and ``save`` use the host's memory, or the mapped file, which both
        tries share.

        Parameters
        ----------
        device : torch.device or str
            "cpu" or a CUDA device (emulated, not yet run on a GPU).

        Raises
        ------
        ValueError
            It is not a device.
        """
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"{_OP}.to: device is {device!r}; expected a torch.device") from None
        if target.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{_OP}.to: device is {target}; expected one that is there")
        if target.type == "cpu":
            tensors = (self._arrays.tokens, self._arrays.child_begin)
        else:
            tokens, begins = self._tensors
            tensors = (tokens.to(target), begins.to(target))
        if tensors[0] is self._tensors[0]:
            return self
        moved = type(self).__new__(type(self))
        moved._take(self._arrays, tensors)
        return moved

    # ---- what it holds

    def __len__(self) -> int:
        """Return the number of sequences, equal ones counted once."""
        return self._arrays.num_sequences

    def __repr__(self) -> str:
        return f"Trie({len(self)} sequences, {self.num_nodes} nodes)"

    def __contains__(self, sequence: object) -> bool:
        """Whether this is one of the complete sequences."""
        node = self._node_of("sequence", sequence)
        return node >= 0 and bool(self._arrays.ends[node])

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the sequences, in ascending order, a sequence before those it begins."""
        begins, path = self._arrays.child_begin, list[int]()
        stack: list[tuple[int, int]] = [(0, 0)]
        while stack:
            node, depth = stack.pop()
            if node:
                path[depth - 1 :] = [int(self._arrays.tokens[node])]
            if self._arrays.ends[node]:
                yield list(path)
            first, last = int(begins[node]), int(begins[node + 1])
            stack += [(child, depth + 1) for child in range(last - 1, first - 1, -1)]

    @property
    def num_nodes(self) -> int:
        """Number of distinct prefixes of the sequences, including the empty one."""
        return len(self._arrays.tokens)

    @property
    def longest(self) -> int:
        """Length of the longest sequence: no search needs more ``max_new_tokens``."""
        return self._arrays.longest

    @property
    def max_token(self) -> int:
        """The largest token; -1 for an empty trie."""
        return self._arrays.max_token

    @property
    def nbytes(self) -> int:
        """Size in bytes, in memory or of its file."""
        arrays = (self._arrays.tokens, self._arrays.child_begin, self._arrays.ends)
        return sum(tensor.numel() * tensor.element_size() for tensor in arrays)

    def allowed(self, prefix: Sequence[int] | Tensor = ()) -> Tensor:
        """Return the tokens that may follow a prefix.

        Parameters
        ----------
        prefix : sequence of int or Tensor
            Generated tokens, without the prompt.

        Returns
        -------
        Tensor
            [n] int64, ascending. Empty if the prefix is a complete sequence that no other one
            continues, or if no sequence begins with it.
        """
        node = self._node_of("prefix", prefix)
        if node < 0:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        first, last = self._arrays.child_begin[node : node + 2].tolist()
        return self._arrays.tokens[first:last].to(torch.int64)

    def after(self, prompt_length: int) -> Callable[[int, Tensor], list[int]]:
        """Return a ``prefix_allowed_tokens_fn`` for transformers' own ``generate()``.

        ``beam_search``, ``Decoding`` and requests take the trie itself, and are faster.
        transformers wants a token where nothing may follow: there it is the one that came last on
        the trie, the end token.

        Parameters
        ----------
        prompt_length : int
            Tokens of the prompt, with its padding; of the decoder's with an encoder-decoder model.
        """
        return PrefixTokens(self, check_count(f"{_OP}.after", "prompt_length", prompt_length, 0))

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        """Raise TypeError: transformers' own loops do not say where the prompt ends."""
        raise TypeError(
            f"{_OP}: prefix_allowed_tokens_fn is a Trie; expected custom_generate=beam_search of "
            "lmdecode.integrations.transformers beside it, or trie.after(prompt_length)"
        )

    # ---- for searches

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Input of the ops: tokens [nodes] and child_begin [nodes + 1], int32. Read-only."""
        return self._tensors

    def step(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Return the nodes that tokens lead to.

        Parameters
        ----------
        nodes : Tensor
            [n] int32 on the device of the trie; 0 is the root, below 0 no node.
        tokens : Tensor
            [n] int64, likewise.

        Returns
        -------
        Tensor
            [n] int32, -1 if no sequence continues with the token.

        Raises
        ------
        ValueError
            Names the tensor of another shape, dtype or device.
        """
        for name, value in (("nodes", nodes), ("tokens", tokens)):
            if not isinstance(value, Tensor):
                raise type_error(f"{_OP}.step", name, value, "a tensor [n]")
        return ops.trie_step(*self.tensors, nodes, tokens)

    def goes_on(self, nodes: Tensor) -> Tensor:
        """Return [n] bool: whether any token may follow these nodes, [n] int32."""
        begins, at = self._tensors[1], nodes.clamp(min=0).to(torch.int64)
        return (nodes >= 0) & (begins[at + 1] > begins[at])

    def nodes_of(self, sequences: Tensor) -> Tensor:
        """Return the nodes, [n] int32, of what the rows of a tensor have generated.

        Parameters
        ----------
        sequences : Tensor
            [n, length] integers, on the device of the trie; length 0 is the root.

        Raises
        ------
        ValueError, TypeError
            The tensor has another shape, dtype or device.
        """
        if not isinstance(sequences, Tensor):
            raise type_error(f"{_OP}.nodes_of", "sequences", sequences, "a tensor [n, length]")
        sequences = _integers("sequences", sequences, 2)
        nodes = torch.zeros(len(sequences), dtype=torch.int32, device=self.device)
        for column in sequences.unbind(1):
            nodes = self.step(nodes, column)
        return nodes

    def check_vocab(self, op: str, vocab_size: int) -> None:
        """Raise ValueError for tokens that a vocabulary does not have."""
        if self.max_token >= vocab_size:
            raise ValueError(
                f"{op}: trie has the token {self.max_token}; expected tokens below {vocab_size}, "
                "the size of the vocabulary"
            )

    def check_device(self, op: str, device: torch.device, of: str) -> None:
        """Raise ValueError for a trie on another device than its companion ``of``."""
        here = self.device
        if here.type != device.type or device.index not in (None, here.index):
            raise ValueError(
                f"{op}: trie is on {here}; expected {of}, {device}: trie.to({str(device)!r})"
            )

    def _node_of(self, name: str, sequence: object) -> int:
        if not isinstance(sequence, (Tensor, Sequence)) or isinstance(sequence, (str, bytes)):
            raise type_error(_OP, name, sequence, "a sequence of ints or a tensor")
        if isinstance(sequence, Tensor):
            sequence = _integers(name, sequence, 1).tolist()
        if not all(map(is_int, sequence)):
            place = next(i for i, token in enumerate(sequence) if not is_int(token))
            raise type_error(_OP, f"{name}[{place}]", sequence[place], "an int")
        if not all(0 <= token < 1 << 31 for token in sequence):
            return -1
        tokens = torch.tensor([list(sequence)], dtype=torch.int64, device="cpu")
        return int(self.to("cpu").nodes_of(tokens)[0])


class PrefixTokens:
    """A ``prefix_allowed_tokens_fn`` that applies a trie after ``prompt_length`` tokens."""

    def __init__(self, trie: Trie, prompt_length: int) -> None:
        self.trie, self.prompt_length = trie, prompt_length

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        """Return the tokens that may follow, or the last one where none may."""
        return self._following(input_ids).tolist()

    def bitmask(self, input_ids: Tensor) -> Tensor:
        """Return the same for rows [n, length]: [n, words] int32, as ``Sampler`` takes it.

        Tokens beyond its last word do not follow.
        """
        words = torch.zeros(
            len(input_ids), self.trie.max_token // 32 + 1, dtype=torch.int64, device="cpu"
        )
        for row, ids in zip(words, input_ids, strict=True):
            tokens = self._following(ids)
            row.index_add_(0, tokens // 32, torch.ones_like(tokens) << tokens % 32)
        return words.to(torch.int32)

    def _following(self, input_ids: Tensor) -> Tensor:
        generated: list[int] = input_ids[self.prompt_length :].tolist()
        while True:
            allowed = self.trie.allowed(generated)
            if len(allowed) or not generated:
                return allowed
            if self.trie._node_of("prefix", generated) >= 0:
                return torch.tensor(generated[-1:], dtype=torch.int64, device="cpu")
            generated.pop()


def _build(tokens: Tensor, offsets: Tensor) -> TrieArrays:
    try:
        return TrieArrays.of(*ops.trie_build(tokens, offsets))
    except ValueError as error:
        raise ValueError(str(error).replace("trie_build", _OP, 1)) from None


def _integers(name: str, tensor: object, rank: int) -> Tensor:
    """Return a tensor as contiguous int64 on the CPU; raise for other than integers."""
    if not isinstance(tensor, Tensor):
        raise type_error(_OP, name, tensor, "a tensor")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{_OP}: {name} has dtype {dtype_name(tensor)}; expected integers")
    if tensor.dim() != rank:
        raise ValueError(
            f"{_OP}: {name} has shape {list(tensor.shape)}; expected {rank} dimensions"
        )
    return tensor.detach().to(device="cpu", dtype=torch.int64).contiguous()


def _of_matrix(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and offsets of [n, longest], -1 after the end of each row."""
    rows = _integers("sequences", sequences, 2)
    is_token = rows != -1
    lengths = is_token.sum(dim=1)
    places = torch.arange(rows.shape[1], device="cpu")
    ragged = (is_token != (places < lengths[:, None])).any(dim=1)
    if bool(ragged.any()):
        row = int(ragged.nonzero()[0])
        raise ValueError(
            f"{_OP}: sequence {row} is {rows[row].tolist()}; expected -1 behind its end alone"
        )
    return rows[is_token], torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _of_lists(sequences: object) -> tuple[Tensor, Tensor]:
    """Return tokens and offsets of sequences of ints."""
    if not isinstance(sequences, Iterable) or isinstance(sequences, (str, bytes)):
        raise type_error(_OP, "sequences", sequences, "sequences of ints, or a tensor")
    items: list[Any] = list(sequences)
    if not all(type(item) is list or type(item) is tuple for item in items):
        items = [_as_list(number, item) for number, item in enumerate(items)]
    if set(map(type, itertools.chain.from_iterable(items))) - {int}:
        items = [
            [_token(number, place, token) for place, token in enumerate(item)]
            for number, item in enumerate(items)
        ]
    try:
        tokens = array("q", itertools.chain.from_iterable(items))
    except OverflowError:
        number, place = next(
            (number, place)
            for number, item in enumerate(items)
            for place, token in enumerate(item)
            if not -(1 << 63) <= token < 1 << 63
        )
        raise ValueError(
            f"{_OP}: token {place} of sequence {number} is {items[number][place]}; expected 0 to "
            "2^31 - 1"
        ) from None
    offsets = array("q", itertools.accumulate(map(len, items), initial=0))
    return _tensor(tokens), _tensor(offsets)


def _tensor(values: array[int]) -> Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(values, dtype=torch.int64)


def _as_list(number: int, item: object) -> list[Any]:
    if isinstance(item, Tensor):
        return _integers(f"sequence {number}", item, 1).tolist()
    if hasattr(item, "__array__") and hasattr(item, "tolist"):
        item = item.tolist()
    if not isinstance(item, Sequence) or isinstance(item, (str, bytes)):
        raise type_error(_OP, f"sequence {number}", item, "a sequence of ints")
    return list(item)


def _token(number: int, place: int, token: Any) -> int:
    if not is_int(token):
        raise type_error(_OP, f"token {place} of sequence {number}", token, "an int")
    return int(token)


def tensors_of_tries(
    tries: Sequence[Trie | None], device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Return the tries of rows of rules as the ops take them, on a device.

    The list is empty without a trie. Else it has the number of each row's trie or -1, [rows] int64,
    then the tokens and ``child_begin`` of each trie.
    """
    used = {id(trie): trie for trie in tries if trie is not None}
    if not used:
        return []
    numbers = {key: number for number, key in enumerate(used)}
    of_rows = uploaded([numbers.get(id(trie), -1) for trie in tries], torch.int64, device)
    tensors = (trie.to(device).tensors for trie in used.values())
    return [of_rows, *itertools.chain.from_iterable(tensors)]
