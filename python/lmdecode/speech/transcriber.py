"""``Transcriber``: sound to text by Whisper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lmdecode._checks import check_bool, check_int, type_error
from lmdecode.speech.audio_files import load_audio
from lmdecode.speech.chunks import cut_at_quiet, merge_speech
from lmdecode.speech.features import HOP, RATE
from lmdecode.speech.file_task import FRAMES_A_SECOND, FileTask
from lmdecode.speech.model import SpeechModel, load_model
from lmdecode.speech.options import APPENDED, PREPENDED, TEMPERATURES, TranscriptionOptions
from lmdecode.speech.segments import Segment, TranscriptionInfo
from lmdecode.speech.voice_activity import speech_of
from lmdecode.speech.window_decoder import WindowDecoder

__all__ = ["Segments", "Transcriber"]

_OP = "Transcriber.transcribe"


class _Run:
    """One call of ``transcribe``: the open sounds, and the decoder of their windows."""

    def __init__(
        self,
        model: SpeechModel,
        options: TranscriptionOptions,
        batch_size: int,
        progress: Callable[[float, float], None] | None,
    ) -> None:
        self._decoder = WindowDecoder(model, options, batch_size)
        self._progress, self._told = progress, -1
        self._tasks: list[tuple[FileTask, int]] = []  # with their frames
        self._closed_frames = 0
        self._lock = threading.RLock()

    def add(self, task: FileTask, frames: int) -> None:
        """Add a sound, to be transcribed with the others."""
        with self._lock:
            self._tasks.append((task, frames))

    def segment_of(self, task: FileTask, segments: Segments) -> Segment | None:
        """Return the next segment of a sound; None at its end."""
        while True:
            with self._lock:  # others may close their sounds between steps
                if task.ready:
                    return task.ready.popleft()
                if task.error is not None:
                    raise task.error
                if task.is_done or segments.is_closed:
                    return None
                self._step()

    def _step(self) -> None:
        self._decoder.submit(window for task, _ in self._tasks for window in task.windows())
        for window, decoded in self._decoder.step():
            task = window.owner
            assert isinstance(task, FileTask)
            if isinstance(decoded, Exception):
                task.error = decoded  # of this sound alone
                self._decoder.drop(task)
            else:
                task.take(window, decoded)
        if self._progress is not None:
            self._tell()

    def _tell(self) -> None:
        assert self._progress is not None
        done = sum(frames if task.is_done else task.frames_done for task, frames in self._tasks)
        if done > self._told:
            self._told = done
            total = sum(frames for _, frames in self._tasks)
            self._progress(done / FRAMES_A_SECOND, total / FRAMES_A_SECOND)

    def leave(self, task: FileTask) -> None:
        """Drop a sound."""
        with self._lock:
            task.is_done = True
            task.ready.clear()
            self._decoder.drop(task)


class Segments(Generator[Segment, None, None]):
    """Iterator over the segments of a sound; each is computed when it is requested.

    ``close()``, which any thread may call, ends it: its windows are dropped within some steps of
    the decoder, and their memory is free.
    """

    def __init__(self, run: _Run, task: FileTask) -> None:
        self._run, self._task = run, task
        self.is_closed = False

    def send(self, value: None) -> Segment:
        """Return the next segment, as ``next()`` does."""
        if not self.is_closed:
            try:
                found = self._run.segment_of(self._task, self)
            except BaseException:
                self.close()
                raise
            if found is not None:
                return found
            self.close()
        raise StopIteration

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Segment:
        """End it, and raise the error."""
        self.close()
        raise kind if value is None else value

    def close(self) -> None:
        """End it; the rest of the sound is not transcribed."""
        if not self.is_closed:
            self.is_closed = True
            self._run.leave(self._task)

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()


class Transcriber:
    """Transcribes sound with a Whisper model.

    Parameters
    ----------
    model : str, path or Decoding
        The folder or the name of a Whisper model of transformers, a folder of CTranslate2, a folder
        that ``Decoding.save`` wrote, which is loaded without transformers, or a ``Decoding``.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        Format of the weights, where they are not packed yet.
    tokenizer : tokenizers.Tokenizer or path, optional
        Tokenizer, or the folder of one. None: the model's own.

    Raises
    ------
    ImportError
        A package is missing; the message names the extra.
    ValueError, TypeError, OSError
        The model is no Whisper model on the CPU, has no tokenizer, or cannot be loaded.

    Examples
    --------
    >>> transcriber = Transcriber("whisper-base-int8")  # doctest: +SKIP
    >>> segments, info = transcriber.transcribe("talk.mp3")  # doctest: +SKIP
    >>> for segment in segments:  # doctest: +SKIP
    ...     print(f"{segment.start:.2f} {segment.end:.2f} {segment.text}")
    """

    def __init__(
        self, model: Any, dtype: str | torch.dtype = "int8", *, tokenizer: Any = None
    ) -> None:
        self._model = load_model(model, dtype, tokenizer)

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows languages and tasks."""
        return self._model.is_multilingual

    @property
    def supported_languages(self) -> list[str]:
        """The codes of the model's languages."""
        return list(self._model.tokens.languages) or ["en"]

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        beam_size: int = 5,
        best_of: int = 5,
        patience: float = 1.0,
        length_penalty: float = 1.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        temperature: float | Sequence[float] = TEMPERATURES,
        compression_ratio_threshold: float | None = 2.4,
        log_prob_threshold: float | None = -1.0,
        no_speech_threshold: float | None = 0.6,
        condition_on_previous_text: bool | None = None,
        prompt_reset_on_temperature: float = 0.5,
        initial_prompt: str | Sequence[int] | None = None,
        prefix: str | None = None,
        hotwords: str | None = None,
        suppress_blank: bool = True,
        suppress_tokens: Sequence[int] | None = (-1,),
        without_timestamps: bool = False,
        max_initial_timestamp: float | None = 1.0,
        max_new_tokens: int | None = None,
        word_timestamps: bool = False,
        prepend_punctuations: str = PREPENDED,
        append_punctuations: str = APPENDED,
        seed: int = 0,
        vad: bool = False,
        vad_parameters: Mapping[str, Any] | None = None,
        batched: bool | None = None,
        batch_size: int = 8,
        progress: Callable[[float, float], None] | None = None,
    ) -> Any:
        """Transcribe a sound, or several.

        Parameters
        ----------
        audio : str, path, binary file, Tensor or array; or a list of these
            A file of any format that FFmpeg reads (package av), or [samples] floats at 16 kHz.
        language : str, optional
            Code or English name. None: detected in the first window.
        task : {"transcribe", "translate"}
            "translate": into English.
        beam_size, patience, length_penalty, repetition_penalty, no_repeat_ngram_size
            Of the search at temperature 0. ``beam_size`` is 5; 1 is greedy. The last two act on
            logits at each temperature, and see what a window generates: no prompt, no prefix.
        temperature : float or sequence of float
            Tried one after the other until a text is good enough; (0, 0.2, ..., 1.0).
        best_of, seed : int
            Above temperature 0 the best of so many draws is taken, whose noise has this seed.
        compression_ratio_threshold, log_prob_threshold : float or None
            A text that zlib compresses further (2.4), or whose mean log-probability is lower
            (-1.0), is not good enough. It is the mean over the text and its end, among the tokens
            that the rules allow. If none is good enough, the most probable one is taken, and one
            that zlib compresses less if there is any.
        no_speech_threshold : float or None
            A window in which silence is more probable (0.6), and the text less probable than
            ``log_prob_threshold``, has no text.
        condition_on_previous_text : bool, optional
            Whether earlier text is a prompt. None: unless ``batched``.
        prompt_reset_on_temperature : float
            Text of a higher temperature is no prompt, nor any before it.
        initial_prompt : str or sequence of int, optional
            Text in front of the first window, or its tokens; if ``batched``, of every window.
        hotwords : str, optional
            Words to expect, in front of every window.
        prefix : str, optional
            Beginning of the text of the first window.
        without_timestamps : bool
            Whether a window is one segment, False.
        word_timestamps : bool
            Whether segments have words, and begin and end with them, False.
        prepend_punctuations, append_punctuations : str
            Punctuation that belongs to the word behind it, and before it.
        max_new_tokens : int, optional
            Most tokens of a window.
        suppress_tokens : sequence of int
            Never generated; -1, the default, stands for those of the model's generation config.
        suppress_blank : bool
            Whether no text begins with what the generation config forbids there, True.
        max_initial_timestamp : float or None
            The first time of a window at most, 1.0 seconds.
        vad : bool
            Whether only what silero-vad takes for speech is transcribed (package silero-vad).
        vad_parameters : mapping, optional
            Arguments of silero-vad's ``get_speech_timestamps``, such as ``threshold``,
            ``min_silence_duration_ms`` and, where windows are decoded together,
            ``max_speech_duration_s``: longer speech is cut at its last pause.
        batched : bool, optional
            Whether windows are decoded independently of each other, ``batch_size`` at a time:
            pieces of speech with ``vad``, or else parts cut where it is quietest. Otherwise a
            window begins where the text of the last one ended, as Whisper's authors do it. None:
            True if ``condition_on_previous_text`` is False.
        batch_size : int
            Windows of all sounds that are decoded together.
        progress : callable, optional
            Called with the seconds that are transcribed and those of all open sounds, each time
            they grow.

        Returns
        -------
        (Segments, TranscriptionInfo)
            The segments are computed as they are iterated over; ``close()`` ends the work. For a
            list: an iterator of such pairs in the order of the list. As many sounds as
            ``batch_size`` are open at a time, and transcribed together.

        Raises
        ------
        ImportError
            A package is missing; the message names the extra.
        ValueError, TypeError, OSError
            Names the argument, what came and what was expected; or the file.
        """
        op, bool_or_none = _OP, "a bool or None"
        if batched is not None:
            check_bool(op, "batched", batched, kind=bool_or_none)
        if condition_on_previous_text is not None:
            name = "condition_on_previous_text"
            check_bool(op, name, condition_on_previous_text, kind=bool_or_none)
            if batched and condition_on_previous_text:
                raise ValueError(
                    f"{op}: {name} is True beside batched; expected one of them, as windows that "
                    "are decoded together do not know each other"
                )
        if batched is None:
            batched = condition_on_previous_text is False
        if condition_on_previous_text is None:
            condition_on_previous_text = not batched
        asked = TranscriptionOptions(
            task=task,
            beam_size=beam_size,
            best_of=best_of,
            patience=patience,
            length_penalty=length_penalty,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            temperature=temperature,
            compression_ratio_threshold=compression_ratio_threshold,
            log_prob_threshold=log_prob_threshold,
            no_speech_threshold=no_speech_threshold,
            condition_on_previous_text=condition_on_previous_text,
            prompt_reset_on_temperature=prompt_reset_on_temperature,
            initial_prompt=initial_prompt,
            prefix=prefix,
            hotwords=hotwords,
            suppress_blank=suppress_blank,
            suppress_tokens=suppress_tokens,
            without_timestamps=without_timestamps,
            max_initial_timestamp=max_initial_timestamp,
            max_new_tokens=max_new_tokens,
            word_timestamps=word_timestamps,
            prepend_punctuations=prepend_punctuations,
            append_punctuations=append_punctuations,
            seed=seed,
        )
        model = self._model
        code = None if language is None else model.code_of(language)
        if not model.is_multilingual and asked.task != "transcribe":
            raise ValueError(
                f'{_OP}: task is {asked.task!r}; expected "transcribe", as the model knows English '
                "alone"
            )
        vocab = model.decoder.config.vocab_size
        for name, given in (
            ("initial_prompt", asked.initial_prompt),
            ("suppress_tokens", asked.suppress_tokens),
        ):
            if given is not None and not isinstance(given, str) and max(given, default=0) >= vocab:
                raise ValueError(f"{_OP}: {name} is {list(given)}; expected tokens below {vocab}")
        if asked.word_timestamps and not model.alignment_heads:
            raise ValueError(
                f"{_OP}: word_timestamps is True; expected False, as the model's generation config "
                "has no alignment_heads"
            )
        check_bool(_OP, "vad", vad)
        batch_size = check_int(_OP, "batch_size", batch_size, 1, 1 << 10, limits="1 to 1024")
        if progress is not None and not callable(progress):
            raise type_error(_OP, "progress", progress, "a callable or None")
        run = _Run(model, asked, batch_size, progress)
        opener = _Opener(model, asked, code, vad, vad_parameters, batched, run)
        if isinstance(audio, (list, tuple)):
            return _read_ahead(opener.open, deque(audio), batch_size)
        return opener.open(audio)

    def detect_language(self, audio: Any) -> tuple[str, float, list[tuple[str, float]]]:
        """Return the language of a sound's first window, its probability, and those of all.

        Parameters
        ----------
        audio
            See ``transcribe``.

        Raises
        ------
        ValueError
            The model is English-only.
        """
        model = self._model
        if not model.is_multilingual:
            raise ValueError(
                "Transcriber.detect_language: the model knows English alone; expected one with "
                "several languages"
            )
        features = model.features(load_audio(audio)[: model.frames * HOP], model.frames)
        with torch.no_grad():
            found = model.language_probabilities(model.encode(features))
        return (*found[0], found)


