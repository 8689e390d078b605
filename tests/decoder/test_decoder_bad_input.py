"""Wrong calls of the decoder: each error names the argument, what came, what was expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest, DecoderLayer, Decoding, gather_tree
from lmdecode.decoder.config import DecoderConfig
from tests.decoder.random_decoder import random_decoder
from tests.support.wrong_calls import WrongCalls, assert_refused

CONFIG, WEIGHTS = random_decoder("post_norm")
RMS_CONFIG, RMS_WEIGHTS = random_decoder("rms")
EMBEDDING, LAYER = WEIGHTS.embedding, WEIGHTS.layers[0]
MEMORY, LENGTHS = torch.zeros(2, 5, 18), torch.tensor([5, 3])
X, POSITIONS = torch.zeros(4, 22), torch.zeros(4, dtype=torch.int64)
IDS = torch.zeros(2, 1, 2, dtype=torch.int64)


def config(**changes: Any) -> DecoderConfig:
    return dataclasses.replace(CONFIG, **changes)


def decoding(**changes: Any) -> Decoding:
    return Decoding(CONFIG, WEIGHTS._replace(**changes))


def first_layer(**changes: Any) -> Decoding:
    return decoding(layers=(LAYER._replace(**changes), WEIGHTS.layers[1]))


def add(memory: Any = MEMORY[0], **changes: Any) -> None:
    batch = Decoding(CONFIG, WEIGHTS).batch(max_requests=1, num_beams=2, capacity=9, source=5)
    request: dict[str, Any] = dict(prompt_ids=[1], num_beams=2, max_new_tokens=4)
    try:
        batch.add(BeamRequest(**request | changes), memory)
    finally:
        assert batch.free_places == 1


def new_caches(memory: Any = MEMORY, lengths: Any = LENGTHS, rows: Any = 4, capacity: Any = 6):
    return DecoderLayer(CONFIG, LAYER).new_caches(memory, lengths, rows, capacity)


def layer(x: Any = X, positions: Any = POSITIONS, caches: Any = None, **arguments: Any) -> None:
    DecoderLayer(CONFIG, LAYER)(
        x, new_caches() if caches is None else caches, positions, **arguments
    )


def tree(ids: Any = IDS, parents: Any = IDS, lengths: Any = None, end: Any = 9) -> None:
    gather_tree(ids, parents, torch.tensor([2]) if lengths is None else lengths, end)


WRONG: WrongCalls = {
    "config, head_size 0": ("head_size is 0; expected 1", ValueError, lambda: config(
        head_size=0, attention_scale=None)),
    "config, head_size": ("head_size is of type str; expected an int", TypeError, lambda: config(
        head_size="8", attention_scale=None)),
    "config, heads": ("1048576 heads of 1048576; expected fewer", ValueError,
                      lambda: config(num_heads=1 << 20, head_size=1 << 20)),
    "config, gated": ("gated is of type str; expected a bool", TypeError,
                      lambda: config(gated="yes")),
    "config, norm": (r"norm is \['rms_norm'\]; expected one of", ValueError,
                     lambda: config(norm=["rms_norm"])),
    "config, epsilon": ("norm_epsilon is of type str; expected a number", TypeError,
                        lambda: config(norm_epsilon="1e-5")),
    "config, epsilon below 0": ("norm_epsilon is -1.0; expected a finite number of at least 0",
                                ValueError, lambda: config(norm_epsilon=-1.0)),
    "config, scale": ("embedding_scale is inf; expected a finite number", ValueError,
                      lambda: config(embedding_scale=float("inf"))),
    "config: None": ("config is of type NoneType", TypeError, lambda: Decoding(None, WEIGHTS)),
    "weights: None": ("weights is of type NoneType", TypeError, lambda: Decoding(CONFIG, None)),
    "dtype: a list": ("dtype is of type list; expected a str or a torch.dtype", TypeError,
                      lambda: Decoding(CONFIG, WEIGHTS, dtype=["int8"])),
    "embedding: None": ("embedding is of type NoneType", TypeError,
                        lambda: decoding(embedding=None)),
    "embedding: a shape": (r"embedding has shape \[39, 22\]; expected \[40, 22\]", ValueError,
                           lambda: decoding(embedding=EMBEDDING[1:])),
    "embedding: integers": ("embedding has dtype int64; expected floats", ValueError,
                            lambda: decoding(embedding=EMBEDDING.long())),
    "embedding: complex": ("embedding has dtype complex64; expected floats", ValueError,
                           lambda: decoding(embedding=EMBEDDING * 1j)),
    "embedding: meta": ("embedding is on meta", ValueError,
                        lambda: decoding(embedding=EMBEDDING.to("meta"))),
    "embedding: sparse": ("embedding has layout torch.sparse_coo", ValueError,
                          lambda: decoding(embedding=EMBEDDING.to_sparse())),
    "positions: a shape": (r"positions has shape \[90, 21\]; expected \[any, 22\]", ValueError,
                           lambda: decoding(positions=torch.zeros(90, 21))),
    "positions: empty": (r"positions has shape \[0, 22\]", ValueError,
                         lambda: decoding(positions=torch.zeros(0, 22))),
    "positions: too few": ("positions has 2 rows; expected more than 2", ValueError,
                           lambda: decoding(positions=torch.zeros(2, 22))),
    "relative_bias": (r"relative_bias has shape \[4, 64\]; expected \[3, any\]", ValueError,
                      lambda: decoding(relative_bias=torch.zeros(4, 64))),
    "relative_bias: a vector": (r"relative_bias has shape \[3\]", ValueError,
                                lambda: decoding(relative_bias=torch.zeros(3))),
    "logits_bias: empty": (r"logits_bias has shape \[0\]; expected \[40\]", ValueError,
                           lambda: decoding(logits_bias=torch.zeros(0))),
    "embedding_norm_gamma": (r"embedding_norm_gamma has shape \[21\]; expected \[22\]", ValueError,
                             lambda: decoding(embedding_norm_gamma=torch.zeros(21))),
    "final_norm_beta": ("final_norm_beta is a tensor; expected None without its gamma", ValueError,
                        lambda: decoding(final_norm_beta=torch.zeros(22))),
    "beta of rms_norm": ("final_norm_beta is a tensor; expected None with norm='rms_norm'",
                         ValueError, lambda: Decoding(RMS_CONFIG, RMS_WEIGHTS._replace(
                             final_norm_beta=torch.zeros(22)))),
    "layers: strings": ("a layer is of type str; expected LayerWeights", TypeError,
                        lambda: decoding(layers=("a", "b"))),
    "layer, qkv": ("qkv is of type list", TypeError, lambda: first_layer(qkv=[1.0])),
    "layer, qkv_bias": (r"qkv_bias has shape \[0\]; expected \[90\]", ValueError,
                        lambda: first_layer(qkv_bias=torch.zeros(0))),
    "layer, self_norm_gamma": (r"self_norm_gamma has shape \[21\]", ValueError,
                               lambda: first_layer(self_norm_gamma=torch.zeros(21))),
    "layer, ffn_gate_bias": ("ffn_gate_bias is a tensor; expected None with gated=False",
                             ValueError, lambda: first_layer(ffn_gate_bias=torch.zeros(34))),
    "add, memory: integers": ("memory has dtype int64; expected floats", ValueError,
                              lambda: add(MEMORY[0].long())),
    "add, memory: complex": ("memory has dtype complex64", ValueError, lambda: add(MEMORY[0] * 1j)),
    "add, memory: meta": ("memory is on meta", ValueError, lambda: add(MEMORY[0].to("meta"))),
    "add, memory: sparse": ("memory has layout", ValueError, lambda: add(MEMORY[0].to_sparse())),
    "add, pad_token_id": (r"pad_token_id.* is \[40\]; expected tokens below 40", ValueError,
                          lambda: add(pad_token_id=40)),
    "add, forced_bos": (r"forced_bos_token_id is \[40\]", ValueError,
                        lambda: add(forced_bos_token_id=40)),
    "add, forced_eos": (r"forced_eos_token_id is \[40\]", ValueError,
                        lambda: add(forced_eos_token_id=40)),
    "step": (f"max_steps is {1 << 63}", ValueError,
             lambda: Decoding(CONFIG, WEIGHTS).batch(
                 max_requests=1, num_beams=1, capacity=9, source=5).step(1 << 63)),
    "new_caches, memory": ("memory is of type list", TypeError, lambda: new_caches([1.0])),
    "new_caches, memory: a shape": (r"memory has shape \[5, 18\]; expected \[requests, source, 18",
                                    ValueError, lambda: new_caches(MEMORY[0])),
    "new_caches, memory: meta": ("memory is on meta", ValueError,
                                 lambda: new_caches(MEMORY.to("meta"))),
    "new_caches, lengths": ("memory_lengths is of type list", TypeError,
                            lambda: new_caches(lengths=[5, 3])),
    "new_caches, lengths: meta": ("lengths is on meta", ValueError,
                                  lambda: new_caches(lengths=LENGTHS.to("meta"))),
    "new_caches, rows": ("rows is -1; expected 0", ValueError, lambda: new_caches(rows=-1)),
    "new_caches, capacity": ("capacity is of type float", TypeError,
                             lambda: new_caches(capacity=6.0)),
    "layer, x": ("from_tensor is of type list", TypeError, lambda: layer([1.0])),
    "layer, x: a number": (r"from_tensor has shape \[\]", ValueError, lambda: layer(X[0, 0])),
    "layer, x: sparse": ("from_tensor has layout", ValueError, lambda: layer(X.to_sparse())),
    "layer, x: meta": ("is on cpu; expected the device of x, meta", ValueError,
                       lambda: layer(X.to("meta"))),
    "layer, x: gradient": ("from_tensor requires a gradient", ValueError,
                           lambda: layer(X.clone().requires_grad_())),
    "layer, caches": ("caches is of type list", TypeError, lambda: layer(caches=[1])),
    "layer, caches: meta": (r"caches\[0\] is on meta", ValueError, lambda: layer(
        caches=new_caches()._replace(self_keys=new_caches().self_keys.to("meta")))),
    "layer, positions: floats": ("positions has dtype float32; expected integers", ValueError,
                                 lambda: layer(positions=POSITIONS + 0.7)),
    "layer, positions: too large": ("positions is .*; expected 0 to 2.31 - 1", ValueError,
                                    lambda: layer(positions=POSITIONS + (1 << 32))),
    "layer, positions: meta": ("positions is on meta; expected cpu", ValueError,
                               lambda: layer(positions=POSITIONS.to("meta"))),
    "layer, requests": ("requests is .*; expected 0 to 2.31 - 1", ValueError,
                        lambda: layer(requests=POSITIONS - (1 << 32))),
    "layer, relative_bias": (r"relative_bias has shape \[4, 9\]; expected \[3, any\]", ValueError,
                             lambda: DecoderLayer(CONFIG, LAYER, torch.zeros(4, 9))),
    "layer, weights": ("a layer is of type NoneType", TypeError,
                       lambda: DecoderLayer(CONFIG, None)),
    "gather_tree, ids": ("step_ids is of type list", TypeError, lambda: tree([1])),
    "gather_tree, ids: sparse": ("step_ids has layout", ValueError, lambda: tree(IDS.to_sparse())),
    "gather_tree, lengths: meta": ("max_sequence_lengths is on meta", ValueError,
                                   lambda: tree(lengths=torch.tensor([2], device="meta"))),
    "gather_tree, end: a float": ("end_token is of type float", TypeError, lambda: tree(end=1.5)),
    "gather_tree, end: too large": ("end_token is 1180591620717411303424", ValueError,
                                    lambda: tree(end=1 << 70)),
    "gather_tree, end: not an int32": (
        "end_token is 4294967297; expected an int32", ValueError,
        lambda: tree(IDS.int(), IDS.int(), torch.tensor([2]).int(), (1 << 32) + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    assert_refused(*WRONG[name])


def test_dense_tensors_of_any_kind_are_taken() -> None:
    """Strided, expanded, negated, of another dtype: all the same as a copy."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(5, 18, generator=generator)
    request = BeamRequest([1], num_beams=2, max_new_tokens=4)
    results = []
    for given in (memory, memory.T.contiguous().T, torch._neg_view(-memory), memory.double()):
        batch = lmdecode.Decoding(CONFIG, WEIGHTS).batch(
            max_requests=1, num_beams=2, capacity=9, source=5
        )
        batch.add(request, given)
        results.append(batch.run()[0])
    for result in results[1:]:
        assert result.sequences.equal(results[0].sequences)
        assert result.log_probs.equal(results[0].log_probs)
