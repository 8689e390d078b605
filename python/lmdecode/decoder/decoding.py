"""A packed model: the part of ``Decoding`` that does not need transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self, cast

import torch

from lmdecode._checks import check_format, type_error
from lmdecode.decoder.batches import Batches
from lmdecode.decoder.causal_caches import CACHE_DTYPES
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.models.checks import check_weights
from lmdecode.models.configs import CausalConfig, DecoderConfig
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.models.saved import (
    PackedEncoderDecoder,
    check_unchanged,
    damaged_configs,
    load_packed,
    save_packed,
)
from lmdecode.models.weights import CausalWeights, DecoderWeights

__all__ = ["PackedDecoding"]


def _refuse_cache_dtype(cache_dtype: object) -> None:
    if cache_dtype is not None:
        raise ValueError(
            f"Decoding: cache_dtype is {cache_dtype!r}; expected None for the decoder of an "
            "encoder-decoder model, whose caches are float32"
        )


class PackedDecoding(Batches):
    """A packed model, without transformers: batches, the engine and its files.

    The base of ``lmdecode.Decoding``, which documents the parameters and errors. ``model`` and
    ``encoder`` are None here; ``cache_dtype`` is used by decoder-only models alone.
    """

    def __init__(
        self,
        config: DecoderConfig | CausalConfig,
        weights: DecoderWeights | CausalWeights,
        *,
        dtype: str | torch.dtype | None = "float32",
        cache_dtype: str | torch.dtype | None = None,
        use_cuda_graph: bool = False,
    ) -> None:
        self.decoder: PackedDecoder | DeviceDecoder | PackedCausalModel
        held_as: Any = dtype
        self.model: Any = None
        self.encoder: Any = None
        if isinstance(config, CausalConfig):
            if use_cuda_graph:
                raise ValueError(
                    "Decoding: use_cuda_graph is True; expected False for a decoder-only model, "
                    "which runs on the CPU"
                )
            if not isinstance(weights, CausalWeights):
                raise type_error("Decoding", "weights", weights, "CausalWeights, as config is")
            kind = "float32" if cache_dtype is None else cache_dtype
            self.cache_dtype = check_format("Decoding", kind, CACHE_DTYPES, name="cache_dtype")
            self.decoder = PackedCausalModel(config, weights, held_as)
            return
        _refuse_cache_dtype(cache_dtype)
        weights = cast(DecoderWeights, weights)
        check_weights(config, weights)
        device = weights.embedding.device
        if device.type == "cuda":
            self.decoder = DeviceDecoder(config, weights, held_as, use_cuda_graph=use_cuda_graph)
        elif use_cuda_graph:
            raise ValueError(
                f"Decoding: use_cuda_graph is True with weights on {device}; expected them on cuda"
            )
        else:
            self.decoder = PackedDecoder(config, weights, held_as)

    def __repr__(self) -> str:
        is_causal = isinstance(self.decoder, PackedCausalModel)
        kind = self._kind() or ("decoder-only" if is_causal else "encoder-decoder")
        parts = [
            kind,
            f"{self.config.num_layers} layers",
            f"{self.config.vocab_size} tokens",
            f"{self.decoder.weight_format} weights",
        ]
        if is_causal:
            parts.append(f"{self.cache_dtype} caches")
        if isinstance(self.decoder, DeviceDecoder):
            parts.append(f"on {self.decoder.device}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _kind(self) -> str | None:
        """Return the name of the model's class, or None if it is not known yet."""
        return None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the packed model, so that ``load`` need not pack it again.

        Parameters
        ----------
        folder
            Created if missing. A model in it is replaced once this one is written completely. It
            gets the model's config, and the files of its tokenizer and processor if the model's own
            folder has them. One writer at a time.

        Raises
        ------
        ValueError
            The model is on a CUDA device.
        OSError
            It cannot be written.
        """
        packed: PackedCausalModel | PackedEncoderDecoder
        if isinstance(self.decoder, DeviceDecoder):
            raise ValueError(
                f"Decoding.save: the decoder is on {self.decoder.device}; expected cpu"
            )
        if isinstance(self.decoder, PackedCausalModel):
            packed, more = self.decoder, {"cache_dtype": self.cache_dtype}
        else:
            of_encoder = {} if self.encoder is None else self.encoder.parts
            packed, more = PackedEncoderDecoder({"decoder": self.decoder, **of_encoder}), {}
        save_packed(Path(folder), packed, self._files(), **more, **self._facts())

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        cache_dtype: str | torch.dtype | None = None,
        verify: bool = False,
    ) -> Self:
        """Load a model that ``save`` wrote. Its weights are mapped: processes share them.

        Weights that were packed for another kind of processor are repacked, with a warning.

        Parameters
        ----------
        folder
            Must not change while the model is in use.
        cache_dtype
            See the class; by default the saved one. None for an encoder-decoder model.
        verify : bool
            Whether to check every byte of the weights against a checksum, which reads them all.

        Raises
        ------
        FileNotFoundError
            There is no such model.
        ValueError
            The model is damaged, of another version, or was written again meanwhile; or
            ``cache_dtype`` is unsupported.
        """
        folder = Path(folder)
        packed, manifest = load_packed(folder, verify=verify)
        decoding = cls.__new__(cls)
        decoding.model, decoding.encoder = None, None
        try:
            decoding._take_model(folder, packed, manifest)
        except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            check_unchanged(folder, manifest)
            raise damaged_configs(folder, error) from error
        check_unchanged(folder, manifest)
        if isinstance(packed, PackedCausalModel):
            decoding.decoder = packed
            kind = manifest.get("cache_dtype", "float32") if cache_dtype is None else cache_dtype
            decoding.cache_dtype = check_format("Decoding", kind, CACHE_DTYPES, name="cache_dtype")
            return decoding
        _refuse_cache_dtype(cache_dtype)
        decoding.decoder = cast(PackedDecoder, packed.parts["decoder"])
        return decoding

    def _take_model(
        self,
        folder: Path,
        packed: PackedCausalModel | PackedEncoderDecoder,
        manifest: dict[str, Any],
    ) -> None:
        """Load the other files of a model's folder; called once its weights are mapped."""

    def _facts(self) -> dict[str, Any]:
        """Return what ``save`` keeps in the manifest beside the weights' facts."""
        return {}

    def _files(self) -> dict[str, bytes]:
        """Return the files, by name, that ``save`` writes beside the weights."""
        return {}

    @property
    def config(self) -> DecoderConfig | CausalConfig:
        """Return the decoder's config."""
        return self.decoder.config
