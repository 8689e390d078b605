"""CTranslate2 as an engine of the benchmark."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

from benchmarks.decoder.whole_model.engine import CLOCKS, Engine

_TYPES = {"float32": None, "int8": "int8"}


def _converted(folder: Path, number_format: str) -> Path:
    """Return the folder of the converted model, written where it is not there yet."""
    to = folder / f"ctranslate2-{number_format}"
    if to.exists():
        return to
    from ctranslate2.converters.transformers import _MODEL_LOADERS
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    spec = _MODEL_LOADERS[type(model.config).__name__].get_model_spec(model)
    spec.register_vocabulary([str(token) for token in range(model.config.vocab_size)])
    spec.config.layer_norm_epsilon = model.config.rms_norm_eps
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "1", "2", "0"
    spec.validate()
    spec.optimize(quantization=_TYPES[number_format])
    to.mkdir()
    spec.save(str(to))
    return to


class CTranslate2Engine(Engine):
    """A generator whose tokens are chosen within: a step is what lies between two of them."""

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        super().__init__(folder, number_format, threads, longest)
        self._generator = ctranslate2.Generator(
            str(_converted(folder, number_format)),
            device="cpu",
            compute_type=number_format,
            inter_threads=1,
            intra_threads=threads,
        )

    def version(self) -> str:
        return ctranslate2.__version__

    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        logits = self._generator.forward_batch([[str(token) for token in tokens]])
        return np.array(logits)[0, -1].astype(np.float32)

    def _generate(self, tokens: Sequence[int], rows: int, new_tokens: int, **options: Any) -> None:
        self._generator.generate_batch(
            [[str(token) for token in tokens]] * rows,
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
            end_token=[],
            **options,
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self._generate(tokens, 1, 1, beam_size=1)

    def time_step(self, tokens: Sequence[int], rows: int, count: int, clock: str) -> float:
        times: list[float] = []

        def token(result: Any) -> bool:
            if result.batch_id == 0:
                times.append(CLOCKS[clock]())
            return False

        # The prompt but for its end is read once, in the first call, and copied to the rows.
        start = [str(token) for token in tokens[:-1]]
        self._generate(tokens[-1:], rows, count + 1, callback=token, static_prompt=start)
        return statistics.median(b - a for a, b in itertools.pairwise(times))


ENGINE = CTranslate2Engine