class _Opener:
    """Opens sounds: reads them, and finds speech and language."""

    def __init__(
        self,
        model: SpeechModel,
        options: TranscriptionOptions,
        language: str | None,
        vad: bool,
        vad_parameters: Mapping[str, Any] | None,
        batched: bool,
        run: _Run,
    ) -> None:
        self._model, self._options, self._language = model, options, language
        self._vad, self._vad_parameters, self._batched = vad, vad_parameters, batched
        self._run = run

    @torch.no_grad()
    def open(self, audio: Any) -> tuple[Segments, TranscriptionInfo]:
        """Return the segments of a sound, none computed yet, and its ``TranscriptionInfo``."""
        model, longest = self._model, self._model.frames
        samples = load_audio(audio)
        speech = None
        if self._vad:
            most = longest if self._batched else None
            speech = speech_of(samples, most, self._vad_parameters)
        features = model.features(samples, longest if len(samples) <= longest * HOP else 0)
        frames = min(-(-len(samples) // HOP), features.shape[1])
        parts = [(0, frames)] if speech is None else speech
        if self._batched:
            cuts = (cut_at_quiet(features, end, longest, begin) for begin, end in parts)
            parts = [part for pieces in cuts for part in pieces]
        if speech is not None:
            parts = merge_speech(parts, longest)
        parts = [(begin, end) for begin, end in parts if end > begin]
        is_whole = speech is None and not self._batched
        # transformers has zeros there for the last window of a long sound.
        silence = 0.0 if is_whole else float(features.min()) if features.numel() else 0.0
        task = FileTask(
            model,
            self._options,
            self._language or "en",
            features,
            parts,
            in_order=not self._batched,
            silence=silence,
        )
        language, probabilities = self._language, None
        if language is None and model.is_multilingual:
            begin, end = parts[0] if parts else (0, frames)
            memory = model.encode(task.window_features(begin, end))
            probabilities = model.language_probabilities(memory)
            language = probabilities[0][0]
            task.set_language(language, memory)
        duration = len(samples) / RATE
        info = TranscriptionInfo(
            language=language or "en",
            language_probability=1.0 if probabilities is None else probabilities[0][1],
            duration=duration,
            duration_after_vad=duration if speech is None else _seconds(speech),
            all_language_probs=probabilities,
            transcription_options=self._options,
            vad_options=dict(self._vad_parameters or {}) if self._vad else None,
        )
        self._run.add(task, frames)
        return Segments(self._run, task), info


def _seconds(parts: Iterable[tuple[int, int]]) -> float:
    return sum(end - begin for begin, end in parts) / FRAMES_A_SECOND


def _read_ahead(
    open_sound: Callable[[Any], tuple[Segments, TranscriptionInfo]], sounds: deque[Any], most: int
) -> Iterator[tuple[Segments, TranscriptionInfo]]:
    """Yield sounds in order, each once the sounds after it are open, too."""
    opened: deque[tuple[Segments, TranscriptionInfo] | Exception] = deque()
    try:
        while sounds or opened:
            while sounds and len(opened) < most:
                try:
                    opened.append(open_sound(sounds.popleft()))
                except Exception as error:  # those before it come first
                    opened.append(error)
            first = opened.popleft()
            if isinstance(first, Exception):
                raise first
            yield first
    finally:
        for pair in opened:
            if not isinstance(pair, Exception):
                pair[0].close()
