"""Keys and values of a decoder-only model's sequences, in blocks that sequences share."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode._ops import ops
from lmdecode.models.configs import Heads
from lmdecode.models.huge_memory import new_memory
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.sampling.sampler import DrawingRows

__all__ = [
    "BLOCK_SIZE",
    "CACHE_DTYPES",
    "CHECKPOINT_INTERVAL",
    "KEPT_SEQUENCES",
    "MOST_REQUESTS",
    "CacheParts",
    "CausalCaches",
    "check_sizes_of_batch",
    "row_format",
]


CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALE_BYTES = 4  # before each key and value of int8


def row_format(head_size: int, dtype: str) -> tuple[torch.dtype, int]:
    """Return the dtype and number of elements that hold a key or value of one head."""
    kind = CACHE_DTYPES[dtype]
    return kind, head_size + (_SCALE_BYTES if kind == torch.int8 else 0)


class CacheParts(NamedTuple):
    """The shape of a part: [kv_heads, tokens, row_size].

    A layer's part has some of its heads and a slice of their rows. If ``row_size`` does not divide
    a row, its last slice is narrower and padded with zeros. If all layers have the same heads, each
    layer is one part.
    """

    kv_heads: int
    row_size: int

    @staticmethod
    def of(heads: Sequence[Heads], dtype: str) -> CacheParts:
        """Return the parts of layers with such heads, in caches of a dtype."""
        return CacheParts(
            math.gcd(*(one.num_kv_heads for one in heads)),
            min(row_format(one.head_size, dtype)[1] for one in heads),
        )

    def number_of(self, heads: Heads, dtype: str) -> int:
        """Return how many parts a layer with such heads has."""
        _, size = row_format(heads.head_size, dtype)
        return heads.num_kv_heads // self.kv_heads * -(-size // self.row_size)

    def cut(self, pool: Tensor) -> Iterator[Tensor]:
        """Yield the parts of [num_kv_heads, ..., elements of a row], as views."""
        for rows in pool.split(self.kv_heads):
            yield from rows.split(self.row_size, dim=-1)


BLOCK_SIZE = 32  # positions of a block, which the attention of a step reads at once
# Tokens between two kept states of a sequence that may go back.
CHECKPOINT_INTERVAL = 256
KEPT_SEQUENCES = 64  # that need no slot, where a budget of bytes keeps them in bounds
MOST_REQUESTS = 1 << 16  # of a batch


def check_sizes_of_batch(
    op: str, longest: int | None, max_requests: int, capacity: int, max_step_tokens: int
) -> tuple[int, int, int]:
    """Return the checked sizes of a batch of sequences; raises ValueError or TypeError.

    ``longest`` is the most positions that the model has.
    """
    most = longest or (1 << 30)
    return (
        check_int(op, "max_requests", max_requests, 1, MOST_REQUESTS, limits="1 to 65536"),
        check_int(op, "capacity", capacity, 1, most, limits=f"1 to {most}"),
        check_int(op, "max_step_tokens", max_step_tokens, 1, 1 << 20, limits="1 to 2^20"),
    )


def _spans(first: int, length: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield, for positions from the first on, a block, those in it, and where they stand here."""
    for block in range(first // BLOCK_SIZE, -(-length // BLOCK_SIZE)):
        at = block * BLOCK_SIZE
        low, high = max(first, at), min(length, at + BLOCK_SIZE)
        yield block, slice(low - at, high - at), slice(low - first, high - first)


class CausalCaches:
    """The caches of up to ``sequences`` sequences, and the steps that a model does on them.

    Memory is reserved for ``max_length`` positions each, and taken from the system as sequences
    grow. Layers with a window keep only what it needs. Sequences that continue the same one share
    its positions. Longer steps are split into ``max_rows`` tokens.

    With ``dtype`` "int8", keys and values are whole multiples of a 127th of the largest magnitude
    of each. A sequence can always go back by ``rollback`` positions, which windows and states keep
    in addition. With states it can also go back to the end of its prompt, to the token before that,
    and to the last two whole multiples of ``checkpoint_interval``, of 4 times, of 16 times it and
    so on; 0: to none of these.

    ``most_bytes`` is what all sequences shall have together; the caller keeps to it, by
    ``used_bytes`` and ``bytes_for``. There are then ``KEPT_SEQUENCES`` more than ``sequences``.

    ``lengths``, [sequences] int32, are the positions that each sequence has; it is read-only.
    """

    def __init__(
        self,
        model: PackedCausalModel,
        sequences: int,
        max_length: int,
        *,
        dtype: str = "float32",
        max_rows: int = 512,
        rollback: int = 0,
        checkpoint_interval: int = 0,
        most_bytes: int | None = None,
    ) -> None:
        self._config = model.config
        self._windows = [window + rollback if window else 0 for window in model.cache_windows]
        self.model, self.max_rows, self.most_bytes = model, max_rows, most_bytes
        if most_bytes is not None:
            sequences += KEPT_SEQUENCES
        self.sequences, self.max_length = sequences, max_length
        self.rollback, self._interval = rollback, checkpoint_interval
        max_blocks = -(-max_length // BLOCK_SIZE)
        self._tensors: list[Tensor] = []
        self._most_blocks: list[int] = []  # of a sequence, by cache
        self._parts = CacheParts.of(model.cache_heads, dtype)
        of_caches = zip(self._windows, model.cache_layers, model.cache_heads, strict=True)
        for window, layers, heads in of_caches:
            kind, row_size = row_format(heads.head_size, dtype)
            of_sequence = max_blocks
            if window:  # a step's rows beside the window, each end anywhere within a block
                of_sequence = min(of_sequence, -(-(window + max_rows) // BLOCK_SIZE) + 2)
            self._most_blocks.append(of_sequence)
            num_blocks, block = sequences * of_sequence, (layers, 2, heads.num_kv_heads, BLOCK_SIZE)
            if most_bytes is not None:  # a caller may be wrong by a sequence
                bytes_ = math.prod(block) * row_size * kind.itemsize
                num_blocks = min(num_blocks, most_bytes // bytes_ + of_sequence)
            if num_blocks >= 1 << 31:
                raise ValueError(
                    f"Decoding: {sequences} sequences of {max_length} tokens take {num_blocks} "
                    f"blocks of {BLOCK_SIZE}; expected fewer than 2^31"
                )
            shape = (layers, 2, heads.num_kv_heads, num_blocks, BLOCK_SIZE, row_size)
            bytes_ = torch.Size(shape).numel() * kind.itemsize
            counters = torch.zeros(3, dtype=torch.int32, device="cpu")
            counters[0] = num_blocks
            self._tensors += [
                self._reserved(bytes_).view(kind).view(shape),
                torch.full((sequences, max_blocks), -1, dtype=torch.int32, device="cpu"),
                torch.zeros(sequences, dtype=torch.int32, device="cpu"),
                torch.zeros(num_blocks, dtype=torch.int32, device="cpu"),
                # The first ones are taken first.
                torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device="cpu"),
                counters,
            ]
        self.lengths = self._tensors[2]
        self._states = self._state_tensors()
        self._tensors += self._states
        self._pools = list(self._sizes_of_pools())
        self._bytes_of_row = self.bytes_for([BLOCK_SIZE])
        size = int(ops.causal_workspace_bytes(model.memory, [max_rows, sequences, max_blocks]))
        memory = model.spare_memory.take(size)
        self._workspace = memory[:size]
        give_back = weakref.finalize(self, model.spare_memory.give, memory)
        give_back.atexit = False

    def _most_states(self, length: int) -> int:
        """Return the maximum number of states of a sequence of so many tokens."""
        step, kept = self._interval, 1 + self.rollback
        if step:
            kept += 2
            while step <= length:
                kept, step = kept + 2, 4 * step
        return kept

    def _state_tensors(self) -> list[Tensor]:
        """Return the tensors of states, which csrc/kv_cache/state_slots.h explains; none: none."""
        size = self.model.state_size
        if size == 0:
            return []
        # States before and after a step: slots are taken before others are freed.
        rows, kept = self.sequences, 2 * self._most_states(self.max_length)
        slots = rows * kept
        if self.most_bytes is not None:
            slots = min(slots, self.most_bytes // (4 * size) + kept)
        whole = {"dtype": torch.int32, "device": "cpu"}
        counters = torch.zeros(3 + rows, **whole)  # type: ignore[call-overload]
        counters[:3] = torch.tensor([slots, self.rollback, self._interval], device="cpu")
        return [
            self._reserved(4 * slots * size).view(torch.float32).view(slots, size),
            torch.zeros((rows, kept), dtype=torch.int32, device="cpu"),
            torch.full((rows, kept), -1, dtype=torch.int32, device="cpu"),
            torch.zeros(slots, dtype=torch.int32, device="cpu"),
            # The first ones are taken first.
            torch.arange(slots - 1, -1, -1, dtype=torch.int32, device="cpu"),
            counters,
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, used or not, with scratch."""
        return sum(tensor.nbytes for tensor in self._tensors) + self._workspace.nbytes

    def _sizes_of_pools(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield of each pool the bytes of a block, their number, those of sequences, and counters.

        A state is a block of the last pool, if there are states.
        """
        paged = 6 * len(self._windows)
        for at in range(0, len(self._tensors), 6):
            pool, blocks = self._tensors[at], self._tensors[at + (1 if at < paged else 2)]
            number = pool.shape[3 if at < paged else 0]
            yield pool.nbytes // number, number, blocks, self._tensors[at + 5]

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys, values and states of all sequences."""
        return sum(size * (number - int(counters[0])) for size, number, _, counters in self._pools)

    def bytes_held_by(self, sequences: Sequence[int]) -> int:
        """Return the bytes of some sequences' keys, values and states; shared ones count once."""
        rows = torch.tensor(sequences, dtype=torch.int64, device="cpu")
        return sum(
            size * int((blocks[rows].unique() >= 0).sum()) for size, _, blocks, _ in self._pools
        )

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the most bytes that new sequences of such lengths have."""
        total = 4 * self.model.state_size * sum(map(self._most_states, lengths))
        for most, (size, *_) in zip(self._most_blocks, self._pools, strict=False):
            total += size * sum(min(most, -(-length // BLOCK_SIZE)) for length in lengths)
        return total

    def bytes_to_append(self, places: Sequence[int], counts: Sequence[int]) -> int:
        """Return the bytes that sequences take which get so many tokens in a step."""
        rows, added = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in (places, counts))
        lengths, total = self.lengths[rows], 0
        new = (lengths + added + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        new -= (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        for cache, (size, _, blocks, _) in zip(
            range(len(self._windows)), self._pools, strict=False
        ):
            # A block that others have, too, is copied before it is written.
            last = blocks[rows, ((lengths - 1) // BLOCK_SIZE).clamp(min=0)].clamp(min=0)
            is_shared = (lengths % BLOCK_SIZE > 0) & (self._tensors[6 * cache + 3][last] > 1)
            total += size * int((new + is_shared).sum())
        if self._states:
            most, every = self._most_states(self.max_length), self._interval or self.max_length
            states = sum(min(most, 3 + self.rollback + 2 * n // every) for n in counts)
            total += 4 * self.model.state_size * states
        return total

    def has_room_for(self, rows: int, tokens: int) -> bool:
        """Whether a step of so many rows and tokens needs no look at its ``bytes_to_append``."""
        assert self.most_bytes is not None
        size = self._bytes_of_row * (2 * rows + tokens // BLOCK_SIZE)
        return self.used_bytes + size <= self.most_bytes

    @property
    def is_plain(self) -> bool:
        """Whether a sequence can go back to any length."""
        return not self._states and not any(self._windows)

    def reachable(self, sequence: int, length: int) -> int:
        """Return the longest length, at most ``length``, with a state that a sequence keeps.

        Where no layer keeps a state it is ``length``; a window may be in the way all the same.
        """
        if not self._states:
            return length
        positions = self._states[1][sequence]
        return int(positions[positions <= length].max())

    def _reserved(self, size: int) -> Tensor:
        try:
            # Much of it may never be used: the first byte would take a whole page of 2 MB.
            return new_memory(size, huge_pages=False)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"Decoding: {self.sequences} sequences of {self.max_length} tokens need {size} "
                f"bytes of addresses for keys and values: {error}"
            ) from error

    @property
    def _of_step(self) -> tuple[Any, ...]:
        """The arguments of the ops that run the model, before the tokens."""
        model = self.model
        return (model.memory, self._tensors, self._windows, self._workspace)

    def forward(
        self,
        tokens: Tensor,
        entries: Tensor,
        num_logits: int,
        *,
        hidden_in: Tensor | None = None,
        hidden_out: Tensor | None = None,
    ) -> Tensor:
        """Append tokens, [n] int64, to sequences; return [num_logits, V] float32 logits.

        ``entries``, [m, 4] int64, are the sequence (each at most once), its number of tokens,
        whether they are of a prompt, and after how many of its last tokens logits are wanted.
        ``tokens`` are the concatenation of the entries' tokens. ``hidden_in``, [n, model_size]
        float32, is for a model with ``hidden_projection``: another model's rows of the tokens
        before. ``hidden_out``, of the same shape, receives the output of the final norm for all
        tokens.
        """
        logits: Tensor = ops.causal_forward_(
            *self._of_step,
            tokens,
            entries,
            num_logits,
            self._config.vocab_size,
            self.max_rows,
            hidden_in,
            hidden_out,
        )
        return logits

    def steps(
        self,
        entries: Tensor,
        tokens: Tensor,
        rows: DrawingRows,
        *,
        ends: Tensor,
        chosen: Tensor,
        seconds: float,
    ) -> int:
        """Run steps in C++: read a token of each entry, choose the next, read it; return how many.

        ``tokens``, [rows] int64, are the first to be read, by ``entries`` of one token each. The
        step in which a row chooses one of its ``ends``, [rows, n] int64 (-1: none), or fails, is
        the last, or the first that ends after so many seconds. ``chosen``, [steps, rows] int64,
        receives the tokens.
        """
        steps = ops.causal_steps_(
            *self._of_step, tokens, entries, self.max_rows, *rows, ends, chosen, seconds
        )
        return int(steps)

    def reorder(self, parents: Tensor) -> None:
        """Let sequence i go on as sequence ``parents[i]``, [sequences] int64; nothing is copied."""
        ops.causal_caches_reorder_(self._tensors, self._windows, parents)

    def truncate(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Let sequences go back to lengths; 0 frees a place.

        Raises ValueError, and changes nothing, if a layer's window or state is not kept for a
        length. ``reachable`` returns the lengths that have a state.
        """
        changes = torch.tensor([sequences, lengths], dtype=torch.int64, device="cpu").T.contiguous()
        ops.causal_caches_truncate_(self._tensors, self.model.cache_windows, changes)

    def read(self, sequence: int, begin: int = 0) -> list[tuple[Tensor, ...]]:
        """Copy the keys and values of a sequence from position ``begin`` on.

        Returns (keys, values) of each layer, [kv_heads, n, head_size], with rotated keys. A layer
        with a window has at most the last window - 1 positions, which following tokens attend to.
        int8 caches are returned as raw bytes, uint8. Layers with a state, or with another layer's
        keys, have no pair; the last entry is then (state,), [state_size] float32. If layers have
        heads of two sizes, each pair is one of a layer's ``CacheParts``.
        """
        length = int(self.lengths[sequence])
        read = list[tuple[Tensor, ...]]()
        for parts, blocks, window in self._layers(sequence, length):
            first = begin if window is None else max(begin, length - window + 1)
            heads, _, _, size = parts[0].shape
            shape = (heads, length - first, self._parts.row_size)
            keys, values = (part.new_empty(shape) for part in parts)
            for states in (keys, values):
                states[..., size:] = 0
            for block, within, whole in _spans(first, length):
                for part, states in zip(parts, (keys, values), strict=True):
                    states[:, whole, :size] = part[:, blocks[block], within]
            read.append((keys, values))
        return read + self._read_state(sequence, length)

    def _state(self, sequence: int, length: int) -> Tensor:
        """Return a sequence's state after some tokens, [state_size], to read and write."""
        pool, positions, slots, *_ = self._states
        at = int((positions[sequence] == length).nonzero()[0])
        return pool[int(slots[sequence, at])]

    def _read_state(self, sequence: int, length: int) -> list[tuple[Tensor, ...]]:
        if not self._states:
            return []
        size = self.model.state_size
        if length:
            return [(self._state(sequence, length).clone(),)]
        return [(torch.zeros(size, dtype=torch.float32, device="cpu"),)]

    def _write_state(
        self, sequence: int, length: int, states: Iterator[tuple[Tensor, ...]]
    ) -> None:
        others = list(states)
        if len(others) != bool(self._states):
            raise ValueError(
                f"CausalCaches.write: states have {len(others)} entries behind those of layers "
                f"with attention; expected {int(bool(self._states))}"
            )
        if not others:
            return
        to, given = self._state(sequence, length), others[0][0]
        if given.shape != to.shape or given.dtype != to.dtype:
            raise ValueError(
                f"CausalCaches.write: the state has shape {list(given.shape)} and dtype "
                f"{given.dtype}; expected {list(to.shape)} and {to.dtype}"
            )
        to.copy_(given)

    def write(self, sequence: int, length: int, states: Iterable[tuple[Tensor, ...]]) -> None:
        """Fill an empty sequence with ``length`` >= 1 positions that were computed elsewhere.

        ``states`` is the result of ``read`` for these positions, from the same model with caches of
        the same dtype. With a window, the sequence may only be truncated to 0 afterwards: positions
        before the window were not written. Raises ValueError if the sequence is not empty, there is
        no room, or states have other sizes; the sequence is then empty as before.
        """
        start = torch.tensor([[sequence, length]], device="cpu")
        ops.causal_caches_start_(self._tensors, self._windows, start)
        try:
            states, layers = iter(states), self._layers(sequence, length)
            for layer, (parts, blocks, window) in enumerate(layers):
                if (pair := next(states, None)) is None:
                    raise ValueError(
                        f"CausalCaches.write: states have {layer} pairs, which is shorter than "
                        "expected: one of each part of a layer with attention"
                    )
                held = length if window is None else min(length, window - 1)
                for name, part, given in zip(("keys", "values"), parts, pair, strict=True):
                    shape = (part.shape[0], held, self._parts.row_size)
                    if given.shape != shape or given.dtype != part.dtype:
                        raise ValueError(
                            f"CausalCaches.write: {name} of layer {layer} have shape "
                            f"{list(given.shape)} and dtype {given.dtype}; expected {list(shape)} "
                            f"and {part.dtype}"
                        )
                    for block, within, whole in _spans(length - held, length):
                        part[:, blocks[block], within] = given[:, whole, : part.shape[3]]
            self._write_state(sequence, length, states)
        except BaseException:
            self.truncate([sequence], [0])
            raise

    def _layers(
        self, sequence: int, length: int
    ) -> Iterator[tuple[tuple[Tensor, Tensor], list[int], int | None]]:
        """Yield of each part (keys, values), [H, num_blocks, block, D], blocks and window."""
        used = -(-length // BLOCK_SIZE)
        tables = self._tensors[1 : 6 * len(self._windows) : 6]
        of_caches = [blocks[sequence, :used].tolist() for blocks in tables]
        places, c = self.model.cache_places, self._config
        for place, window, shared in zip(places, c.windows, c.shared_keys, strict=True):
            if place is None or shared is not None:
                continue  # a state, or keys of another layer
            cache, layer = place
            pool = self._tensors[6 * cache]
            if pool.dtype == torch.int8:
                pool = pool.view(torch.uint8)
            keys, values = map(self._parts.cut, pool[layer])
            for pair in zip(keys, values, strict=True):
                yield pair, of_caches[cache], window
