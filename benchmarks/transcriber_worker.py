"""One side of ``benchmarks.transcriber``: reads a set-up line, then cases, and answers each.

It runs in the environment of a peer, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Transcribe = Callable[[Sequence[Any], str, int], list[str]]


def _lmdecode(model: str, dtype: str, options: dict[str, Any]) -> Transcribe:
    from lmdecode import Transcriber

    transcriber = Transcriber(model, dtype)

    def run(sounds: Sequence[Any], way: str, num_beams: int) -> list[str]:
        more = {"batched": True, "vad": True} if way == "together" else {}
        found = transcriber.transcribe(list(sounds), language="en", beam_size=num_beams, **more)
        return ["".join(segment.text for segment in segments) for segments, _ in found]

    return run


def _faster_whisper(model: str, dtype: str, options: dict[str, Any]) -> Transcribe:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    whisper = WhisperModel(model, device="cpu", compute_type=dtype, cpu_threads=options["threads"])
    together = BatchedInferencePipeline(whisper)

    def run(sounds: Sequence[Any], way: str, num_beams: int) -> list[str]:
        texts = []
        asked: dict[str, Any] = {"language": "en", "beam_size": num_beams}
        for sound in sounds:
            if way == "together":
                segments, _ = together.transcribe(
                    sound, batch_size=8, without_timestamps=False, **asked
                )
            else:
                segments, _ = whisper.transcribe(sound, **asked)
            texts.append("".join(segment.text for segment in segments))
        return texts

    return run


def _transformers(model: str, dtype: str, options: dict[str, Any]) -> Transcribe:
    import torch
    from transformers import WhisperFeatureExtractor, pipeline

    import lmdecode
    from lmdecode.formats.ctranslate2 import load_tokenizer

    loaded = lmdecode.Decoding.from_pretrained(model, "float32").model
    pipe = pipeline(
        "automatic-speech-recognition",
        model=loaded.to(getattr(torch, dtype)),
        tokenizer=load_tokenizer(model),
        feature_extractor=WhisperFeatureExtractor(),
    )
    is_multilingual = getattr(loaded.generation_config, "is_multilingual", False)

    def run(sounds: Sequence[Any], way: str, num_beams: int) -> list[str]:
        asked: dict[str, Any] = {
            "num_beams": num_beams,
            "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            "compression_ratio_threshold": 2.4,
            "logprob_threshold": -1.0,
            "no_speech_threshold": 0.6,
        }
        if is_multilingual:
            asked |= {"language": "en", "task": "transcribe"}
        more: dict[str, Any] = {"batch_size": 8} if len(sounds) > 1 else {}
        asked["condition_on_prev_tokens"] = way == "in order"
        found = pipe([*sounds], return_timestamps=True, generate_kwargs=asked, **more)
        return [one["text"] for one in found]

    return run


_PEERS = {"lmdecode": _lmdecode, "faster-whisper": _faster_whisper, "transformers": _transformers}


def main() -> None:
    """Serve until the input ends."""
    # Nothing else may write to the pipe of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    if setup["peer"] != "faster-whisper":
        import torch

        torch.set_num_threads(setup["threads"])
    run = _PEERS[setup["peer"]](setup["model"], setup["dtype"], setup)
    sounds = dict(np.load(setup["sounds"]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        given = [sounds[name] for name in case["sounds"]]
        cpu, wall = time.process_time(), time.perf_counter()
        texts = run(given, case["way"], case["num_beams"])
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps([*seconds, texts]), file=answers, flush=True)


if __name__ == "__main__":
    main()
