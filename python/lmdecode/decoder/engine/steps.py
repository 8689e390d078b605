"""The steps of decoder-only models, and what an ``Engine`` or a call is made of, for both kinds."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_choice, check_int
from lmdecode.beam.engine.request import BeamRequest
from lmdecode.decoder.causal_caches import (
    BLOCK_SIZE,
    CHECKPOINT_INTERVAL,
    CausalCaches,
    check_sizes_of_batch,
)
from lmdecode.decoder.engine.drafts import DraftAsk, Drafting, Drafts, HiddenRows
from lmdecode.decoder.engine.encoder_decoder_steps import EncoderDecoderSteps
from lmdecode.decoder.engine.prompts import (
    Part,
    Places,
    PromptReader,
    PromptStore,
    StoredPrompts,
    add_parts,
)
from lmdecode.decoder.engine.request import DrawnSequence, SearchedSequence, WrittenSequence
from lmdecode.decoder.engine.rows import (
    MOST_AHEAD,
    Ended,
    LoopRows,
    LoopSequence,
    ModelSteps,
    ReadRows,
    SearchedRows,
    StepLogits,
    StepsAhead,
)
from lmdecode.decoder.engine.submission import Encoder, EncoderInputs, Submission
from lmdecode.decoder.searches import length_limits
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.sampling.sampler_rows import SAMPLER_DIALECTS, RowRules

__all__ = [
    "CausalSteps",
    "EngineParts",
    "MemoryRows",
    "causal_parts",
    "causal_rows",
    "encoder_decoder_parts",
    "longest_text",
    "memory_rows",
]


class CausalSteps:
    """``ModelSteps`` of a decoder-only model: parts of prompts are read beside running sequences.

    A step has at most ``max_step_tokens``; with drafts, at most their ``most_rows`` of them
    belong to sampled sequences. Prompts are loaded from and written to ``stored``.
    """

    def __init__(
        self,
        caches: CausalCaches,
        max_step_tokens: int,
        stored: PromptStore | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.caches, self._max_step_tokens = caches, max_step_tokens
        self.places = Places(caches, None if drafts is None else drafts.share)
        self._stored = stored or PromptStore()
        self.reader: PromptReader[WrittenSequence] = PromptReader(self.places, self._stored)
        self._drafts = drafts
        self._told: dict[DrawnSequence, int] = {}  # number of tokens that the drafts know of
        self._ahead: list[DrawnSequence] = []  # those that read drafts in the last step
        self._read_last: list[WrittenSequence] = []  # those that read their prompts in it
        # The entries of the last step if it had sampled rows alone, and without drafts.
        self._entries: Tensor | None = None

    @property
    def prompt_tokens(self) -> int:
        """See ``ModelSteps``."""
        return self.reader.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """See ``ModelSteps``."""
        return self.reader.cached_tokens

    @property
    def nbytes(self) -> int:
        """See ``ModelSteps``."""
        return self.caches.nbytes

    @property
    def reading(self) -> list[WrittenSequence]:
        """See ``ModelSteps``."""
        return self.reader.sequences

    @property
    def num_free(self) -> int:
        """See ``ModelSteps``."""
        return self.places.num_free

    @property
    def used_bytes(self) -> int:
        """See ``ModelSteps``."""
        return self.caches.used_bytes

    def has_room(self, sequence: WrittenSequence) -> bool:
        """See ``ModelSteps``. Memory must suffice for what is to be read, unless all is free."""
        if sequence.num_beams > self.places.num_free:
            return False
        most, in_use = self.caches.most_bytes, self.places.in_use
        if most is None or not in_use:
            return True
        of, shared = self.places.longest_common(sequence.prompt_ids)
        shared = shared if of in in_use else 0
        coming = [s.unread for s in self.reader.sequences] + [sequence.unread - shared]
        coming += [0] * len(coming)  # states of a step, beside those before it
        size = self.caches.bytes_held_by(in_use) + self.caches.bytes_for(coming)
        # Beside it all others go on.
        return size + self.caches.bytes_to_append(in_use, [1] * len(in_use)) <= most

    def check_fits(self, sequence: WrittenSequence) -> None:
        """See ``ModelSteps``."""
        most = self.caches.most_bytes
        if most is None:
            return
        count, new = len(sequence.prompt_ids), sequence.max_new_tokens
        # A beam copies the last block of the prompt; the last token is not read.
        of_beam = count % BLOCK_SIZE + new - 1
        needed = self.caches.bytes_for([count + new, *[of_beam] * (sequence.num_beams - 1)])
        if needed > most:
            raise ValueError(
                f"{_OP}: a prompt of {count} tokens and {sequence.num_beams} texts of "
                f"{new} tokens need {needed} bytes; expected at most {most}, the engine's "
                "cache_bytes"
            )

    def has_memory(self, drawn: ReadRows, searched: SearchedRows) -> bool:
        """See ``ModelSteps``."""
        if self.caches.most_bytes is None:
            return True
        self._keep_prompts()
        places = [*(sequence.places[0] for sequence in drawn.running), *searched.places]
        room, reading = self._max_step_tokens - len(places), self.reader.sequences
        most = room if reading or self._drafts is not None else 0
        if self.caches.has_room_for(len(places) + len(reading), most):
            return True
        counts = [1] * len(places)
        if self._drafts is not None:  # each may have all tokens of drafts that there may be
            counts = [1 + min(room, self.caches.rollback)] * len(places)
        for sequence, count in self.reader.parts(room):
            places.append(sequence.places[0])
            counts.append(count)
        size = partial(self.caches.bytes_to_append, places, counts)
        # A block shared with a kept prompt alone is not copied once that is forgotten.
        return self.places.make_room(size()) or self.places.make_room(size())

    def begin(self, sequence: WrittenSequence) -> None:
        """See ``ModelSteps``."""
        self.reader.begin(sequence)

    def encode(self) -> list[Ended]:
        """See ``ModelSteps``; nothing to do."""
        return []

    def read(self, drawn: ReadRows, searched: SearchedRows) -> StepLogits | None:
        """See ``ModelSteps``."""
        # A token follows each prompt that is read to its end.
        self._stored.put_all(but=self.reader.sequences)
        if (entries := self._same_entries(drawn)) is not None:
            assert drawn.tokens is not None
            logits = self.caches.forward(drawn.tokens, entries, len(drawn.running))
            return StepLogits(logits, iter(()))
        room = self._max_step_tokens - len(drawn.running) - len(searched.tokens)
        drafts = self._propose(drawn.running, room) if self._drafts is not None else []
        parts = self.reader.parts(room - sum(map(len, drafts)))
        ids, entries = _inputs(drawn, searched, parts, drafts)
        if not parts and not searched.running and self._drafts is None:
            self._entries = entries
        else:
            self._entries = None
        if not len(entries):
            return None
        ends = sum(count == sequence.unread for sequence, count in parts)
        num_logits = len(drawn.running) + sum(map(len, drafts)) + len(searched.places) + ends
        hidden = None
        if self._drafts is not None:
            hidden = self._drafts.new_hidden(len(ids), self.caches.model.config.model_size)
        logits = self.caches.forward(ids, entries, num_logits, hidden_out=hidden)
        if self._drafts is not None and hidden is not None:
            self._drafts.observe(_hidden_rows(drawn, searched, parts, drafts, hidden))
        begun = (part[0] for part in parts if self.reader.advance(part))
        self._read_last = [sequence for sequence, _ in parts]
        return StepLogits(logits, begun, drafts)

    def _keep_prompts(self) -> None:
        """Keep the prompts that were read to their ends in the last step; tokens follow them."""
        for sequence in self._read_last:
            if sequence.places and not sequence.reads_prompt and not sequence.written:
                self.places.keep_copy(sequence.places[0])
        self._read_last = []

    def _same_entries(self, drawn: ReadRows) -> Tensor | None:
        """Return the last step's entries if its sampled rows alone go on, without prompts."""
        return None if drawn.tokens is None or self.reader.sequences else self._entries

    def ahead(self, drawn: ReadRows) -> StepsAhead | None:
        """See ``ModelSteps``."""
        if (entries := self._same_entries(drawn)) is None:
            return None
        self._stored.put_all(but=())
        if self.caches.most_bytes is not None:
            self._keep_prompts()
            places = entries[:, 0].tolist()
            size = self.caches.bytes_to_append(places, [MOST_AHEAD] * len(places))
            if not self.places.make_room(size):
                return None
        return partial(self.caches.steps, entries)

    def _propose(self, running: list[DrawnSequence], room: int) -> list[list[int]]:
        """Return the drafts of a step with room for some tokens; an empty list: there are none.

        Before, rejected tokens of the last drafts of these sequences are removed from the caches.
        """
        assert self._drafts is not None
        ahead = [s for s in self._ahead if s.places and s in running]
        waiting = [s for s in self._ahead if s.places and s not in running]
        if ahead:
            lengths = [len(s.prompt_ids) + len(s.request.tokens) - 1 for s in ahead]
            self.caches.truncate([s.places[0] for s in ahead], lengths)
        self._ahead = waiting
        if not running:
            return []
        if self.reader.sequences:
            room //= 2
        each = min(room, self._drafts.most_rows - len(running)) // len(running)
        asks = []
        for sequence in running:
            place, tokens = sequence.places[0], sequence.request.tokens
            if sequence not in self._told:
                self._told[sequence], known = len(sequence.written), sequence.written
                prompt = sequence.prompt_ids + known
                self._drafts.begin(place, prompt, sequence.rules, sequence.end_tokens)
            # The last token of a text is not read.
            left = sequence.max_new_tokens - len(tokens) - 1
            asks.append(DraftAsk(place, tokens[self._told[sequence] :], min(left, each)))
            self._told[sequence] = len(tokens)
        drafts = self._drafts.propose(asks)
        self._ahead = waiting + [s for s, draft in zip(running, drafts, strict=True) if draft]
        return drafts if any(drafts) else []

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """See ``ModelSteps``. The prompt of a sound sequence is kept."""
        if is_sound and not sequence.reads_prompt:
            self._stored.put(sequence)
        else:
            self._stored.drop(sequence)
        if isinstance(sequence, DrawnSequence) and self._told.pop(sequence, None) is not None:
            assert self._drafts is not None
            self._drafts.end(sequence.places[0])
        first, *others = sequence.places
        keep = min(sequence.read, len(sequence.prompt_ids))
        self.places.give_back(first, keep=keep if is_sound else 0)
        for place in others:
            self.places.give_back(place)
        sequence.places = []

    def clear(self) -> None:
        """See ``ModelSteps``."""
        self.reader.sequences, self._entries, self._ahead = [], None, []
        self._read_last = []
        self._told.clear()
        if self._drafts is not None:
            self._drafts.clear()

    def flush(self) -> None:
        """See ``ModelSteps``."""
        self._stored.flush(but=self.reader.sequences)


