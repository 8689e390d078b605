"""A GGUF file as a model of transformers without its weights, and the weights one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lmdecode.readers.gguf.configs import config_entries
from lmdecode.readers.gguf.metadata import Facts, end_tokens, refused
from lmdecode.readers.gguf.reader import GgufFile
from lmdecode.readers.gguf.weights import FurtherBlock, Weights

__all__ = ["load_parts"]


def _divide_frequencies(facts: Facts, model: Any) -> None:
    """Take the factors of Llama 3's frequencies, which the file has as a tensor."""
    if "rope_freqs.weight" not in facts.file.tensors or facts.architecture == "gemma4":
        return  # of Gemma 4 they are in the config
    factors = facts.file.tensor("rope_freqs.weight")
    frequencies = getattr(
        getattr(getattr(model, "model", None), "rotary_emb", None), "inv_freq", None
    )
    if frequencies is None or factors.shape != frequencies.shape:
        raise refused(
            facts.file,
            f"has rope_freqs.weight of shape {list(factors.shape)}; expected one factor for each "
            "pair of features that turns",
        )
    assert isinstance(factors, Tensor)
    frequencies.div_(factors.float())


@contextmanager
def _refused_by_its_metadata(facts: Facts) -> Iterator[None]:
    """Raise ValueError that names the file where a model cannot be made of its entries."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise refused(
            facts.file, f"has metadata that make no {facts.architecture} model: {error}"
        ) from error


def load_parts(
    path: str | os.PathLike[str], *, keeps_blocks: bool = False, mtp: bool = False
) -> tuple[Any, Any, Any]:
    """Return the model of a file without its weights, and its config and weights for ``Decoding``.

    The file is mapped; weights are read, and dequantized, one by one as they are asked for. With
    ``keeps_blocks`` linear weights and the embedding stay in the blocks of the file: they are
    ``QuantizedWeight``, or ``JoinedWeight`` for queries, keys and values that are not of one kind,
    and floats where a factor is folded in. ``mtp``: with the weights that predict further tokens.
    Raises OSError without such a file, and ValueError for one that is damaged, holds no model that
    there is, or nothing that predicts further tokens.
    """
    from transformers import AutoConfig, GenerationConfig

    from lmdecode.readers.transformers.causal_models import causal_model_of
    from lmdecode.readers.transformers.mtp import mtp_of
    from lmdecode.readers.transformers.stand_in import skeleton

    file = GgufFile(path)
    facts = Facts(file)
    entries = config_entries(facts)
    with _refused_by_its_metadata(facts):
        config = AutoConfig.for_model(**entries)
        config._name_or_path = str(path)
        ends = end_tokens(facts, config.vocab_size)
        specials = {name: entries[name] for name in ("bos_token_id", "pad_token_id")}
        model = skeleton(config, GenerationConfig(**specials, eos_token_id=ends or None))
    weights = Weights(facts, model, keeps_blocks)
    block = FurtherBlock(facts, model, keeps_blocks) if mtp else None
    _divide_frequencies(facts, model)
    with _refused_by_its_metadata(facts):
        of_decoder, of_model = causal_model_of(model, weights.read)
    if block is not None:
        _divide_frequencies(facts, block.layer)
        of_model = of_model._replace(mtp=mtp_of(block.layer, of_model, block.read))
    return model, of_decoder, of_model
