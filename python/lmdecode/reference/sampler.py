"""``lmdecode.Sampler`` in plain torch, a row at a time, with the same bits.

A row of logits is edited by its token rules and penalties, each edit one rounded f32
operation per token in a fixed order, goes through the stages
of its dialect (``sampler_stages``), and of the tokens that are left one is drawn as
``top_k_top_p_sample`` draws. What the sampler keeps of a sequence is its text, its parameters and
mirostat's mu. Arguments are not checked.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lmdecode.reference.arithmetic import (
    integer_power,
    log_f64,
    log_scalar,
    mass_fraction_bits,
    round_to_f32,
    sum_masses,
    token_noise,
)
from lmdecode.reference.sampler_parameters import RowParameters, row_parameters, split_rows
from lmdecode.reference.sampler_stages import (
    LOG2_E,
    SAMPLER_DIALECTS,
    STAGES,
    SamplerDialect,
    Survivors,
    adapt,
    run_stages,
)
from lmdecode.reference.sampling import best_score, seed_rows
from lmdecode.sampling.types import (
    STATUS_EMPTY,
    STATUS_NAN,
    STATUS_NO_SEQUENCE,
    STATUS_PARAMETER,
    KeptSet,
    SamplerOutput,
)

_INF = math.inf
_SEEDS = 2**63 - 1
_MAX_FLOAT = float.fromhex("0x1.fffffep127")


def allowed_tokens(words: Tensor, vocab: int) -> Tensor:
    """[V] bool: bit i % 32 of word i / 32 of a row [ceil(V / 32)] int32 of a bitmask."""
    bits = words.to(torch.int64)[:, None] >> torch.arange(32) & 1
    return bits.flatten()[:vocab].bool()


def _ends_with(text: Sequence[int], tokens: Sequence[int]) -> bool:
    return len(tokens) == 0 or tuple(text[-len(tokens) :]) == tuple(tokens)


def _biases(row: RowParameters, text: Sequence[int]) -> dict[int, float]:
    """The f32 sum of the biases of each token: its own first, then the sequences'."""
    sums: dict[int, float] = {}
    for of_sequences in (False, True):
        for tokens, bias in row.logit_bias:
            if (len(tokens) > 1) == of_sequences and _ends_with(text, tokens[:-1]):
                sums[tokens[-1]] = round_to_f32(sums.get(tokens[-1], 0.0) + bias)
    return sums


def _banned(
    row: RowParameters, text: Sequence[int], output: Sequence[int], dialect: SamplerDialect
) -> set[int]:
    """Tokens that are forbidden whatever their logit."""
    banned = set(row.suppress_tokens)
    banned |= {
        tokens[-1]
        for tokens, bias in row.logit_bias
        if bias == -_INF and _ends_with(text, tokens[:-1])
    }
    for word in row.bad_words_ids:
        end_token = len(word) == 1 and word[0] in row.eos_token_id and dialect.allows_end_tokens
        if _ends_with(text, word[:-1]) and not end_token:
            banned.add(word[-1])
    if len(output) < row.min_tokens:
        banned |= set(row.eos_token_id)
    return banned


def repeated_ngrams(text: Sequence[int], size: int) -> set[int]:
    """Tokens that would complete an n-gram that stands in the text."""
    places = range(len(text) - size + 1)
    return {text[i + size - 1] for i in places if _ends_with(text, text[i : i + size - 1])}


def dry_lengths(text: Sequence[int], breakers: Iterable[int], allowed: int) -> dict[int, int]:
    """Return for each token the length of the longest repetition that it would continue.

    A repetition is an end of the text that stands earlier in it too; it does not reach over the
    last breaker, and counts from ``allowed`` tokens on. Breakers are never penalised.
    """
    length = len(text)
    breakers = set(breakers)
    limit = next((i for i in range(length) if text[length - 1 - i] in breakers), length)
    lengths: dict[int, int] = {}
    if length <= allowed or limit < allowed:
        return lengths
    for i in range(length - 1):
        match = 0
        while match <= i and match < limit and text[i - match] == text[length - 1 - match]:
            match += 1
        token = text[i + 1]
        if match >= allowed and token not in breakers:
            lengths[token] = max(match, lengths.get(token, 0))
    return lengths


def dry_penalty(multiplier: float, base: float, exponent: int) -> float:
    """Return multiplier * base^exponent: f64 by repeated squaring, at most the largest f32, f32."""
    return round_to_f32(min(multiplier * integer_power(base, exponent), _MAX_FLOAT))


def _index(tokens: Iterable[int], vocab: int) -> Tensor:
    """[N] int64, ascending: the tokens that are in the vocabulary."""
    return torch.tensor(sorted({t for t in tokens if t < vocab}), dtype=torch.int64)