def _hidden_rows(
    drawn: ReadRows,
    searched: SearchedRows,
    parts: list[Part[WrittenSequence]],
    drafts: list[list[int]],
    hidden: Tensor,
) -> list[HiddenRows]:
    """Return the hidden rows of sampled sequences and of prompts, in the order of ``_inputs``."""
    found, at = [], 0
    for i, sequence in enumerate(drawn.running):
        end = at + 1 + (len(drafts[i]) if drafts else 0)
        found.append(HiddenRows(sequence.places[0], -1, (), hidden[at:end]))
        at = end
    for kind in (DrawnSequence, SearchedSequence):
        for reader, count in parts:
            if isinstance(reader, kind):
                end, tokens = at + count, reader.next_tokens(count)
                found.append(HiddenRows(reader.places[0], reader.read, tokens, hidden[at:end]))
                at = end
        at += len(searched.places)
    return found


def _inputs(
    drawn: ReadRows,
    searched: SearchedRows,
    parts: list[Part[WrittenSequence]],
    drafts: list[list[int]],
) -> tuple[Tensor, Tensor]:
    """Return a step's tokens and entries; sampled sequences come first."""
    if not parts and not drawn.running:
        return searched.tokens, searched.entries
    if drafts:
        ids, entries = [], []
        for sequence, draft in zip(drawn.running, drafts, strict=True):
            ids += [sequence.last, *draft]
            entries.append((sequence.places[0], 1 + len(draft), 0, 1 + len(draft)))
    else:
        ids = [sequence.last for sequence in drawn.running]
        entries = [(sequence.places[0], 1, 0, 1) for sequence in drawn.running]
    add_parts([part for part in parts if isinstance(part[0], DrawnSequence)], ids, entries)
    ids += searched.tokens.tolist()
    entries += [(place, 1, 0, 1) for place in searched.places]
    add_parts([part for part in parts if isinstance(part[0], SearchedSequence)], ids, entries)
    kind: Any = {"dtype": torch.int64, "device": "cpu"}
    return torch.tensor(ids, **kind), torch.tensor(entries, **kind)


