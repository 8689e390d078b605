"""``lmdecode transcribe``: files of sound to text, subtitles or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lmdecode.linear.formats import FORMATS as WEIGHT_FORMATS
from lmdecode.speech import Segment, Transcriber, TranscriptionInfo
from lmdecode.speech.formats import FORMATS, to_text
from lmdecode.speech.options import TASKS

__all__ = ["add_command"]

_FORMATS = ("txt", "json", "verbose_json", "srt", "vtt")
_SUFFIXES = {"verbose_json": "json"}
_TICKS = 30  # of the bar


class _CommandError(Exception):
    """Ends the command with its text, a line for the user."""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    about = "Write what is said in files of sound or video."
    parser = commands.add_parser("transcribe", help=about, description=about)
    parser.add_argument(
        "model",
        help="a Whisper model: a folder or name of transformers, a folder of CTranslate2, or one "
        "that Decoding.save wrote",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--language", metavar="CODE", help="default: detected")
    parser.add_argument("--task", choices=TASKS, default="transcribe", help="translate: to English")
    parser.add_argument("--beam-size", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--word-timestamps",
        action="store_true",
        help="times of words, in JSON; segments keep to them",
    )
    parser.add_argument("--vad", action="store_true", help="leave out what is not speech")
    parser.add_argument("--format", choices=_FORMATS, default="txt", help="default txt")
    parser.add_argument(
        "--output-dir", type=Path, metavar="FOLDER", help="a file for each; default: print"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch")
    parser.add_argument(
        "--dtype", default="int8", metavar="FORMAT", help=f"{', '.join(WEIGHT_FORMATS)}"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="decode so many windows together, each without knowing the text before it; default: "
        "one after the other",
    )
    parser.set_defaults(run=_run)


def _bar(name: str) -> Callable[[float, float], None] | None:
    """Return what shows seconds on a terminal; None where there is none."""
    if not sys.stderr.isatty():
        return None

    def show(done: float, total: float) -> None:
        ticks = int(_TICKS * done / total) if total else _TICKS
        bar = f"{'#' * ticks}{'.' * (_TICKS - ticks)}"
        print(f"\r\033[K{name} {bar} {done:.0f} of {total:.0f} s", end="", file=sys.stderr)

    return show


def _clear(progress: object) -> None:
    if progress is not None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _targets(given: argparse.Namespace) -> dict[Path, Path | None]:
    """Return the file that each transcript is written to; None: it is printed."""
    if given.output_dir is None:
        return dict.fromkeys(given.files)
    suffix = _SUFFIXES.get(given.format, given.format)
    targets: dict[Path, Path | None] = {}
    for file in given.files:
        target = given.output_dir / f"{file.stem}.{suffix}"
        if target in targets.values():
            target = given.output_dir / f"{file.name}.{suffix}"
        targets[file] = target
    given.output_dir.mkdir(parents=True, exist_ok=True)
    return targets


def _shown(
    segments: Iterable[Segment], info: TranscriptionInfo, form: str, progress: object
) -> None:
    """Print a transcript; text as it comes, a line for each segment."""
    if form == "txt":
        for segment in segments:
            _clear(progress)
            print(to_text([segment], info), end="", flush=True)
        return
    written = FORMATS[form](segments, info)
    _clear(progress)
    print(written, end="" if written.endswith("\n") else "\n", flush=True)


def _transcribe(given: argparse.Namespace) -> None:
    if given.threads is not None:
        if given.threads < 1:
            raise _CommandError(f"--threads is {given.threads}; expected at least 1")
        torch.set_num_threads(given.threads)
    for file in given.files:
        if not file.is_file():
            raise _CommandError(f"{file}: there is no such file")
    targets = _targets(given)
    transcriber = Transcriber(given.model, given.dtype)
    options: dict[str, Any] = {
        "language": given.language,
        "task": given.task,
        "beam_size": given.beam_size,
        "word_timestamps": given.word_timestamps,
        "vad": given.vad,
    }
    if given.batch_size is not None:
        options |= {"batched": True, "batch_size": given.batch_size}
    for file, target in targets.items():
        progress = _bar(file.name)
        segments, info = transcriber.transcribe(file, progress=progress, **options)
        if target is None:
            _shown(segments, info, given.format, progress)
        else:
            target.write_text(FORMATS[given.format](segments, info), encoding="utf-8")
        _clear(progress)


def _run(given: argparse.Namespace) -> int:
    try:
        _transcribe(given)
    except (_CommandError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"transcribe: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntranscribe: stopped", file=sys.stderr)
        return 130
    return 0
