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
from lmdecode.beam.engine.slots import begin_search
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import (
    ALWAYS,
    TokenRules,
    new_token_rules,
    one_slot,
    write_token_rules,
)
from lmdecode.decoder.cross_attention import CrossAttention
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.state import padded
from lmdecode.speech.model import SpeechModel
from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.rules import ruled
from lmdecode.speech.sampling import draw

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
        self._searches: DecodingSearches | None = None
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
        searches, self._searches = self._searches, None
        if searches is not None:
            searches.release()

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
            assert self._searches is not None
            penalties = self._options.repetition_penalty, self._options.no_repeat_ngram_size
            ended = list[int]()
            for _ in range(_STEPS):
                self._searches.read_tokens(self._values)
                self._searches.choose(ruled(self._searches, self._values, *penalties))
                goes_on = self._searches.are_running().tolist()
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
        if self._searches is None:
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
        searches = self._searches
        if searches is None:
            searches = self._searches = self._new_searches(padded(len(memory)))
        places = torch.tensor([place], device="cpu")
        searches.read_memory(memory[None], torch.tensor([len(memory)], device="cpu"), places)
        begin_search(searches.state, searches.parameters, place, self._request(window))
        write_token_rules(searches.token_rules, place, self._rules(window))
        self._running[place], self._memories[place] = window, memory

    def _new_searches(self, source: int) -> DecodingSearches:
        options = self._options
        is_search = options.temperature[0] == 0
        beams = options.beam_size if is_search else 1
        request = BeamRequest([0], max_new_tokens=1, num_beams=beams, patience=options.patience)
        state = new_beam_state(
            self._places,
            beams,
            self._model.capacity,
            num_hypotheses=request.num_hypotheses,
            keep_log_probs=True,
        )
        state.done.fill_(1)
        shape = (2, self._places * beams, self._model.decoder.config.vocab_size)
        self._values = torch.zeros(shape, dtype=torch.float32, device="cpu")
        return DecodingSearches(
            self._model.decoder,
            state,
            beam_parameters(self._places, 1, end_tokens=[[-1]] * self._places),
            new_token_rules(self._places, len(self._suppressed) + len(self._suppressed_first)),
            source,
            num_candidates=2 * beams,
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
        assert self._searches is not None
        searches = self._searches
        state, prompts = searches.state, searches.parameters.prompt_lengths
        kept = [part.clone() for part in (state.done, state.lengths, prompts)]
        state.done.fill_(1)
        for place in places:
            at = self._running[place].prompt.index(self._model.tokens.start)
            state.done[place] = 0
            state.lengths[place] = prompts[place] = at + 1
        logits = searches.read_tokens()
        for part, before in zip((state.done, state.lengths, prompts), kept, strict=True):
            part.copy_(before)
        beams = state.scores.shape[1]
        for place in places:
            probabilities = logits[place * beams].softmax(dim=0)
            self._no_speech[place] = float(probabilities[self._model.tokens.no_speech])

    def _leave(self, place: int) -> None:
        del self._running[place], self._memories[place]
        if self._searches is not None:
            self._searches.state.done[place] = 1

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
            assert self._searches is not None
            # A token is predicted as the one before it is read.
            read = [*window.prompt, *tokens]
            weights = self._cross.weights(read, self._searches.caches, place)
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
        assert self._searches is not None
        state = self._searches.state
        if int(state.status[place]):
            raise RuntimeError(
                f"Transcriber: the window at frame {window.seek} has NaN in its logits, or no "
                "token to go on with"
            )
        final = beam_finalize(
            state, self._searches.parameters, 1, slots=torch.tensor([place], device="cpu")
        )
        begin, end = len(window.prompt), int(final.lengths[0, 0])
        tokens = final.sequences[0, 0, begin:end].tolist()
        return _Found(tokens, final.log_probs[0, 0, begin:end].tolist())

    def _drawn(self, place: int, window: Window, temperature: float, number: int) -> _Found:
        rows = draw(
            self._model,
            self._memories[place],
            window.prompt,
            self._rules(window),
            self._options,
            temperature=temperature,
            new_tokens=self._new_tokens(window),
            seed=self._options.seed + 1_000_003 * window.seek + number,
        )
        tokens, log_probs = max(rows, key=lambda row: sum(row[1]) / len(row[1]))
        return _Found(tokens, log_probs)
