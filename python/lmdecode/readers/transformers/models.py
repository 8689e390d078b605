"""The decoders of transformers' encoder-decoder models as a config and weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from lmdecode.decoder.config import DecoderConfig, DecoderWeights, LayerWeights
from lmdecode.linear.formats import is_kept
from lmdecode.readers.transformers.architecture import refused
from lmdecode.readers.transformers.architectures import CAUSAL_MODEL_TYPES
from lmdecode.readers.transformers.causal_models import causal_model_of, refuse_rope_types
from lmdecode.readers.transformers.checkpoint import (
    Checkpoint,
    auto_class_of,
    skeleton_of,
)
from lmdecode.readers.transformers.foreign_code import refuse_foreign_code
from lmdecode.readers.transformers.module_weights import (
    T5_DISTANCES,
    activation,
    bart_parts,
    embedding_scale,
    joined_modules,
    positions_of,
    t5_bias,
    t5_parts,
    t5_sizes,
)
from lmdecode.readers.transformers.mtp import mtp_of_folder
from lmdecode.readers.transformers.stand_in import refuse_stand_in

__all__ = ["MODEL_TYPES", "decoder_of", "load_model", "load_parts", "parts_of"]


def _bart_layer(layer: Any) -> LayerWeights:
    cross = layer.encoder_attn
    key_value, key_value_bias = joined_modules(cross.k_proj, cross.v_proj)
    return LayerWeights(
        **bart_parts(layer),  # type: ignore[arg-type]
        cross_norm_gamma=layer.encoder_attn_layer_norm.weight,
        cross_norm_beta=layer.encoder_attn_layer_norm.bias,
        cross_query=cross.q_proj.weight,
        cross_query_bias=cross.q_proj.bias,
        cross_key_value=key_value,
        cross_key_value_bias=key_value_bias,
        cross_out=cross.out_proj.weight,
        cross_out_bias=cross.out_proj.bias,
    )


def _bart_kind(
    model: Any,
    *,
    norm_first: bool,
    scale: float,
    position_offset: int,
    embedding_norm: Any,
    final_norm: Any,
    final_logits_bias: Tensor | None,
    unplaced_token: int | None = None,
) -> tuple[DecoderConfig, DecoderWeights]:
    config, decoder = model.config, model.get_decoder()
    heads, output = config.decoder_attention_heads, model.get_output_embeddings()
    bias = output.bias
    if final_logits_bias is not None:
        bias = final_logits_bias.reshape(-1)
    return (
        DecoderConfig(
            num_layers=len(decoder.layers),
            model_size=config.d_model,
            num_heads=heads,
            head_size=config.d_model // heads,
            ffn_size=config.decoder_ffn_dim,
            vocab_size=output.weight.shape[0],
            norm_first=norm_first,
            norm_epsilon=decoder.layers[0].final_layer_norm.eps,
            activation=activation(config.activation_function),
            embedding_scale=scale,
            position_offset=position_offset,
            unplaced_token=unplaced_token,
        ),
        DecoderWeights(
            embedding=decoder.embed_tokens.weight,
            positions=positions_of(decoder),
            relative_bias=None,
            embedding_norm_gamma=None if embedding_norm is None else embedding_norm.weight,
            embedding_norm_beta=None if embedding_norm is None else embedding_norm.bias,
            final_norm_gamma=None if final_norm is None else final_norm.weight,
            final_norm_beta=None if final_norm is None else final_norm.bias,
            logits=output.weight,
            logits_bias=bias,
            layers=tuple(_bart_layer(layer) for layer in decoder.layers),
        ),
    )


def _marian(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    return _bart_kind(
        model,
        norm_first=False,
        scale=embedding_scale(model.config),
        position_offset=0,
        embedding_norm=None,
        final_norm=None,
        final_logits_bias=model.final_logits_bias,
    )


def _bart(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    decoder = model.get_decoder()
    return _bart_kind(
        model,
        norm_first=False,
        scale=embedding_scale(model.config),
        position_offset=decoder.embed_positions.offset,
        embedding_norm=decoder.layernorm_embedding,
        final_norm=None,
        final_logits_bias=model.final_logits_bias,
    )


def _mbart(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    decoder = model.get_decoder()
    return _bart_kind(
        model,
        norm_first=True,
        scale=embedding_scale(model.config),
        position_offset=decoder.embed_positions.offset,
        embedding_norm=decoder.layernorm_embedding,
        final_norm=decoder.layer_norm,
        final_logits_bias=model.final_logits_bias,
    )


def _pegasus(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    return _bart_kind(
        model,
        norm_first=True,
        scale=embedding_scale(model.config),
        position_offset=0,
        embedding_norm=None,
        final_norm=model.get_decoder().layer_norm,
        final_logits_bias=model.final_logits_bias,
    )


def _m2m_100(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    decoder = model.get_decoder()
    padding = decoder.embed_positions.padding_idx  # its row is zeros; position 0 follows
    return _bart_kind(
        model,
        norm_first=True,
        scale=embedding_scale(model.config),
        position_offset=padding + 1,
        embedding_norm=None,
        final_norm=decoder.layer_norm,
        final_logits_bias=None,
        unplaced_token=padding,
    )


def _whisper(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    return _bart_kind(
        model,
        norm_first=True,
        scale=1.0,  # transformers' Whisper does not apply scale_embedding
        position_offset=0,
        embedding_norm=None,
        final_norm=model.get_decoder().layer_norm,
        final_logits_bias=None,
    )


def _t5_layer(block: Any) -> LayerWeights:
    own, cross, ffn = block.layer
    key_value, _ = joined_modules(cross.EncDecAttention.k, cross.EncDecAttention.v)
    return LayerWeights(
        **t5_parts(own, ffn),  # type: ignore[arg-type]
        cross_norm_gamma=cross.layer_norm.weight,
        cross_norm_beta=None,
        cross_query=cross.EncDecAttention.q.weight,
        cross_query_bias=None,
        cross_key_value=key_value,
        cross_key_value_bias=None,
        cross_out=cross.EncDecAttention.o.weight,
        cross_out_bias=None,
    )


def _t5(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    config, decoder = model.config, model.get_decoder()
    final_norm = decoder.final_layer_norm.weight
    is_scaled = getattr(config, "scale_decoder_outputs", False)  # MT5Config has no such field
    if is_scaled or (config.model_type == "umt5" and config.tie_word_embeddings):
        final_norm = final_norm.float() * config.d_model**-0.5
    output = model.get_output_embeddings()
    return (
        DecoderConfig(
            num_layers=len(decoder.block),
            vocab_size=output.weight.shape[0],
            **t5_sizes(config),
        ),
        DecoderWeights(
            embedding=decoder.embed_tokens.weight,
            positions=None,
            relative_bias=t5_bias(config, decoder, -torch.arange(T5_DISTANCES, device="cpu")),
            embedding_norm_gamma=None,
            embedding_norm_beta=None,
            final_norm_gamma=final_norm,
            final_norm_beta=None,
            logits=output.weight,
            logits_bias=None,
            layers=tuple(_t5_layer(block) for block in decoder.block),
        ),
    )


MODEL_TYPES: dict[str, Callable[[Any], tuple[DecoderConfig, DecoderWeights]]] = {
    "bart": _bart,
    "m2m_100": _m2m_100,
    "marian": _marian,
    "mbart": _mbart,
    "mt5": _t5,
    "pegasus": _pegasus,
    "t5": _t5,
    "umt5": _t5,
    "whisper": _whisper,
}


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


def load_model(name: str | os.PathLike[str], config: Any) -> Any:
    """Return the model of a folder or of a name, of its config's class, with float32 weights.

    Raises ValueError if the config's type is neither in ``MODEL_TYPES`` nor in
    ``CAUSAL_MODEL_TYPES``, and OSError if the model does not exist.
    """
    if not config.is_encoder_decoder:
        if config.model_type not in CAUSAL_MODEL_TYPES:
            raise refused(
                f"{name} has a model of type {config.model_type!r}; "
                f"expected a causal language model of {', '.join(CAUSAL_MODEL_TYPES)}"
            )
    elif config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"Decoding.from_pretrained: {name} has a model of type {config.model_type!r}; "
            f"expected a conditional generation model of {', '.join(MODEL_TYPES)}"
        )
    kind = auto_class_of(config)
    with torch.device("cpu"):
        return kind.from_pretrained(name, config=config, dtype=torch.float32).eval()


def load_parts(name: str | os.PathLike[str], *, mtp: bool = False) -> tuple[Any, Any, Any]:
    """Return a model, and the config and the weights of its decoder.

    A decoder-only model of a folder with safetensors comes without weights: each is read when it is
    requested. With ``mtp`` they include the head that predicts further tokens. Raises as
    ``load_model`` and ``parts_of``.
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
    model = load_model(name, config)
    return model, *parts_of(model)


def decoder_of(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    """Return the config and the weights of a model's decoder.

    Raises ValueError if the model is not one of ``MODEL_TYPES``, or has an unknown activation.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in MODEL_TYPES or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"Decoding.from_pretrained: model is a {type(model).__name__} of type {kind!r}; "
            f"expected a conditional generation model of {', '.join(MODEL_TYPES)}"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"Decoding.from_pretrained: model is a {type(model).__name__}, which gives no logits; "
            "expected a conditional generation model, as AutoModelForSeq2SeqLM or "
            "AutoModelForSpeechSeq2Seq load it"
        )
    with torch.no_grad():
        return MODEL_TYPES[kind](model)


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
