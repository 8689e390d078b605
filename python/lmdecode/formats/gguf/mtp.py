"""The block of a GGUF file that predicts further tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmdecode.formats.gguf.facts import Facts, refused
from lmdecode.formats.gguf.weights import Weights, is_of_block

__all__ = ["FurtherBlock"]

_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
_LAYER = "model.layers.0."
# Parameters that are beside the layer: names of what they are in the file.
_BESIDE = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "model.norm.weight": "shared_head_norm.weight",
}
_PREFIX = "nextn."


class FurtherBlock(Weights):
    """The tensors of a block, as those of a model of one layer and of what is before it.

    The embedding and the head are the model's, whose parameters have no values, as those of
    ``layer``, the model of one layer. Raises ValueError if the file has no such block, more than
    one, or other tensors than expected.
    """

    def __init__(self, facts: Facts, model: Any, keeps_blocks: bool) -> None:
        from lmdecode.integrations.transformers.decoding.mtp import mtp_layer

        if facts.architecture not in _ARCHITECTURES:
            raise refused(
                facts.file,
                f"is of {facts.architecture!r}, and mtp is True; expected one of "
                f"{', '.join(_ARCHITECTURES)}",
            )
        key = "nextn_predict_layers"
        count = facts.count(key, 0, least=0)
        if count != 1:
            found = f"has {count} for" if facts.has(key) else "has no"
            raise refused(
                facts.file, f"{found} {facts.architecture}.{key}; expected 1, as mtp is True"
            )
        self._block = model.config.num_hidden_layers
        for name, part in (("embed_tokens", "embedding"), ("shared_head_head", "head")):
            own = f"blk.{self._block}.{_PREFIX}{name}.weight"
            if own in facts.file.tensors:
                raise refused(facts.file, f"has {own}; expected none: the model's {part} is used")
        self.layer = mtp_layer(model)
        super().__init__(facts, self.layer, keeps_blocks)

    def _in_file(self, parameter: str) -> str:
        if parameter in _BESIDE:
            return _PREFIX + _BESIDE[parameter]
        return parameter.replace(_LAYER, f"model.layers.{self._block}.", 1)

    def _name(self, parameter: str) -> str:
        if not parameter.startswith(_PREFIX):
            return super()._name(parameter)
        name = f"blk.{self._block}.{parameter}"
        is_last = name.endswith("shared_head_norm.weight")
        return "output_norm.weight" if is_last and name not in self._file.tensors else name

    def _parameters(self, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        from lmdecode.integrations.transformers.decoding.mtp import mtp_shapes

        for parameter, shape in mtp_shapes(model).items():
            yield self._in_file(parameter), shape

    def _tensors(self, model: Any) -> set[str]:
        return {name for name in self._file.tensors if is_of_block(name, self._block)}

    def read(self, parameter: str) -> Any:
        """Return the values of a parameter of the layer, or of what is before it."""
        return super().read(self._in_file(parameter))
