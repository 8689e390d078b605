"""Operators whose rows are known to have the same bits in every batch; others are an error."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Strict"]

# Rounded once in every loop of torch, so that vectors and single elements agree.
_EXACT = """
abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min copysign div eq floor floor_divide fmax fmin fmod frac ge gt hardtanh isinf isnan le
leaky_relu lerp logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul
nan_to_num ne neg reciprocal relu remainder round rsub sgn sign signbit sqrt square sub threshold
trunc where
"""
# What moves, compares or makes elements, or reads each row from its beginning to its end.
_MOVED = """
_local_scalar_dense _to_copy _unsafe_view all amax amin any arange argmax argmin argsort bucketize
cat clone constant_pad_nd copy count_nonzero cummax cummin cumsum embedding empty empty_like
empty_permuted empty_strided equal eye fill flip full full_like gather index index_add index_copy
index_fill index_put index_select is_nonzero isin item lift_fresh masked_scatter masked_select max
min native_layer_norm new_empty new_empty_strided new_full new_ones new_zeros nonzero one_hot ones
ones_like reflection_pad1d repeat repeat_interleave roll scalar_tensor scatter searchsorted
select_scatter set slice_scatter sort split_with_sizes_copy stack topk tril triu unfold_copy
unique_consecutive zero zeros zeros_like
"""
_KNOWN = frozenset(f"{_EXACT} {_MOVED}".split())


class Strict(TorchDispatchMode):
    """Raises NotImplementedError for the first call of any other operator in this thread.

    ``covered`` are names of operators whose kernels were replaced, such as ``"sum.dim_IntList"``.
    """

    def __init__(self, covered: Container[str]) -> None:
        super().__init__()
        self._covered = covered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._check(func, tensors, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        overload = f"{name}.{schema.overload_name}".removesuffix(".")
        if namespace == "lmdecode" or not any(t.dtype.is_floating_point for t in tensors):
            return
        fault = ""
        if any(tensor.device.type != "cpu" for tensor in tensors):
            fault = f"is called with a tensor on {tensors[0].device}"
        elif namespace != "aten" or not (
            func.is_view or overload in self._covered or name.removesuffix("_") in _KNOWN
        ):
            fault = "is not covered"
        elif kwargs.get("alpha", 1) != 1 and name.removesuffix("_") in ("add", "sub", "rsub"):
            fault = "is not covered with an alpha other than 1"
        if fault:
            raise NotImplementedError(
                f"batch_invariant: {namespace}::{overload} {fault}; expected operators whose rows "
                "have the same bits in any batch, as strict=True"
            )
