"""Linear layers with weights that are packed once, and the norms between them, on the CPU."""

from lmdecode.linear.formats import FORMATS, check_linear_format
from lmdecode.linear.packed_linear import ACTIVATIONS, PackedLinear, layer_norm, rms_norm
from lmdecode.linear.quantized_weight import JoinedWeight, QuantizedWeight

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "JoinedWeight",
    "PackedLinear",
    "QuantizedWeight",
    "check_linear_format",
    "layer_norm",
    "rms_norm",
]
