"""Windows of sound to tokens, several at a time: a search, then draws where its text is poor."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import (
    ALWAYS,
    TokenRules,
    new_token_rules,
    one_slot,
)
from lmdecode.decoder.cross_attention import CrossAttention
from lmdecode.decoder.search_slots import SearchSlots
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.state import padded
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.speech.model import SpeechModel
from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.rules import ruled

__all__ = ["DecodedWindow", "Window", "WindowDecoder"]

_STEPS = 16  # of the decoder between checks for owners that have gone


@dataclass(eq=False)
class Window:
    """A window that is to be decoded, for its hashable ``owner``.

    ``encode`` returns its memory, [positions, model_size]. ``prompt`` has the tokens in front of
    its text, which begins at ``begin`` in the prompt: a prefix belongs to the text. ``seek`` is its
    first frame; draws depend on it.
    """

    owner: Hashable
    encode: Callable[[], Tensor]
    prompt: tuple[int, ...]
    begin: int
    seek: int


class DecodedWindow(NamedTuple):
    """The text of a window; the scores are explained at ``Segment``.

    ``tokens`` are the text and its times from ``Window.begin`` on, without the end token;
    ``log_probs`` has one for each, 0 for a prefix. ``attention`` is [alignment heads, tokens + 1,
    positions], the weights as each token and the end is predicted, if words were requested.
    """

    tokens: list[int]
    log_probs: list[float]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float
    attention: Tensor | None


class _Found(NamedTuple):
    """The tokens of one try, the end token among them if it came, and their log-probabilities."""

    tokens: list[int]
    log_probs: list[float]


class _Judged(NamedTuple):
    """One try without its end token; the mean of its log-probabilities, and its compression."""

    tokens: list[int]
    log_probs: list[float]
    mean: float
    ratio: float


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


class WindowDecoder:
    """Decodes any number of windows, ``places`` at a time."""

    def __init__(self, model: SpeechModel, options: TranscriptionOptions, places: int) -> None:
        self._model, self._options, self._most = model, options, places
        self._places = 0
        self._waiting: deque[Window] = deque()
        self._running: dict[int, Window] = {}  # by places
        self._memories: dict[int, Tensor] = {}
        self._no_speech: dict[int, float] = {}
        self._slots: SearchSlots | None = None
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")  # of a step
        self._cross: CrossAttention | None = None
        if options.word_timestamps:
            self._cross = CrossAttention(model.decoder, model.alignment_heads)
        suppressed = [token for token in options.suppress_tokens if token >= 0]
        if -1 in options.suppress_tokens:
            suppressed += model.tokens.suppressed
        self._suppressed = sorted(set(suppressed))
        self._suppressed_first = model.tokens.suppressed_first if options.suppress_blank else ()

    @property
    def has_work(self) -> bool:
        """Whether there are windows that have not been decoded."""
        return bool(self._waiting or self._running)

    def submit(self, windows: Iterable[Window]) -> None:
        """Add windows, which are decoded in this order as places become free."""
        self._waiting.extend(windows)

    def drop(self, owner: Hashable) -> None:
        """Forget the windows of an owner."""
        self._waiting = deque(window for window in self._waiting if window.owner != owner)
        for place in [at for at, window in self._running.items() if window.owner == owner]:
            self._leave(place)
        if not self.has_work:
            self.close()

    def close(self) -> None:
        """Forget all windows, and free their memory."""
        self._waiting.clear()
        self._running.clear()
        self._memories.clear()
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.searches.release()

    @torch.no_grad()
    def step(self) -> list[tuple[Window, DecodedWindow | Exception]]:
        """Do some steps of the decoder; return the windows that have ended in them.

        A window that cannot be encoded or decoded ends with its error.
        """
        found = self._admit()
        if not self._running:
            return found
        if self._options.temperature[0] > 0:
            ended = list(self._running)
        else:
            assert self._slots is not None
            searches, ended = self._slots.searches, list[int]()
            for _ in range(_STEPS):
                searches.choose(self._read(searches, self._values))
                goes_on = searches.are_running().tolist()
                ended = [place for place in self._running if not goes_on[place]]
                if ended:
                    break
        for place in ended:
            window = self._running[place]
            try:
                found.append((window, self._decoded(place, window)))
            except Exception as error:
                found.append((window, error))
            finally:
                self._leave(place)
        if not self.has_work:
            self.close()
        return found

    # ---- places

    def _admit(self) -> list[tuple[Window, DecodedWindow | Exception]]:
        """Give free places to the windows that have waited longest; return those that failed."""
        new: list[int] = []
        failed: list[tuple[Window, DecodedWindow | Exception]] = []
        if self._slots is None:
            self._places = min(self._most, len(self._waiting))
        for place in range(self._places):
            if not self._waiting:
                break
            if place in self._running:
                continue
            window = self._waiting.popleft()
            try:
                self._begin(place, window, window.encode())
            except Exception as error:
                failed.append((window, error))
            else:
                new.append(place)
        if new:
            self._read_no_speech(new)
        return failed

    def _begin(self, place: int, window: Window, memory: Tensor) -> None:
        if self._slots is None:
            self._slots = self._new_slots(padded(len(memory)))
        self._slots.begin(place, self._request(window), memory, self._rules(window))
        self._running[place], self._memories[place] = window, memory

    def _new_slots(self, source: int) -> SearchSlots:
        options = self._options
        beams = options.beam_size if options.temperature[0] == 0 else 1
        request = BeamRequest([0], max_new_tokens=1, num_beams=beams, patience=options.patience)
        shape = (2, self._places * beams, self._model.decoder.config.vocab_size)
        self._values = torch.zeros(shape, dtype=torch.float32, device="cpu")
        bans = len(self._suppressed) + len(self._suppressed_first)
        return SearchSlots(
            self._model.decoder,
            self._places,
            source,
            num_beams=beams,
            capacity=self._model.capacity,
            num_hypotheses=request.num_hypotheses,
            num_candidates=2 * beams,
            token_rules=new_token_rules(self._places, bans),
        )

    def _request(self, window: Window) -> BeamRequest:
        options = self._options
        beams = options.beam_size if options.temperature[0] == 0 else 1
        return BeamRequest(
            window.prompt,
            max_new_tokens=self._new_tokens(window),
            num_beams=beams,
            patience=options.patience,
            length_penalty=options.length_penalty,
            early_stopping=beams == 1,
            eos_token_id=self._model.tokens.end,
        )

    def _new_tokens(self, window: Window) -> int:
        most = self._model.capacity - len(window.prompt)
        wanted = self._options.max_new_tokens
        return most if wanted is None else min(most, wanted)

    def _rules(self, window: Window) -> TokenRules:
        tokens, options, length = self._model.tokens, self._options, len(window.prompt)
        bans = [(token, 0, ALWAYS, 0) for token in self._suppressed]
        bans += [(token, length, length, 0) for token in self._suppressed_first]
        times = None
        if not options.without_timestamps:
            last = -1
            if options.max_initial_timestamp is not None:
                steps = round(options.max_initial_timestamp / self.seconds_of_time)
                vocab = self._model.decoder.config.vocab_size
                last = min(tokens.first_time + steps, vocab - 1)
            times = (tokens.first_time, tokens.end, window.begin, last)
        return one_slot(bans=bans, timestamps=times)

    @property
    def seconds_of_time(self) -> float:
        """Seconds between two times."""
        return 0.01 * self._model.frames_of_time

    def _read_no_speech(self, places: list[int]) -> None:
        """Find the probability of silence in new windows: it is read after the start token."""
        assert self._slots is not None
        start = self._model.tokens.start
        begun = {place: self._running[place].prompt.index(start) + 1 for place in places}
        searches = self._slots.searches
        logits, beams = searches.prompt_logits(begun), searches.state.scores.shape[1]
        for place in places:
            probabilities = logits[place * beams].softmax(dim=0)
            self._no_speech[place] = float(probabilities[self._model.tokens.no_speech])

    def _leave(self, place: int) -> None:
        del self._running[place], self._memories[place]
        if self._slots is not None:
            self._slots.leave(place)

    # ---- results

    def _decoded(self, place: int, window: Window) -> DecodedWindow:
        """Return the first try that is good enough, or else the most probable one.

        Tries that do not repeat themselves too often come first.
        """
        options, no_speech = self._options, self._no_speech[place]
        prefix, tries = list(window.prompt[window.begin :]), list[_Judged]()
        for i, temperature in enumerate(options.temperature):
            if temperature == 0:
                found = self._searched(place, window)
            else:
                found = self._drawn(place, window, temperature, i)
            tokens = [token for token in found.tokens if token != self._model.tokens.end]
            mean = sum(found.log_probs) / (len(tokens) + 1)
            ratio = _compression_ratio(self._model.texts.decode([*prefix, *tokens]).strip())
            tries.append(_Judged(tokens, found.log_probs, mean, ratio))
            if not self._is_poor(mean, ratio, no_speech):
                best = tries[-1]
                break
        else:
            most = options.compression_ratio_threshold
            fair = [one for one in tries if most is not None and one.ratio <= most]
            best = max(fair or tries, key=lambda one: one.mean)
        tokens = best.tokens
        attention = None
        if self._cross is not None:
            assert self._slots is not None
            # A token is predicted as the one before it is read.
            read = [*window.prompt, *tokens]
            weights = self._cross.weights(read, self._slots.searches.caches, place)
            attention = weights[:, window.begin - 1 :]
        return DecodedWindow(
            [*prefix, *tokens],
            [*[0.0] * len(prefix), *best.log_probs[: len(tokens)]],
            best.mean,
            best.ratio,
            no_speech,
            temperature,
            attention,
        )

    def _is_poor(self, mean: float, ratio: float, no_speech: float) -> bool:
        """Whether a text is worth another try at a higher temperature."""
        options = self._options
        is_unlikely = options.log_prob_threshold is not None and mean < options.log_prob_threshold
        if is_unlikely and (
            options.no_speech_threshold is not None and no_speech > options.no_speech_threshold
        ):
            return False  # silence
        most = options.compression_ratio_threshold
        return is_unlikely or (most is not None and ratio > most)

    def _searched(self, place: int, window: Window) -> _Found:
        assert self._slots is not None
        if int(self._slots.searches.state.status[place]):
            raise RuntimeError(
                f"Transcriber: the window at frame {window.seek} has NaN in its logits, or no "
                "token to go on with"
            )
        final = self._slots.final(torch.tensor([place], device="cpu"), 1)
        begin, end = len(window.prompt), int(final.lengths[0, 0])
        tokens = final.sequences[0, 0, begin:end].tolist()
        return _Found(tokens, final.log_probs[0, 0, begin:end].tolist())

    def _drawn(self, place: int, window: Window, temperature: float, number: int) -> _Found:
        """Draw ``best_of`` texts at a temperature above 0; return the most probable one.

        A text has the same tokens for a seed whatever else is decoded. Log-probabilities are those
        among the allowed tokens, before the temperature; the end token counts where it came.
        """
        model, memory, rows = self._model, self._memories[place], self._options.best_of
        new_tokens, rules = self._new_tokens(window), self._rules(window)
        length, end, vocab = len(window.prompt), model.tokens.end, model.decoder.config.vocab_size
        request = BeamRequest(window.prompt, max_new_tokens=new_tokens, num_beams=rows)
        slots = SearchSlots(
            model.decoder,
            1,
            padded(len(memory)),
            num_beams=rows,
            capacity=length + new_tokens + 1,
            num_candidates=1,
            token_rules=new_token_rules(1, rules.bans.shape[1]),
        )
        slots.begin(0, request, memory, rules)
        searches, state = slots.searches, slots.searches.state
        values = torch.empty(2, rows, vocab, dtype=torch.float32, device="cpu")
        seed = (self._options.seed + 1_000_003 * window.seek + number) % (1 << 62)
        seeds = [seed + (row << 40) for row in range(rows)]
        log_probs = torch.zeros(rows, new_tokens, dtype=torch.float32, device="cpu")
        has_ended = torch.zeros(rows, dtype=torch.bool, device="cpu")
        taken = 0
        while taken < new_tokens and not bool(has_ended.all()):
            scores = self._read(searches, values)
            if not bool((scores.amax(dim=1) > -torch.inf).all()):
                raise RuntimeError(
                    "Transcriber: a window has NaN in its logits, or no token to go on with"
                )
            tokens = top_k_top_p_sample(
                scores, temperature=temperature, seed=seeds, position=taken
            ).index
            tokens[has_ended] = end
            of_tokens = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(1)
            log_probs[:, taken] = of_tokens.masked_fill(has_ended, 0.0)
            state.sequences[0, :, length + taken] = tokens
            state.lengths.add_(1)
            has_ended |= tokens == end
            taken += 1
        searches.release()
        found = list[_Found]()
        for row in range(rows):
            drawn = state.sequences[0, row, length : length + taken].tolist()
            count = drawn.index(end) + 1 if end in drawn else taken
            found.append(_Found(drawn[:count], log_probs[row, :count].tolist()))
        return max(found, key=lambda one: sum(one.log_probs) / len(one.log_probs))

    def _read(self, searches: DecodingSearches, values: Tensor) -> Tensor:
        """Read the last tokens; return the logits that the next are chosen by (``ruled``)."""
        searches.read_tokens(values)
        options = self._options
        return ruled(searches, values, options.repetition_penalty, options.no_repeat_ngram_size)
