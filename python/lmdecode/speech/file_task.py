"""The transcription of one sound: its windows, in order or all at once, and their segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.speech.alignment import TimedTokens, TimedWord, first_positions, words_of
from lmdecode.speech.features import HOP, RATE
from lmdecode.speech.model import SpeechModel
from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.segments import Segment, Word
from lmdecode.speech.window_decoder import DecodedWindow, Window
from lmdecode.speech.windows import Piece, split_window
from lmdecode.speech.word_times import TimedPiece, refine

__all__ = ["FRAMES_A_SECOND", "FileTask"]

FRAMES_A_SECOND = RATE // HOP


class FileTask:
    """Windows of a sound for a ``WindowDecoder``, and segments of what it finds.

    ``features`` is [channels, frames or more], with silence after a sound shorter than a window;
    ``silence`` is the value that pads shorter windows. ``parts`` are first and last frames to
    transcribe, in order and apart. With ``in_order`` a window begins where the text of the last one
    ended, and may follow on from it; otherwise each part, which fits a window, is one of its own.

    ``ready`` has the segments that were found and not taken, ``frames_done`` is the frame before
    which all is transcribed, and ``error`` is the error that ended the task, after the ready
    segments.
    """

    def __init__(
        self,
        model: SpeechModel,
        options: TranscriptionOptions,
        language: str,
        features: Tensor,
        parts: Sequence[tuple[int, int]],
        *,
        in_order: bool,
        silence: float,
    ) -> None:
        self._model, self._options, self._language = model, options, language
        self._features, self._parts = features, list(parts)
        self._in_order, self._silence = in_order, silence
        self._first_memory: Tensor | None = None
        self.ready: deque[Segment] = deque()
        self.is_done = not self._parts
        self.frames_done = 0
        self.error: Exception | None = None
        self._part = 0  # the part that is being transcribed
        self._seek = self._parts[0][0] if self._parts else 0
        self._is_asked = False  # for what may be decoded now
        self._found: dict[int, tuple[Window, DecodedWindow]] = {}  # out of order, by windows
        self._count = 0  # segments
        self._spoken = 0  # frame at which the last word ends
        self._earlier = self._initial_prompt()
        self._reset_at = 0  # earlier text that prompts no longer contain

    def set_language(self, language: str, first_memory: Tensor) -> None:
        """Set the language detected in the first window, and that window's memory."""
        self._language, self._first_memory = language, first_memory

    # ---- windows

    def windows(self) -> list[Window]:
        """Return the windows that can be decoded now, each once."""
        if self.is_done or self._is_asked or self.error is not None:
            return []
        self._is_asked = True
        if self._in_order:
            return [self._window(self._seek, self._parts[self._part][1])]
        return [self._window(begin, end) for begin, end in self._parts]

    def _window(self, begin: int, end: int) -> Window:
        prompt, text_begins = self._prompt(is_first=begin == self._parts[0][0])
        return Window(self, lambda: self._encode(begin, end), prompt, text_begins, begin)

    def _encode(self, begin: int, end: int) -> Tensor:
        memory, self._first_memory = self._first_memory, None
        if memory is not None and begin == self._parts[0][0]:
            return memory
        return self._model.encode(self.window_features(begin, end))

    def window_features(self, begin: int, end: int) -> Tensor:
        """Return [channels, frames of a window] from a frame on, for a part that ends at another.

        If the sound fits a window, the features have the silence after it.
        """
        whole = self._features
        fits = whole.shape[1] <= self._model.frames
        part = whole[:, begin:] if fits else whole[:, begin:end]
        part = part[:, : self._model.frames]
        if part.shape[1] == self._model.frames:
            return part
        found = torch.full(
            (len(part), self._model.frames), self._silence, dtype=torch.float32, device="cpu"
        )
        found[:, : part.shape[1]] = part
        return found

    # ---- prompts

    def _initial_prompt(self) -> list[int]:
        given = self._options.initial_prompt
        if given is None:
            return []
        return self._model.texts.encode(given) if isinstance(given, str) else list(given)

    def _prompt(self, *, is_first: bool) -> tuple[tuple[int, ...], int]:
        """Return the tokens in front of a window's text, and where the text begins in them."""
        options, tokens, texts = self._options, self._model.tokens, self._model.texts
        most = self._model.capacity // 2 - 1
        before: list[int] = []
        prefix = texts.encode(options.prefix)[:most] if options.prefix and is_first else []
        most -= len(prefix)
        if options.hotwords and not prefix:
            before = texts.encode(options.hotwords)[:most]
        earlier = self._earlier[self._reset_at :] if self._in_order or is_first else []
        if not self._in_order and not is_first:
            earlier = self._initial_prompt()
        room = most - len(before)
        if room > 0:
            before += earlier[-room:]
        prompt = [tokens.previous, *before] if before else []
        prompt.append(tokens.start)
        if tokens.languages:
            prompt.append(tokens.languages[self._language])
            prompt.append(tokens.tasks[options.task])
        if options.without_timestamps:
            prompt.append(tokens.no_timestamps)
        begin = len(prompt)
        if prefix:
            if not options.without_timestamps:
                prompt.append(tokens.first_time)
            prompt += prefix
        return tuple(prompt), begin

    # ---- results

    def take(self, window: Window, decoded: DecodedWindow) -> None:
        """Make segments of a decoded window."""
        if self._in_order:
            self._is_asked = False
            self._take_next(window, decoded)
            return
        self._found[window.seek] = (window, decoded)
        while not self.is_done and self._parts[self._part][0] in self._found:
            self._take_next(*self._found.pop(self._parts[self._part][0]))

    def _take_next(self, window: Window, decoded: DecodedWindow) -> None:
        options, model = self._options, self._model
        end = self._parts[self._part][1]
        frames = min(model.frames, end - window.seek)
        step = frames
        if not self._is_silent(decoded):
            pieces, step = split_window(
                decoded.tokens,
                model.tokens.first_time,
                model.frames_of_time,
                frames,
                is_cut=self._in_order,
            )
            # A window that does not advance would repeat for ever.
            step = step if step > 0 else frames
            self._add(window, decoded, pieces, min(step, frames))
            is_hot = decoded.temperature > options.prompt_reset_on_temperature
            if not options.condition_on_previous_text or is_hot:
                self._reset_at = len(self._earlier)
        self._seek = window.seek + step
        if not self._in_order or self._seek >= end:
            self._part += 1
            if self._part == len(self._parts):
                self.is_done = True
                self._found.clear()
            else:
                self._seek = self._parts[self._part][0]
        self.frames_done = min(self._seek, end) if self._in_order else end

    def _is_silent(self, decoded: DecodedWindow) -> bool:
        options = self._options
        if options.no_speech_threshold is None:
            return False
        if decoded.no_speech_prob <= options.no_speech_threshold:
            return False
        least = options.log_prob_threshold
        return least is None or decoded.avg_logprob <= least

    def _add(
        self, window: Window, decoded: DecodedWindow, pieces: Sequence[Piece], frames: int
    ) -> None:
        """Make segments of the pieces that have a text and a length.

        ``frames`` counts the window's frames, or the frames before the next one.
        """
        options, times = self._options, self._times(window, decoded)
        found: list[tuple[TimedPiece, list[int], str]] = []
        for piece in pieces:
            tokens = decoded.tokens[piece.begin : piece.end]
            text = self._model.texts.decode(tokens)
            start, stop = self._span(window, piece)
            if start < stop and text.strip():
                words = [] if times is None else self._words(decoded, piece, times)
                found.append((TimedPiece(start, stop, words), tokens, text))
        self._spoken = refine(
            [timed for timed, _, _ in found],
            self._spoken,
            window.seek + frames,
            options.prepend_punctuations,
            options.append_punctuations,
        )
        for timed, tokens, text in found:
            self._earlier += tokens
            self._count += 1
            self.ready.append(
                Segment(
                    id=self._count,
                    seek=window.seek,
                    start=timed.start / FRAMES_A_SECOND,
                    end=timed.stop / FRAMES_A_SECOND,
                    text=text,
                    tokens=tokens,
                    avg_logprob=decoded.avg_logprob,
                    compression_ratio=decoded.compression_ratio,
                    no_speech_prob=decoded.no_speech_prob,
                    words=None if times is None else [_word(word) for word in timed.words],
                    temperature=decoded.temperature,
                )
            )

    def _span(self, window: Window, piece: Piece) -> tuple[int, int]:
        """Return the frames of the sound at which a piece begins and ends by its own times."""
        # The last time may be after the end of the sound.
        stop = max(piece.start, min(piece.stop, self._parts[-1][1] - window.seek))
        if piece.stop > piece.start:
            stop = max(stop, min(piece.start + self._model.frames_of_time, piece.stop))
        return window.seek + piece.start, window.seek + stop

    # ---- words

    def _times(self, window: Window, decoded: DecodedWindow) -> list[int] | None:
        """Return the frames of the sound at which the tokens and the end after them begin.

        None if words are not requested.
        """
        if decoded.attention is None:
            return None
        model = self._model
        frames = min(model.frames, self._parts[self._part][1] - window.seek)
        positions = max(1, frames // model.frames_of_time)
        # A time in front of all text has no frame of the sound.
        first = int(bool(decoded.tokens) and decoded.tokens[0] >= model.tokens.first_time)
        attention = decoded.attention[:, first:, :positions]
        found = [0] * first + first_positions(attention, model.median_width)
        return [window.seek + position * model.frames_of_time for position in found]

    def _words(self, decoded: DecodedWindow, piece: Piece, times: Sequence[int]) -> list[TimedWord]:
        """Return the words of a piece that has a text."""
        places = [
            place
            for place in range(piece.begin, piece.end)
            if decoded.tokens[place] < self._model.tokens.end
        ]
        timed = TimedTokens(
            [decoded.tokens[place] for place in places],
            [times[place] for place in (*places, places[-1] + 1)],
            [decoded.log_probs[place] for place in places],
        )
        return words_of(timed, self._model.texts, self._language)


def _word(word: TimedWord) -> Word:
    start, end = word.start / FRAMES_A_SECOND, word.stop / FRAMES_A_SECOND
    return Word(start, end, word.text, word.probability)
