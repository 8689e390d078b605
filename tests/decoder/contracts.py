"""The ops of whole models, and calls of them (tests/support/contracts.py)."""

from typing import Any

import torch
from torch import Tensor

import lmdecode
from lmdecode.reference import decoder as reference
from tests.support.contracts import Call, Contract
from tests.support.random_tensors import randint, randn

OPS = torch.ops.lmdecode


# --- encoder-decoder models -----------------------------------------------------------------------


def decoding_steps(logits: Tensor | None = None) -> Call:
    from tests.decoder.test_decoder_registration import running_search, step_arguments

    arguments = step_arguments(running_search())
    return Call(OPS.decoding_steps_, *arguments, *([] if logits is None else [logits]))


def read_memory() -> Call:
    from tests.decoder.test_decoder_registration import running_search

    searches = running_search("rms")
    return Call(
        OPS.decoding_read_memory_, searches.decoder.memory, list(searches.caches),
        randn(2, 5, 18), torch.tensor([5, 3]), torch.tensor([1, 0]),
    )  # fmt: skip


def faster_transformer() -> Call:
    from tests.decoder.test_decoder_registration import faster_transformer_arguments

    return Call(OPS.faster_transformer_decoding_, *faster_transformer_arguments())


def decoder_layer() -> Call:
    from tests.decoder.random_decoder import random_decoder

    config, weights = random_decoder("pre_norm_gated")
    layer = lmdecode.DecoderLayer(config, weights.layers[0])
    caches = layer.new_caches(randn(2, 5, 18), torch.tensor([5, 3]), rows=2, capacity=4)
    for cache in caches[:2]:
        cache.zero_()
    rows = torch.arange(2, dtype=torch.int32)
    return Call(
        OPS.decoder_layer, randn(2, 22), layer._packed.memory, layer.relative_bias,
        list(caches), rows, torch.zeros(2, dtype=torch.int32), rows,
    )  # fmt: skip


def encoder_forward() -> Call:
    from tests.decoder.test_encoder import encoder_arguments

    return Call(OPS.encoder_forward, *encoder_arguments())


def gather_tree(steps: int, batch: int, beams: int, dtype: torch.dtype) -> Call:
    ids, parents = randint(6, steps, batch, beams), randint(beams, steps, batch, beams, seed=1)
    lengths = randint(steps + 3, batch)
    tensors = (tensor.to(dtype) for tensor in (ids, parents, lengths))
    return Call(lmdecode.gather_tree, *tensors, 5)


# --- decoder-only models --------------------------------------------------------------------------


def causal_caches(**options: Any) -> Any:
    """Return caches of three sequences, of which two share a prompt."""
    from tests.decoder.test_causal_registration import running

    return running(**options)


def causal_forward(dtype: str) -> Call:
    from tests.decoder.causal_steps import Entry, forward_arguments
    from tests.support.causal_models import random_tokens

    entries = [Entry(1, random_tokens(5), False), Entry(2, random_tokens(9), num_logits=1)]
    return Call(OPS.causal_forward_, *forward_arguments(causal_caches(dtype=dtype), *entries))


def causal_steps() -> Call:
    from tests.decoder.test_steps_ahead import arguments_of, new_sampler

    return Call(OPS.causal_steps_, *arguments_of(causal_caches(), new_sampler(), steps=3))


def hidden_rows() -> Call:
    """Return a call of a model that reads hidden rows, and gives them."""
    from lmdecode.models.packed_causal import PackedCausalModel
    from tests.decoder.causal_steps import Entry, forward_arguments, new_caches, parts
    from tests.support.causal_models import random_tokens

    config, weights = parts("llama", "plain")
    size = config.model_size
    weights = weights._replace(
        embedding_norm_gamma=torch.rand(size), hidden_norm_gamma=torch.rand(size),
        embedding_projection=randn(size, size), hidden_projection=randn(size, size, seed=1),
    )  # fmt: skip
    caches = new_caches(PackedCausalModel(config, weights, "float32"))
    arguments = forward_arguments(caches, Entry(0, random_tokens(9), num_logits=2))
    rows = {"hidden_in": randn(9, size, seed=2), "hidden_out": torch.zeros(9, size)}
    return Call(OPS.causal_forward_, *arguments, **rows)


def of_caches(op: Any, values: list[Any], *, truncated: bool = False) -> Call:
    caches = causal_caches()
    if truncated:
        caches.truncate([0, 2], [0, 0])
    return Call(op, caches._tensors, caches.model.cache_windows, torch.tensor(values))


CONTRACTS = [
    Contract(
        "decoding_steps_",
        {
            "no logits": decoding_steps,
            "logits": lambda: decoding_steps(torch.zeros(6, 40)),
            "logits, raw and processed": lambda: decoding_steps(torch.zeros(2, 6, 40)),
        },
        is_slow=True,
        compiles=False,
    ),
    Contract("decoding_read_memory_", {"two memories": read_memory}, compiles=False),
    Contract("faster_transformer_decoding_", {"three beams": faster_transformer}, compiles=False),
    Contract("decoder_layer", {"two rows": decoder_layer}, compiles=False),
    Contract("encoder_forward", {"four sequences": encoder_forward}, compiles=False),
    Contract(
        "gather_tree",
        {
            f"{list(shape)}, {dtype}": lambda shape=shape, dtype=dtype: gather_tree(*shape, dtype)
            for shape in ((1, 1, 1), (5, 2, 3), (9, 4, 1), (0, 2, 2), (4, 0, 2))
            for dtype in (torch.int32, torch.int64)
        },
        reference=reference.gather_tree,
    ),
    Contract(
        "dynamic_time_warping",
        {
            str(list(shape)): lambda shape=shape: Call(OPS.dynamic_time_warping, randn(*shape))
            for shape in ((1, 1), (1, 5), (5, 1), (4, 9), (9, 4), (7, 60), (0, 3), (3, 0))
        },
        compiles=False,
        reference=reference.dynamic_time_warping,
    ),
    Contract(
        "causal_forward_",
        {
            **{dtype: lambda dtype=dtype: causal_forward(dtype) for dtype in ("float32", "int8")},
            "hidden rows": hidden_rows,
        },
        compiles=False,
    ),
    Contract("causal_steps_", {"three rows": causal_steps}, compiles=False),
    Contract(
        "causal_caches_reorder_",
        {"beams": lambda: of_caches(OPS.causal_caches_reorder_, [2, 0, 0])},
        compiles=False,
    ),
    Contract(
        "causal_caches_truncate_",
        {"two sequences": lambda: of_caches(OPS.causal_caches_truncate_, [[2, 0], [0, 39]])},
        compiles=False,
    ),
    Contract(
        "causal_caches_start_",
        {
            "two sequences": lambda: of_caches(
                OPS.causal_caches_start_, [[2, 70], [0, 1]], truncated=True
            )
        },
        compiles=False,
    ),
]
