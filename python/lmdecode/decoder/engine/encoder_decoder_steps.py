"""The steps of an ``Engine`` for encoder-decoder models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmdecode._ops import ops
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.engine.request import DrawnSequence, WrittenSequence
from lmdecode.decoder.engine.rows import Ended, FollowingCaches, ReadRows, SearchedRows, StepLogits
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["EncoderDecoderSteps"]


class EncoderDecoderSteps:
    """``ModelSteps`` of an encoder-decoder model: a request has a place, with a row for each beam.

    A step reads the last token of every row. A request that has just been encoded reads its prompt
    before. Row ``place * num_beams + b`` of the caches belongs to beam b. The rows are the
    ``places`` of sequences.

    A row has at most ``capacity`` tokens, a memory at most ``source`` positions. Before a step at
    most ``max_step_tokens`` input positions are encoded; a longer input is encoded alone.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        *,
        max_requests: int,
        num_beams: int,
        capacity: int,
        source: int,
        max_step_tokens: int,
    ) -> None:
        self._num_beams, self._max_step_tokens = num_beams, max_step_tokens
        self.vocab_size = decoder.config.vocab_size
        self.sequences = max_requests * num_beams
        # A row at the capacity of the state is not read.
        state = self._state = new_beam_state(max_requests, num_beams, capacity + 1)
        state.done.fill_(1)
        self.searches = DecodingSearches(
            decoder,
            state,
            beam_parameters(max_requests, 1),
            new_token_rules(max_requests),
            source,
            num_candidates=1,
        )
        with torch.inference_mode(False):
            self._logits = torch.empty(
                self.sequences, self.vocab_size, device="cpu", dtype=torch.float32
            )
            self._grows = torch.zeros(max_requests, dtype=torch.int64, device="cpu")
        self._tokens = state.sequences.view(-1)
        self._free = list(range(max_requests - 1, -1, -1))
        self._encoded: list[WrittenSequence] = []  # by this step, of those that read
        self.reading: list[WrittenSequence] = []
        self.prompt_tokens, self.cached_tokens = 0, 0
        self._widths: dict[int, int] = {}  # number of rows of places with a search of several beams
        # The last step's rows, its rows of searches, and their last tokens.
        self._rows: Tensor | None = None
        self._searched: list[int] = []
        self._ends = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def caches(self) -> FollowingCaches:
        """See ``ModelSteps``."""
        return self

    @property
    def nbytes(self) -> int:
        """See ``ModelSteps``."""
        return self.searches.nbytes

    @property
    def num_free(self) -> int:
        """See ``ModelSteps``."""
        return len(self._free)

    def has_room(self, sequence: WrittenSequence) -> bool:
        """See ``ModelSteps``."""
        return bool(self._free)

    @property
    def used_bytes(self) -> int:
        """See ``ModelSteps``."""
        return self.nbytes

    def check_fits(self, sequence: WrittenSequence) -> None:
        """See ``ModelSteps``; each slot has its memory."""

    def has_memory(self, drawn: ReadRows, searched: SearchedRows) -> bool:
        """See ``ModelSteps``."""
        return True

    def begin(self, sequence: WrittenSequence) -> None:
        """See ``ModelSteps``."""
        first = self._free[-1] * self._num_beams
        sequence.places = list(range(first, first + sequence.num_beams))
        self._free.pop()  # an interrupted call leaves no place without an owner
        self.reading.append(sequence)

    def encode(self) -> list[Ended]:
        """See ``ModelSteps``."""
        failed, encoded, memories = list[Ended](), list[WrittenSequence](), list[Tensor]()
        positions = 0
        for sequence in tuple(self.reading):
            assert sequence.input is not None
            positions += sequence.input.positions
            if encoded and positions > self._max_step_tokens:
                break
            try:
                with torch.device("cpu"):
                    memory = sequence.input.encode()
            except Exception as error:
                self.reading.remove(sequence)
                failed.append(Ended(sequence, "error", error))
                continue
            sequence.input = None
            encoded.append(sequence)
            memories.append(memory)
        if encoded:
            lengths = torch.tensor([len(memory) for memory in memories], device="cpu")
            one = len(memories) == 1
            padded = memories[0][None] if one else pad_sequence(memories, batch_first=True)
            self.read_memories(encoded, padded, lengths)
        return failed

    def read_memories(
        self, sequences: Sequence[WrittenSequence], memories: Tensor, lengths: Tensor
    ) -> None:
        """Write the memories, [n, S, M], and the prompts of sequences to their places.

        ``lengths``, [n] int64, are the valid positions of each memory. The next step reads the
        prompts.
        """
        state = self._state
        places = [self._place_of(sequence) for sequence in sequences]
        self.searches.read_memory(memories, lengths, torch.tensor(places, device="cpu"))
        for place, sequence in zip(places, sequences, strict=True):
            prompt = sequence.request.prompt_ids
            state.sequences[place, 0, : len(prompt)] = torch.tensor(prompt, device="cpu")
            state.lengths[place] = len(prompt)
            self.searches.caches.cached_lengths[place] = 0
            state.done[place] = 0
        self._encoded += sequences

    def read(self, drawn: ReadRows, searched: SearchedRows) -> StepLogits | None:
        """See ``ModelSteps``."""
        begun, self._encoded = self._encoded, []
        self._state.lengths.add_(self._grows)
        self._write_tokens(drawn, searched)
        rows = self._rows
        if begun:
            of_begun: tuple[list[int], list[int]] = [], []
            for sequence in begun:
                of_begun[not isinstance(sequence, DrawnSequence)].append(sequence.places[0])
            rows = self._rows_of(drawn, of_begun[0], searched.places, of_begun[1])
            self._rows = None
        assert rows is not None
        if not rows.numel():
            return None
        self.searches.read_tokens(self._logits)
        return StepLogits(self._logits.index_select(0, rows), map(self._begun, begun))

    def ahead(self, drawn: ReadRows) -> None:
        """See ``ModelSteps``; none."""

    def _begun(self, sequence: WrittenSequence) -> WrittenSequence:
        self.reading.remove(sequence)
        self._grows[self._place_of(sequence)] = 1
        self.prompt_tokens += len(sequence.request.prompt_ids)
        return sequence

    def _write_tokens(self, drawn: ReadRows, searched: SearchedRows) -> None:
        """Append the chosen tokens to the rows."""
        if self._rows is not None and searched.places == self._searched:
            self._ends = self._ends + 1
            tokens = [searched.tokens] if drawn.tokens is None else [drawn.tokens, searched.tokens]
        else:
            rows = self._rows = self._rows_of(drawn, searched.places)
            self._searched = list(searched.places)
            self._set_widths([s.places[0] for s in drawn.running] + searched.places)
            lengths = self._state.lengths[rows // self._num_beams]
            self._ends = rows * self._state.sequences.shape[2] + lengths - 1
            last = [sequence.last for sequence in drawn.running]
            tokens = [torch.tensor(last, dtype=torch.int64, device="cpu"), searched.tokens]
        used = [part for part in tokens if part.numel()]
        if used:
            self._tokens.index_copy_(0, self._ends, used[0] if len(used) == 1 else torch.cat(used))

    @staticmethod
    def _rows_of(drawn: ReadRows, *others: list[int]) -> Tensor:
        rows = [sequence.places[0] for sequence in drawn.running]
        return torch.tensor(sum(others, rows), dtype=torch.int64, device="cpu")

    def _set_widths(self, rows: Sequence[int]) -> None:
        """Set the number of rows that the places of these rows read; the others read one."""
        counts = Counter(row // self._num_beams for row in rows)
        widths = {place: count for place, count in counts.items() if count > 1}
        if widths == self._widths:
            return
        num_beams = self.searches.parameters.num_beams
        for place in self._widths:
            num_beams[place] = 1
        for place, count in widths.items():
            num_beams[place] = count
        self._widths = widths

    def reorder(self, parents: Tensor) -> None:
        """See ``FollowingCaches``; only the table of rows changes."""
        lengths = self._state.lengths.repeat_interleave(self._num_beams)
        ops.update_beam_indirection_(self.searches.caches.table, parents, 0, lengths)

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """See ``ModelSteps``."""
        place = self._place_of(sequence)
        self._state.done[place] = 1
        self._grows[place] = 0
        if place not in self._free:  # an interrupted call may have come so far
            self._free.append(place)
        sequence.places, self._rows = [], None

    def _place_of(self, sequence: WrittenSequence) -> int:
        return sequence.places[0] // self._num_beams

    def clear(self) -> None:
        """See ``ModelSteps``."""
        self.reading, self._encoded, self._rows = [], [], None

    def flush(self) -> None:
        """See ``ModelSteps``; nothing to do."""