def edited_logits(
    x: Tensor,
    row: RowParameters,
    prompt: Sequence[int],
    output: Sequence[int],
    bitmask: Tensor | None,
    dialect: SamplerDialect,
) -> Tensor:
    """Return the logits y [V] float32 that the stages see; NaN becomes -inf."""
    vocab = len(x)
    y = torch.where(x.isnan(), -_INF, x)
    text = [*prompt, *output]
    if bitmask is not None:
        y = torch.where(allowed_tokens(bitmask, vocab), y, -_INF)

    sums = _biases(row, text)
    if sums:
        tokens = torch.tensor(list(sums))
        y[tokens] = y[tokens] + torch.tensor(list(sums.values()))
    y[_index(_banned(row, text, output, dialect), vocab)] = -_INF

    seen = _index(text, vocab)
    if row.repetition_penalty != 1:
        r = torch.tensor(row.repetition_penalty)
        y[seen] = torch.where(y[seen] < 0, y[seen] * r, y[seen] / r)
    counted = text if dialect.counts_see_prompt else output
    if row.frequency_penalty != 0 or row.presence_penalty != 0:
        seen = _index(counted, vocab)
        counts = Counter(counted)
        count = torch.tensor([counts[token] for token in seen.tolist()], dtype=torch.float32)
        frequency, presence = row.frequency_penalty, row.presence_penalty
        y[seen] = (y[seen] - torch.tensor(frequency) * count) - torch.tensor(presence)
    if row.no_repeat_ngram_size > 0:
        y[_index(repeated_ngrams(text, row.no_repeat_ngram_size), vocab)] = -_INF
    if row.dry_multiplier > 0 and row.dry_base >= 1:
        allowed = row.dry_allowed_length
        for token, length in dry_lengths(text, row.dry_breakers, allowed).items():
            if token < vocab:
                penalty = dry_penalty(row.dry_multiplier, row.dry_base, length - allowed)
                y[token] = y[token] - torch.tensor(penalty)
    return torch.where(y.isnan(), -_INF, y)


@dataclass
class RowSequence:
    """One active row: its parameters and its state."""

    parameters: RowParameters
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    mu: float = 0.0
    mu_before: list[float] = field(default_factory=list)  # a mu for each token of the output

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def accept(self, token: int, mu: float | None = None) -> None:
        self.output.append(token)
        self.mu_before.append(self.mu)
        self.mu = self.mu if mu is None else mu

    def rewind(self, count: int) -> None:
        if count > 0:
            self.mu = self.mu_before[-count]
            del self.output[-count:], self.mu_before[-count:]


@dataclass
class Distribution:
    """Distribution of a row before the draw. Weights and masses are in the order of ``ids``."""

    ids: Tensor  # [N] int64, in order
    values: Tensor  # [N] float32: what kept_logits shows
    weight: Tensor  # [N] float32
    mass: Tensor  # [N] int64
    fraction_bits: int
    status: int
    counts: dict[str, int] = field(default_factory=dict)
    is_drawn: bool = False  # not forced, not greedy
    before: Tensor | None = None  # [V] float32, the probabilities before adaptive-p

    def logprobs(self) -> Tensor:
        """[N] float64."""
        if len(self.ids) == 0:
            return torch.zeros(0, dtype=torch.float64)
        total = float(sum_masses(self.mass)) * 2.0**-self.fraction_bits
        return log_f64(self.weight.to(torch.float64)) - log_scalar(total)


def _one_token(token: int, value: float, bits: int, status: int) -> Distribution:
    ids = torch.tensor([token])
    return Distribution(
        ids, torch.tensor([value]), torch.ones(1), torch.full_like(ids, 1 << bits), bits, status
    )


def softmax_row(x: Tensor) -> Distribution:
    """The softmax of a row [V] float32, of its support alone."""
    bits = mass_fraction_bits(len(x))
    row = Survivors(torch.where(x.isnan(), -_INF, x))
    if len(row.kept) == 0:
        return Distribution(row.kept, torch.zeros(0), torch.zeros(0), row.kept, bits, STATUS_EMPTY)
    weight, mass = row.weights(), row.masses()
    return Distribution(row.kept, x[row.kept], weight, mass, bits, 0)


