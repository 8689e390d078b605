"""``load_quantized``: loads checkpoints of AWQ and GPTQ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.modeling_utils import load_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lmdecode._checks import type_error
from lmdecode.integrations.transformers.linear.checkpoints import packed_from_awq, packed_from_gptq
from lmdecode.integrations.transformers.linear.modules import PackedLinearModule
from lmdecode.integrations.transformers.linear.packing import is_linear
from lmdecode.integrations.transformers.quantizer import LmdecodeQuantizer

__all__ = ["load_quantized"]

_OP = "load_quantized"
_NAME = "lmdecode_quantized"
_TENSORS = ("qweight", "qzeros", "scales", "g_idx")  # of a layer; the last one in GPTQ's alone
_READ = "_tensors_of_the_checkpoint"  # attribute of a layer that has been read


def load_quantized(
    folder: str | os.PathLike[str], *, model_class: Any = AutoModelForCausalLM, **options: Any
) -> Any:
    """Load a checkpoint of AWQ or GPTQ, 4 bits, as a model of transformers on the CPU.

    Layers that are quantised become ``PackedLinearModule``, with the values of the checkpoint.
    Everything else is loaded as ``from_pretrained`` loads it. Neither autoawq nor gptqmodel is
    needed. The model cannot be saved.

    Parameters
    ----------
    folder : str or path
        Folder with ``config.json``, which has a ``quantization_config``, and the weights.
    model_class : class
        Its ``from_pretrained`` loads the model.
    **options
        Options of ``from_pretrained``. ``dtype`` is the dtype of the weights that are not
        quantised and of the layers' outputs. Not ``config``, ``quantization_config`` or
        ``output_loading_info``.

    Returns
    -------
    PreTrainedModel
        For inference: none of its parameters requires a gradient.

    Raises
    ------
    TypeError
        An argument of another type.
    ValueError
        The checkpoint is not quantised, or by another method; tensors are missing, or have another
        dtype, shape or value than expected; a layer has a weight beside its quantised one, or a
        bias that the model has no place for; a file is damaged; an option is not taken.
    FileNotFoundError
        There is no model in the folder.
    """
    if not isinstance(folder, str | os.PathLike):
        raise type_error(_OP, "folder", folder, "a str or a path")
    if not hasattr(model_class, "from_pretrained"):
        raise type_error(_OP, "model_class", model_class, "a class with from_pretrained")
    for name in ("config", "quantization_config", "output_loading_info"):
        if name in options:
            raise ValueError(f"{_OP}: {name} is given; expected none, as the folder has the config")
    remote_code = bool(options.get("trust_remote_code", False))
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{_OP}: {folder} has no config.json; expected a model's folder")
    read, _ = PretrainedConfig.get_config_dict(folder)
    for part in (read, *read.values()):  # the model, and the parts of a model of text and images
        stated = part.get("quantization_config") if isinstance(part, dict) else None
        if stated is not None and not isinstance(stated, dict):
            raise ValueError(
                f"{_OP}: quantization_config of {Path(folder) / 'config.json'} is {stated!r}; "
                "expected names and values"
            )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote_code)
    settings = None
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            settings = part.quantization_config
            del part.quantization_config  # transformers would ask for the package that made it
    if settings is None:
        raise ValueError(
            f"{_OP}: {Path(folder) / 'config.json'} has no quantization_config; expected that of a "
            "checkpoint of AWQ or GPTQ"
        )
    may_mismatch = options.pop("ignore_mismatched_sizes", False)
    with torch.device("cpu"):
        model, report = model_class.from_pretrained(
            folder, config=config, quantization_config=_QuantizedConfig(settings),
            output_loading_info=True, ignore_mismatched_sizes=True,  # _check_report names them
            **options,
        )  # fmt: skip
    _check_report(model, report, may_mismatch)
    return model


def _check_report(model: PreTrainedModel, report: dict[str, Any], may_mismatch: bool) -> None:
    """Raise ValueError if transformers reports that the checkpoint does not fit the model."""
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{_OP}: the checkpoint lacks {', '.join(missing[:3])}{more}")
    for key, got, want in () if may_mismatch else sorted(report["mismatched_keys"]):
        raise ValueError(f"{_OP}: {key} has shape {list(got)}; expected {list(want)}")
    for name, module in model.named_modules():
        if isinstance(module, PackedLinearModule):
            for bias in _parts(model, name, "bias") & report["unexpected_keys"]:
                raise ValueError(f"{_OP}: the checkpoint has {bias}; expected no bias of {name}")


class _QuantizedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        def check(name: str, value: object, *expected: object) -> None:
            if value not in expected:
                choices = " or ".join(map(repr, expected))
                raise ValueError(
                    f"{_OP}: {name} of quantization_config is {value!r}; expected {choices}"
                )

        self.quant_method = _NAME  # type: ignore[assignment]
        self.method = settings.get("quant_method")
        check("quant_method", self.method, "awq", "gptq")
        check("bits", settings.get("bits"), 4)
        self.group_size = settings.get("group_size", 128)
        check("group_size", self.group_size, 32, 64, 128, -1)
        old_name = "version" if self.method == "awq" else "checkpoint_format"
        name = old_name if settings.get(old_name) is not None else "format"
        self.format = str(settings.get(name, "gemm" if self.method == "awq" else "gptq")).lower()
        check(name, self.format, *(["gemm"] if self.method == "awq" else ["gptq", "gptq_v2"]))
        self.sym = settings.get("sym")
        check("sym", self.sym, None, False, True)
        of_some_layers = (settings.get("dynamic") or {}).values()
        if self.sym and any(isinstance(one, dict) and "sym" in one for one in of_some_layers):
            self.sym = None

    def zero_offset(self, qzeros: Tensor) -> int:
        """Return ``zero_offset`` of ``packed_from_gptq`` for the zeros of a layer.

        A symmetric layer has zeros of 8, stored as 7 or 8 whatever the format says.
        """
        if self.sym is not False:
            for word, offset in ((0x77777777, 1), (0x88888888 - (1 << 32), 0)):
                if bool((qzeros == word).all()):
                    return offset
            if self.sym:
                raise ValueError(
                    "quantization_config: sym is True, and qzeros has others than 7 or 8 alone; "
                    "expected zeros of 8"
                )
        return 0 if self.format == "gptq_v2" else 1


class _Keep(ConversionOps):
    """Collects the tensors of a layer until all of them are loaded."""

    def __init__(self, hf_quantizer: _FolderQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # so that transformers casts no tensor

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        layer = model.get_submodule(full_layer_name.rpartition(".")[0])
        tensors = {name.rpartition(".")[2]: value[0] for name, value in input_dict.items()}
        setattr(layer, _READ, tensors)
        assert isinstance(layer.weight, Tensor)
        layer.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


@register_quantizer(_NAME)
class _FolderQuantizer(LmdecodeQuantizer):
    """Packs the layers of a checkpoint that transformers loads."""

    quantization_config: _QuantizedConfig  # type: ignore[assignment]
    op = _OP

    def __init__(self, quantization_config: _QuantizedConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)  # type: ignore[arg-type]
        self.pre_quantized = True

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **others: Any
    ) -> bool:
        """Return False: no weight is packed when it is read."""
        return False

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the converter that joins the tensors of a layer."""
        sources = [rf"\.{name}" for name in _TENSORS]
        return [WeightConverter(sources, ".weight", operations=[_Keep(self)])]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **others: Any
    ) -> PreTrainedModel:
        """Add biases that only the checkpoint has, and untie the quantised layers."""
        names = {name for path in checkpoint_files or () for name in _names_in(path)}
        for name, module in model.named_modules():
            if not is_linear(module) or names.isdisjoint(_parts(model, name, "qweight")):
                continue
            # As transformers unties a head that differs from the embedding: it compares values,
            # and this layer's are words.
            model.all_tied_weights_keys.pop(f"{name}.weight", None)
            if module.bias is None and not names.isdisjoint(_parts(model, name, "bias")):
                size = _shape(module)[1]
                module.bias = nn.Parameter(
                    torch.empty(size, dtype=module.weight.dtype, device="cpu")
                )
        self.made = dict(model.named_parameters())
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **others: Any
    ) -> PreTrainedModel:
        if transformers.__version__.startswith("5.0."):
            # It loads tensors of another shape, and in their own dtype if their names differ.
            for key, tensor in model.named_parameters():
                made = self.made.get(key, tensor)
                if tensor.shape != made.shape:
                    shape, expected = list(tensor.shape), list(made.shape)
                    raise ValueError(f"{_OP}: {key} has shape {shape}; expected {expected}")
                tensor.data = tensor.data.to(made.dtype)
        del self.made
        for name, module in list(model.named_modules()):
            tensors = module.__dict__.pop(_READ, None)
            if tensors is not None:
                model.set_submodule(name, _packed(self.quantization_config, name, module, tensors))
            del module, tensors  # before the next
        model.requires_grad_(False)
        return model