# --- Rows of one call -----------------------------------------------------------------------------


_MAX_STEP_TOKENS = 512  # of an assistant


class MemoryRows(LoopRows):
    """Rows of an encoder-decoder model, as many for each memory."""

    steps: EncoderDecoderSteps

    def read(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``; an ended row may continue with padding outside the vocabulary."""
        return super().read(input_ids[:, -1:].clamp(0, self.steps.vocab_size - 1))

    def release(self) -> None:
        """Leave the memory to searches to come; the rows are used no more."""
        self.steps.searches.release()


def memory_rows(
    decoder: PackedDecoder,
    memory: Tensor,
    lengths: Tensor,
    prompts: list[list[int]],
    max_length: int,
    has_ended: Callable[[], Tensor | None] | None = None,
) -> MemoryRows:
    """Return the rows of ``prompts`` of tokens, as many for each memory.

    ``memory`` is [batch, S, M] float32 with ``lengths``, [batch] int64. ``has_ended``: see
    ``LoopRows``.
    """
    batch = len(memory)
    num_beams = len(prompts) // batch
    steps = EncoderDecoderSteps(
        decoder,
        max_requests=batch,
        num_beams=num_beams,
        capacity=max_length - 1,
        source=memory.shape[1],
        max_step_tokens=memory.shape[1],
    )
    sequences = [LoopSequence(prompt, max_length - len(prompt)) for prompt in prompts]
    leaders = [row - row % num_beams for row in range(len(prompts))]
    rows = MemoryRows(steps, sequences, leaders, has_ended=has_ended)
    steps.read_memories(sequences[::num_beams], memory, lengths)
    return rows


def causal_rows(
    packed: PackedCausalModel,
    cache_dtype: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    drafting: Drafting | None = None,
    rules: Sequence[RowRules] = (),
    end_tokens: Sequence[int] = (),
    stored: Callable[[CausalCaches], PromptStore] | None = None,
    on_read: Callable[[Tensor], None] | None = None,
) -> LoopRows:
    """Return the rows of prompts of a decoder-only model; equal prompts are read once.

    ``rules`` choose the drafts of each row, which ``end_tokens`` end. ``stored`` returns where the
    prompts are looked up. ``on_read``: see ``LoopRows``.
    """
    count, most = len(prompts), 0 if drafting is None else drafting.most
    capacity = max(map(len, prompts)) + max_new_tokens
    caches = CausalCaches(packed, count, capacity, dtype=cache_dtype, rollback=most)
    drafts = None
    if drafting is not None:
        drafts = Drafts(
            drafting,
            texts=count,
            rows=count,
            capacity=capacity,
            dialect="transformers",
            max_step_tokens=max(count, _MAX_STEP_TOKENS),
        )
    first = dict[tuple[int, ...], int]()
    leaders = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
    rules_of_rows: Sequence[RowRules | None] = rules or [None] * count
    return LoopRows(
        CausalSteps(
            caches,
            sum(map(len, prompts)) + count * (1 + most),
            None if stored is None else stored(caches),
            drafts,
        ),
        [
            LoopSequence(prompt, max_new_tokens, tuple(end_tokens), of_row)
            for prompt, of_row in zip(prompts, rules_of_rows, strict=True)
        ],
        leaders,
        has_drafts=drafts is not None,
        on_read=on_read,
    )


# --- Parts of an engine ---------------------------------------------------------------------------


_OP = "Engine"
_DEFAULT_BEAMS = 4


class EngineParts(NamedTuple):
    """Parts of an engine that depend on the kind of model.

    ``steps`` runs the model, ``submission`` checks requests, ``max_requests`` is the number of
    slots.
    """

    steps: ModelSteps
    submission: Submission
    max_requests: int


def longest_text(
    model: PackedCausalModel, dtype: str, most_bytes: int, longest: int, rollback: int = 0
) -> int:
    """Return the most tokens, at most ``longest``, of a text that so many bytes hold; 0: none."""
    caches = CausalCaches(
        model, 1, longest, dtype=dtype, rollback=rollback, checkpoint_interval=CHECKPOINT_INTERVAL,
        most_bytes=most_bytes,
    )  # fmt: skip
    return bisect.bisect_right(
        range(1, longest + 1), most_bytes, key=lambda length: caches.bytes_for([length])
    )


def causal_parts(
    model: PackedCausalModel,
    *,
    max_requests: int,
    capacity: int,
    max_step_tokens: int,
    dialect: str,
    eos_token_id: tuple[int, ...],
    cache_dtype: str,
    store: Any,
    drafting: Drafting | None,
    cache_bytes: int | None,
    **others: Any,
) -> EngineParts:
    """Return the parts of an engine of a decoder-only model; arguments are those of ``Engine``."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{_OP}: {name} is given; expected None for a decoder-only model")
    max_requests, capacity, max_step_tokens = check_sizes_of_batch(
        _OP, model.max_positions, max_requests, capacity, max_step_tokens
    )
    if max_step_tokens < max_requests:
        raise ValueError(
            f"{_OP}: max_step_tokens is {max_step_tokens}; expected at least {max_requests}, "
            "max_requests: a step reads a token of each"
        )
    check_choice(_OP, "dialect", dialect, SAMPLER_DIALECTS)
    caches = CausalCaches(
        model,
        max_requests,
        capacity,
        dtype=cache_dtype,
        max_rows=max_step_tokens,
        rollback=0 if drafting is None else drafting.most,
        checkpoint_interval=CHECKPOINT_INTERVAL,
        most_bytes=cache_bytes,
    )
    if cache_bytes is not None and (least := caches.bytes_for([capacity])) > cache_bytes:
        raise ValueError(
            f"{_OP}: cache_bytes is {cache_bytes}; expected at least {least}, which a text of "
            f"{capacity} tokens, the capacity, takes"
        )
    drafts = None
    if drafting is not None:
        drafts = Drafts(
            drafting,
            texts=max_requests,
            rows=caches.sequences,
            capacity=capacity,
            dialect=dialect,
            max_step_tokens=max_step_tokens,
        )
    most_beams = max_requests, "max_requests"
    submission = Submission(model.config.vocab_size, capacity, most_beams, dialect, eos_token_id)
    stored = None if store is None else StoredPrompts(store, caches)
    steps = CausalSteps(caches, max_step_tokens, stored, drafts)
    return EngineParts(steps, submission, max_requests)


