"""Operators whose rows are known to have the same bits in every batch; others are an error."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmdecode.eager.kernels import ELEMENTWISE, KERNELS, PRODUCTS
from lmdecode.eager.packed_weights import FORMATS

__all__ = ["Strict"]

# Rounded once in every loop of torch, so that vectors and single elements agree; then what moves,
# compares or makes elements, or reads each row from its beginning to its end.
_KNOWN = frozenset(
    """
abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min copysign div eq floor floor_divide fmax fmin fmod frac ge gt hardtanh isinf isnan le
leaky_relu lerp logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul
nan_to_num ne neg reciprocal relu remainder round rsub sgn sign signbit sqrt square sub threshold
trunc where
_local_scalar_dense _to_copy _unsafe_view all amax amin any arange argmax argmin argsort bucketize
cat clone constant_pad_nd copy count_nonzero cummax cummin cumsum embedding empty empty_like
empty_permuted empty_strided equal eye fill flip full full_like gather index index_add index_copy
index_fill index_put index_select is_nonzero isin item lift_fresh masked_scatter masked_select max
min native_layer_norm new_empty new_empty_strided new_full new_ones new_zeros nonzero one_hot ones
ones_like reflection_pad1d repeat repeat_interleave roll scalar_tensor scatter searchsorted
select_scatter set slice_scatter sort split_with_sizes_copy stack topk tril triu unfold_copy
unique_consecutive zero zeros zeros_like
""".split()
)


class Strict(TorchDispatchMode):
    """Raises NotImplementedError for the first call of any other operator in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fault = self._fault(func, args, kwargs)
        if fault is not None:
            name = f"{func._schema.name}.{func._schema.overload_name}".removesuffix(".")
            raise NotImplementedError(
                f"batch_invariant: {name} {fault}; expected operators whose rows have the same "
                "bits in any batch, as strict=True"
            )
        return func(*args, **kwargs)

    @staticmethod
    def _fault(func: Any, args: Any, kwargs: Any) -> str | None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        namespace, _, name = func._schema.name.partition("::")
        if not tensors or namespace == "lmdecode":
            return None
        operator = f"{name}.{func._schema.overload_name}".removesuffix(".")
        name = name.removesuffix("_")
        if operator in ELEMENTWISE and not tensors[0].is_floating_point():
            return f"is not covered for {tensors[0].dtype}"
        if any(tensor.is_complex() for tensor in tensors):
            return "is not covered for complex numbers"
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            return None
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return f"is called with a tensor on {tensors[0].device}"
        if namespace != "aten" or not (func.is_view or operator in KERNELS or name in _KNOWN):
            return "is not covered"
        if operator in PRODUCTS and not all(t.dtype in FORMATS for t in floats):
            return f"is not covered for {floats[0].dtype}"
        if kwargs.get("alpha", 1) != 1 and name in ("add", "sub", "rsub"):
            return "is not covered with an alpha other than 1"
        if name == "index_put" and (kwargs.get("accumulate") or args[3:4] == (True,)):
            return "is not covered where it accumulates"
        return None