def _names_in(path: str | os.PathLike[str]) -> Sequence[str]:
    """Return the names of the tensors in a file of a checkpoint."""
    try:
        return list(load_state_dict(path, map_location="meta"))
    except Exception as error:  # torch's unpickler raises any kind of error
        raise ValueError(f"{_OP}: {path} cannot be read: {error}") from error


def _parts(model: PreTrainedModel, name: str, part: str) -> set[str]:
    """Return a part's possible names in a checkpoint, with and without the base model's prefix.

    transformers' ``rename_source_key`` adds or removes the prefix if only that name fits.
    """
    prefix = f"{model.base_model_prefix}."
    return {f"{layer}.{part}" for layer in (name, prefix + name, name.removeprefix(prefix))}


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    assert isinstance(module.weight, Tensor)
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _packed(
    config: _QuantizedConfig, name: str, module: nn.Module, tensors: dict[str, Tensor]
) -> PackedLinearModule:
    for part in ("qweight", "qzeros", "scales"):
        if part not in tensors:
            raise ValueError(f"{_OP}: the checkpoint lacks {name}.{part}")
    if not is_linear(module):
        raise ValueError(f"{_OP}: {name} is a {type(module).__name__}; expected a linear layer")
    if "weight" in tensors:
        raise ValueError(f"{_OP}: the checkpoint has {name}.weight beside {name}.qweight")
    inputs, outputs = _shape(module)
    groups = 1 if config.group_size == -1 else inputs // config.group_size
    scales = tensors["scales"]
    if scales.shape != (groups, outputs):
        raise ValueError(
            f"{_OP}: {name}.scales has shape {list(scales.shape)}; expected {[groups, outputs]}"
        )
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    if bias is not None:
        bias = bias.detach()
    words = (tensors["qweight"], tensors["qzeros"], scales)
    try:
        if config.method == "awq":
            layer = packed_from_awq(*words, bias)
        else:
            offset = config.zero_offset(tensors["qzeros"])
            layer = packed_from_gptq(*words, tensors.get("g_idx"), bias, zero_offset=offset)
    except ValueError as error:
        raise ValueError(f"{_OP}: {name}: {error}") from error
    if (layer.in_features, layer.out_features) != (inputs, outputs):
        raise ValueError(
            f"{_OP}: {name}.qweight is of {layer.in_features} inputs and {layer.out_features} "
            f"outputs; expected {inputs} and {outputs}"
        )
    assert isinstance(module.weight, Tensor)
    return PackedLinearModule(layer, module.weight.dtype, name).train(module.training)