def encoder_decoder_parts(
    decoder: PackedDecoder,
    *,
    max_requests: int,
    capacity: int,
    max_step_tokens: int,
    dialect: str,
    eos_token_id: tuple[int, ...],
    cache_dtype: str,
    store: Any,
    num_beams: int | None,
    source: int | None,
    encoder: Encoder | None,
    decoder_start_token_id: int | None,
    request_of_config: Callable[[Any, Any], BeamRequest] | None,
    drafting: Drafting | None,
    cache_bytes: int | None,
) -> EngineParts:
    """Return the parts of an engine of an encoder-decoder model; arguments as of ``Engine``."""
    refused = {
        "cache_bytes": cache_bytes is not None,
        "store": store is not None,
        "cache_dtype": cache_dtype != "float32",
        "drafting": drafting is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(f"{_OP}: {name} is given; expected none for an encoder-decoder model")
    longest = min((most for most, _ in length_limits(decoder)), default=None)
    max_requests, capacity, max_step_tokens = check_sizes_of_batch(
        _OP, longest, max_requests, capacity, max_step_tokens
    )
    check_choice(_OP, "dialect", dialect, SAMPLER_DIALECTS)
    if source is None and encoder is not None and not encoder.takes_tokens:
        source = encoder.longest
    if source is None:
        raise TypeError(f"{_OP}: source is missing; expected an int")
    source = check_int(_OP, "source", source, 1, 1 << 30, limits="1 to 2^30")
    num_beams = _DEFAULT_BEAMS if num_beams is None else num_beams
    num_beams = check_int(_OP, "num_beams", num_beams, 1, 1 << 10, limits="1 to 1024")
    steps = EncoderDecoderSteps(
        decoder,
        max_requests=max_requests,
        num_beams=num_beams,
        capacity=capacity,
        source=source,
        max_step_tokens=max_step_tokens,
    )
    assert decoder.config.memory_size is not None
    submission = Submission(
        decoder.config.vocab_size,
        capacity,
        (num_beams, "num_beams"),
        dialect,
        eos_token_id,
        EncoderInputs(encoder, source, decoder.config.memory_size),
        decoder_start_token_id,
        request_of_config,
    )
    return EngineParts(steps, submission, max_requests)
