"""A decoder's weights on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lmdecode._checks import check_format
from lmdecode.decoder.checks import check_weights
from lmdecode.decoder.config import DecoderConfig, DecoderWeights, LayerWeights
from lmdecode.decoder.spares import Spares

__all__ = ["DTYPES", "DeviceDecoder"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KEPT_PLANS = 2  # each holds the caches of its searches


class DeviceDecoder:
    """A decoder's weights on a device.

    Parameters
    ----------
    config, weights
        See there.
    weight_format : {"float32", "float16", "bfloat16"}
        What products and caches are of; norms, softmax and the residual stream are float32.
    device
        Of the weights by default.
    use_cuda_graph : bool
        Whether a step is captured, once for searches of the same shape, and replayed.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type, or another format.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        weight_format: str | torch.dtype = "float32",
        *,
        device: torch.device | None = None,
        use_cuda_graph: bool = False,
    ) -> None:
        weight_format = check_format("Decoding", weight_format, DTYPES, " on a device")
        check_weights(config, weights)
        self.config, self.weight_format = config, weight_format
        self.dtype, self.use_cuda_graph = DTYPES[weight_format], use_cuda_graph
        self.device = weights.embedding.device if device is None else device
        # Added to the residual stream, where the norms are.
        wide = ("self_out_bias", "cross_out_bias", "ffn_down_bias")

        def put(name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            is_wide = name in wide or "norm" in name or name in ("positions", "relative_bias")
            dtype = torch.float32 if is_wide else self.dtype
            return tensor.detach().to(device=self.device, dtype=dtype).contiguous()

        def put_layer(layer: LayerWeights) -> LayerWeights:
            moved = {name: put(name, tensor) for name, tensor in layer._asdict().items()}
            for name in ("self_norm_gamma", "cross_norm_gamma", "ffn_norm_gamma"):
                if moved[name] is None:  # layers have all of their norms
                    moved[name] = torch.ones(
                        config.model_size, device=self.device, dtype=torch.float32
                    )
            return LayerWeights(**moved)  # type: ignore[arg-type]

        top = {
            name: put(name, tensor)
            for name, tensor in weights._asdict().items()
            if name != "layers"
        }
        self.weights = DecoderWeights(**top, layers=tuple(map(put_layer, weights.layers)))  # type: ignore[arg-type]
        self.num_positions: int | None = None
        if weights.positions is not None:
            self.num_positions = weights.positions.shape[0] - config.position_offset
        self.num_distances: int | None = None
        bias = self.weights.relative_bias
        if bias is not None:
            self.num_distances = bias.shape[1]
            # Caches have a position for the last token of a sequence, too, which is never read.
            self.weights = self.weights._replace(relative_bias=functional.pad(bias, (0, 1)))
        self.plans: Spares[Any] = Spares(_KEPT_PLANS)  # device_plan.py