class Sampler:
    """See ``lmdecode.Sampler``: the same parameters, by ``sampler_parameters.RowParameters``."""

    def __init__(
        self,
        batch: int,
        vocab: int,
        *,
        device: torch.device | str | None = None,
        dialect: str = "lmdecode",
        logprobs_mode: str = "raw_logprobs",
        num_logprobs: int | None = None,
        return_kept_set: bool = False,
        return_logits: bool = False,
        return_stages: bool = False,
        **parameters: Any,
    ) -> None:
        self.batch, self.vocab, self.dialect = batch, vocab, SAMPLER_DIALECTS[dialect]
        self.device = torch.device(device or "cpu")
        self.is_raw = logprobs_mode == "raw_logprobs"
        self.num_logprobs = num_logprobs
        self.return_kept_set = return_kept_set
        self.return_logits = return_logits
        self.return_stages = return_stages
        seed = parameters.pop("seed", None)
        self._defaults = split_rows(parameters, batch)
        self._seeds: list[int] | None = None
        if seed is not None:
            rows = torch.as_tensor(seed) if isinstance(seed, Sequence) else seed
            self._seeds = seed_rows(rows, None, batch)
        seeds = self._seeds or torch.randint(0, _SEEDS, (batch,)).tolist()
        self.rows: list[RowSequence | None] = [
            self._sequence(row, seed=seed) for row, seed in enumerate(seeds)
        ]

    def _sequence(self, row: int, prompt: Any = None, **parameters: Any) -> RowSequence:
        values = row_parameters({**self._defaults[row], **parameters})
        values = self.dialect.of_row(values)
        return RowSequence(values, [int(token) for token in (() if prompt is None else prompt)],
                         mu=values.mu)  # fmt: skip

    # --- Sequences ---

    def insert(self, row: int, prompt: Any = None, **parameters: Any) -> None:
        """Start a sequence; the constructor's parameters are the defaults."""
        if parameters.get("seed") is None:
            parameters["seed"] = (
                self._seeds[row] if self._seeds else int(torch.randint(0, _SEEDS, (1,)))
            )
        self.rows[row] = self._sequence(row, prompt, **parameters)

    def remove(self, row: int) -> None:
        self.rows[row] = None

    def reorder_(self, rows: Any) -> None:
        """Row i goes on with what row ``rows[i]`` was."""
        self.rows = [copy.deepcopy(self.rows[int(row)]) for row in rows]

    def accept(self, row: int, tokens: Any) -> None:
        """Go on with tokens that were chosen elsewhere; mirostat does not learn from them."""
        for token in [tokens] if isinstance(tokens, int) else tokens:
            self._active(row).accept(int(token))

    def rewind(self, row: int, n: int) -> None:
        """Take back the last n accepted tokens."""
        if not 0 <= n <= len(self._active(row).output):
            raise ValueError(f"rewind: n is {n}; {len(self._active(row).output)} were accepted")
        self._active(row).rewind(n)

    def _active(self, row: int) -> RowSequence:
        sequence = self.rows[row]
        if sequence is None:
            raise ValueError(f"row {row} has no sequence")
        return sequence

    def state_dict(self) -> dict[str, Any]:
        return {"rows": copy.deepcopy(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = copy.deepcopy(state["rows"])

    # --- One row ---

    def distribution(self, row: int, x: Tensor, bitmask: Tensor | None = None) -> Distribution:
        """Filter one row [V] float32 by the state of its sequence."""
        sequence = self._active(row)
        bits = mass_fraction_bits(self.vocab)
        p = replace(sequence.parameters, position=sequence.position, mu=sequence.mu)
        forced = p.forced_tokens.get(len(sequence.output))
        if forced is not None:
            return _one_token(forced, x[forced].item(), bits, 0)
        status = (STATUS_NAN if x.isnan().any() else 0) | (STATUS_PARAMETER if p.nan else 0)
        y = edited_logits(x, p, sequence.prompt, sequence.output, bitmask, self.dialect)
        left = Survivors(y)
        is_greedy = p.temperature <= 0 or p.temperature < self.dialect.least_temperature
        if is_greedy and len(left.kept) > 0:
            token = int(left.kept[0])
            return _one_token(token, y[token].item(), bits, status)
        counts = run_stages(left, p, self.dialect)
        before = None
        if p.adaptive_target >= 0 and len(left.kept) > 0:
            before = adapt(left, p)
        kept = left.kept
        if len(kept) == 0:
            nothing, status = torch.zeros(0), status | STATUS_EMPTY
            return Distribution(kept, nothing, nothing, kept, bits, status, counts)
        values = torch.full_like(left.v[kept], _INF) if left.infinite else left.v[kept]
        return Distribution(
            kept,
            values,
            left.weights(),
            left.masses(),
            bits,
            status,
            counts,
            is_drawn=True,
            before=before,
        )

    def draw(self, row: int, left: Distribution) -> int:
        """Return the place of the drawn token in ``left``, which has one at least."""
        sequence = self._active(row)
        seed = sequence.parameters.seed
        if len(left.ids) == 1 or seed < 0:
            return 0
        noise = token_noise(seed, sequence.position, left.ids)
        return best_score(left.ids, left.weight.to(torch.float64) / noise)

    def accept_drawn(self, row: int, left: Distribution, place: int) -> None:
        """Go on with a token of ``left``, and let mirostat learn from its surprise."""
        sequence = self._active(row)
        p, mu = sequence.parameters, None
        if left.before is not None:
            probability = left.before[left.ids[place]].item()
            mu = round_to_f32(sequence.mu + (1.0 - p.adaptive_decay) * (probability - sequence.mu))
        elif left.is_drawn and p.mirostat_tau > 0:
            surprise = -left.logprobs()[place].item() * LOG2_E
            mu = round_to_f32(sequence.mu - p.mirostat_eta * (surprise - p.mirostat_tau))
        sequence.accept(int(left.ids[place]), mu)

    # --- A step ---

    def sample(
        self, logits: Tensor, bitmask: Tensor | None = None, accept: bool = True
    ) -> SamplerOutput:
        """Choose a token of each row of logits [B, V]; see ``lmdecode.Sampler.sample``."""
        batch, vocab = self.batch, self.vocab
        index = torch.full((batch,), -1)
        kept_logits = torch.full((batch, vocab), -_INF)
        kept_count = torch.zeros(batch, dtype=torch.int32)
        status = torch.zeros(batch, dtype=torch.uint8)
        stage_counts = torch.full((batch, len(STAGES)), -1, dtype=torch.int32)
        best = self.num_logprobs or 0
        logprob, rank = torch.full((batch,), -_INF), torch.zeros(batch, dtype=torch.int64)
        top_ids = torch.full((batch, best), -1)
        top_logprobs = torch.full((batch, best), -_INF)
        kept_ids, kept_logprobs = [], []
        for b in range(batch):
            if self.rows[b] is None:
                status[b] = STATUS_NO_SEQUENCE
                continue
            x = logits[b].cpu().to(torch.float32)
            left = self.distribution(b, x, None if bitmask is None else bitmask[b].cpu())
            index[b] = 0
            if len(left.ids) > 0:
                place = self.draw(b, left)
                index[b] = left.ids[place]
            kept_logits[b, left.ids] = left.values
            kept_count[b] = len(left.ids)
            status[b] = left.status
            for name, count in left.counts.items():
                stage_counts[b, STAGES.index(name)] = count
            if self.return_kept_set:
                ids, order = left.ids.sort()
                kept_ids.append(ids)
                kept_logprobs.append(left.logprobs()[order].to(torch.float32))
            if self.num_logprobs is not None:
                rank[b] = self._rank(x, int(index[b]))
                shown = softmax_row(x) if self.is_raw else left
                found = shown.logprobs()
                here = found[shown.ids == index[b]]
                logprob[b] = here[0].to(torch.float32) if len(here) > 0 else -_INF
                top = min(best, len(shown.ids))
                top_ids[b, :top] = shown.ids[:top]
                top_logprobs[b, :top] = found[:top].to(torch.float32)
            if accept and len(left.ids) > 0:
                self.accept_drawn(b, left, place)
            elif accept:
                self.accept(b, 0)
        kept_set = None
        if self.return_kept_set:
            indptr = torch.zeros(batch + 1, dtype=torch.int64)
            indptr[1:] = kept_count.cumsum(0)
            kept_set = KeptSet(
                indptr.to(self.device),
                torch.cat([torch.zeros(0, dtype=torch.int64), *kept_ids]).to(self.device),
                torch.cat([torch.zeros(0), *kept_logprobs]).to(self.device),
            )
        wants_logprobs = self.num_logprobs is not None
        return SamplerOutput(
            index.to(self.device),
            kept_logits.to(self.device) if self.return_logits else None,
            logprob.to(self.device) if wants_logprobs else None,
            kept_count.to(self.device),
            status.to(self.device),
            top_ids.to(self.device) if wants_logprobs else None,
            top_logprobs.to(self.device) if wants_logprobs else None,
            rank.to(self.device) if wants_logprobs else None,
            kept_set,
            stage_counts.to(self.device) if self.return_stages else None,
        )

    def _rank(self, x: Tensor, token: int) -> int:
        """1 + how many raw logits stand before the token's; dialect "vllm": as many reach it."""
        x = torch.where(x.isnan(), -_INF, x)
        if self.dialect.rank_after_ties:
            return int((x >= x[token]).sum())
        return int((x > x[token]).sum() + (x[:token] == x[token]).sum()) + 1
