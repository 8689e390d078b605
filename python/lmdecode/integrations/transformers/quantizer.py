"""``from_pretrained(..., quantization_config=LmdecodeConfig("int8"))``: packed while loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lmdecode.integrations.transformers.linear.modules import PackedLinearModule
from lmdecode.integrations.transformers.linear.packing import (
    LinearFormat,
    check_skip_of_model,
    checked_skip,
    is_linear,
    is_skipped,
    pack_rest_,
    pack_weight,
)
from lmdecode.integrations.transformers.linear.weight_readers import names_of_read_layers
from lmdecode.linear import check_linear_format

__all__ = ["LmdecodeConfig", "LmdecodeQuantizer"]

_NAME = "lmdecode"


@register_quantization_config(_NAME)
class LmdecodeConfig(QuantizationConfigMixin):
    """A ``quantization_config`` of ``from_pretrained`` that packs linear layers.

    Each layer is packed as soon as its weight is read, so the model's weights are never all in
    memory in their own dtype. The model equals the result of ``pack_linears_``. It cannot be saved.

    Parameters
    ----------
    dtype, skip, group_size, rotate
        As of ``pack_linears_``.

    Raises
    ------
    TypeError
        An argument has the wrong type.
    ValueError
        An argument has an unsupported value.
    """

    rotate: bool | None = None

    def __init__(
        self,
        dtype: str | torch.dtype = "int8",
        *,
        skip: Sequence[str] = (),
        group_size: int | None = None,
        rotate: bool | None = None,
        quant_method: str = _NAME,
    ) -> None:
        op = "LmdecodeConfig"
        if quant_method != _NAME:
            raise ValueError(f"{op}: quant_method is {quant_method!r}; expected {_NAME!r}")
        self.quant_method = _NAME  # type: ignore[assignment]
        self.dtype, _, _ = check_linear_format(op, dtype, group_size, rotate)
        self.skip, self.group_size = list(checked_skip(op, skip)), group_size
        if rotate is not None:  # configs of earlier releases do not have it
            self.rotate = rotate

    @property
    def format_of_layers(self) -> LinearFormat:
        """Weight format of all layers but the output layer."""
        return LinearFormat(self.dtype, self.group_size, self.rotate)


class _Pack(ConversionOps):
    """Packs a weight that was read, into the module that replaces its layer."""

    def __init__(self, hf_quantizer: LmdecodeQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: PreTrainedModel,
        missing_keys: set[str] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        left, config = {}, self.hf_quantizer.quantization_config
        for name, value in input_dict.items():
            if not self.hf_quantizer.param_needs_quantization(model, name):
                left[name] = value
                continue
            weight = value[0] if isinstance(value, list) else value
            where = name.rpartition(".")[0]
            layer = model.get_submodule(where)
            want = layer.weight
            assert isinstance(weight, Tensor) and isinstance(want, Tensor)
            if weight.shape != want.shape:
                left[name] = value  # transformers reports it
                continue
            format_ = config.format_of_layers.of_layer(model, layer)
            packed = pack_weight(where, layer, weight, format_)
            packed._is_hf_initialized = True
            model.set_submodule(where, packed)
            if missing_keys is not None:
                missing_keys.discard(name)
        return left


@register_quantizer(_NAME)
class LmdecodeQuantizer(HfQuantizer):
    """Packs linear layers while transformers loads a model; see ``LmdecodeConfig``."""

    quantization_config: LmdecodeConfig
    op = "LmdecodeConfig"  # in errors

    def __init__(self, quantization_config: LmdecodeConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self.pre_quantized = False  # checkpoints hold the weights as they are
        self._read_layers: frozenset[str] = frozenset()

    def validate_environment(self, *arguments: Any, device_map: Any = None, **others: Any) -> None:
        """Refuse another device than the CPU."""
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        for device in devices:
            if device not in (None, "cpu", "auto", torch.device("cpu")):
                raise ValueError(
                    f"{self.op}: device_map asks for {device!r}; packed weights run on the cpu"
                )

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **others: Any
    ) -> bool:
        """Whether this is the weight of a layer to be packed; tied weights are packed later."""
        where, _, name = param_name.rpartition(".")
        if name != "weight" or not where or is_skipped(where, self.quantization_config.skip):
            return False
        tied = model.all_tied_weights_keys
        return (
            param_name not in tied
            and param_name not in tied.values()
            and where not in self._read_layers
            and is_linear(model.get_submodule(where))
        )

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that packs a weight."""
        return _Pack(self)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **others: Any
    ) -> PreTrainedModel:
        check_skip_of_model(self.op, model, self.quantization_config.skip)
        self._read_layers = names_of_read_layers(model)
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **others: Any
    ) -> PreTrainedModel:
        for module in model.modules():
            if isinstance(module, PackedLinearModule):
                module.take_bias()
        config = self.quantization_config
        pack_rest_(model, config.format_of_layers, config.skip)
        return model

    def is_serializable(self) -> bool:
        """False: packed weights are valid in this process only."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: there are no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: the op has a fake."""
        return True
