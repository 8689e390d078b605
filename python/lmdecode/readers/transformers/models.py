"""Models of transformers, and their folders, as a config and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from lmdecode.linear.formats import is_kept
from lmdecode.readers.transformers.architecture import refused
from lmdecode.readers.transformers.architectures import CAUSAL_MODEL_TYPES, ENCODER_DECODER_TYPES
from lmdecode.readers.transformers.causal_models import causal_model_of, refuse_rope_types
from lmdecode.readers.transformers.checkpoint import Checkpoint
from lmdecode.readers.transformers.encoder_decoder import decoder_of
from lmdecode.readers.transformers.foreign_code import refuse_foreign_code
from lmdecode.readers.transformers.mtp import mtp_of_folder
from lmdecode.readers.transformers.stand_in import auto_class_of, refuse_stand_in, skeleton_of

__all__ = ["load_parts", "parts_of"]


# Names of classes in older folders, and their names now.
_FORMER_CLASSES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def _refuse_other_classes(name: str | os.PathLike[str], config: Any) -> None:
    """Raise ValueError if a folder is of a class that transformers does not have.

    Some folders have code that has since become a class of transformers.
    """
    kind = auto_class_of(config)
    if type(config) not in kind._model_mapping:
        return
    own = kind._model_mapping[type(config)].__name__
    code = getattr(config, "auto_map", None) or {}
    named = [str(code[key]) for key in ("AutoModel", kind.__name__) if key in code]
    for found in named + list(getattr(config, "architectures", None) or []):
        of_class = found.rpartition(".")[2]
        of_class = _FORMER_CLASSES.get(of_class, of_class)
        if of_class.lower() != own.lower() and not hasattr(transformers, of_class):
            raise refused(f"{name} has a model of the class {found}; expected {own}")


def _load_model(name: str | os.PathLike[str], config: Any) -> Any:
    """Return the model of a folder or of a name, of its config's class, with float32 weights.

    Raises ValueError if the config's type is neither in ``ENCODER_DECODER_TYPES`` nor in
    ``CAUSAL_MODEL_TYPES``, and OSError if the model does not exist.
    """
    if not config.is_encoder_decoder:
        if config.model_type not in CAUSAL_MODEL_TYPES:
            raise refused(
                f"{name} has a model of type {config.model_type!r}; "
                f"expected a causal language model of {', '.join(CAUSAL_MODEL_TYPES)}"
            )
    elif config.model_type not in ENCODER_DECODER_TYPES:
        raise ValueError(
            f"Decoding.from_pretrained: {name} has a model of type {config.model_type!r}; "
            f"expected a conditional generation model of {', '.join(ENCODER_DECODER_TYPES)}"
        )
    kind = auto_class_of(config)
    with torch.device("cpu"):
        return kind.from_pretrained(name, config=config, dtype=torch.float32).eval()


def load_parts(name: str | os.PathLike[str], *, mtp: bool = False) -> tuple[Any, Any, Any]:
    """Return a model, and the config and the weights of its decoder.

    A decoder-only model of a folder with safetensors comes without weights: each is read when it is
    requested. With ``mtp`` they include the head that predicts further tokens. Raises as
    ``_load_model`` and ``parts_of``.
    """
    folder, config = Path(name), AutoConfig.from_pretrained(name)
    _refuse_other_classes(name, config)
    if config.model_type in CAUSAL_MODEL_TYPES:
        refuse_rope_types(config)
    if folder.is_dir() and config.model_type in CAUSAL_MODEL_TYPES:
        settings = getattr(config, "quantization_config", None)
        keeps_blocks = is_kept(config.model_type, settings)
        if settings is not None and not keeps_blocks:
            method = settings.get("quant_method")
            what = f"the weights of {name} are quantized ({method}); expected floats"
            if method in ("awq", "gptq"):
                raise refused(what, "checkpoints of AWQ and GPTQ", "load_quantized")
            raise refused(what)
        if keeps_blocks:
            del config.quantization_config  # the model that stands in for it has floats
        model = skeleton_of(folder, config)
        checkpoint = Checkpoint.of(folder, model)
        if checkpoint is not None:
            config, weights = causal_model_of(model, checkpoint.read)
            if mtp:
                weights = weights._replace(mtp=mtp_of_folder(model, weights, checkpoint))
            return model, config, weights
        if keeps_blocks:
            raise refused(f"{name} has no blocks of MXFP4 for all of its experts; expected them")
    if mtp:
        raise refused(f"mtp is True for {name}; expected a folder with a model's safetensors")
    model = _load_model(name, config)
    return model, *parts_of(model)


def parts_of(model: Any) -> tuple[Any, Any]:
    """Return config and weights of a model's decoder, or of a decoder-only model.

    Raises ValueError as ``decoder_of`` and ``causal_model_of`` do, and if the model has methods or
    hooks of other code.
    """
    op = "Decoding.from_pretrained"
    refuse_stand_in(op, model)
    if isinstance(model, nn.Module):
        others = "for other models there is lmdecode.integrations.transformers.pack_linears_"
        refuse_foreign_code(op, model, f"transformers' own code alone; {others}")
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in CAUSAL_MODEL_TYPES or getattr(config, "is_encoder_decoder", None) is False:
        return causal_model_of(model)
    return decoder_of(model)
