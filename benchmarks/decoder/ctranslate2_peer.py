"""A Marian model of transformers as a translator of CTranslate2."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def translator(model: Any, compute_type: str) -> Any:
    """Return a ``ctranslate2.Translator`` of one thread, of whose tokens ``"7"`` is token 7.

    The last token of the model's vocabulary must be its padding, whose embedding is 0: CTranslate2
    has no such token, and begins with a zero embedding.
    """
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    spec = MarianMTLoader().get_model_spec(model)
    vocabulary = [str(token) for token in range(model.config.vocab_size - 1)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    end = str(model.config.eos_token_id)
    spec.config.eos_token = spec.config.decoder_start_token = spec.config.bos_token = end
    spec.config.unk_token = "1"
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None if compute_type == "float32" else compute_type)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return ctranslate2.Translator(
            str(Path(folder)),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=1,
        )
