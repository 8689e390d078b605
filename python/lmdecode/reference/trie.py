"""A trie of token sequences in plain Python: what ``lmdecode.Trie`` is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["trie_build", "trie_step"]


def trie_build(sequences: Iterable[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a trie in compressed form.

    Nodes are the beginnings of sequences, the short ones first, those of one length in ascending
    order; so the children of a node are neighbours.

    Parameters
    ----------
    sequences
        Each at least one token of 0 or more.

    Returns
    -------
    tuple of Tensor
        tokens [nodes] int32, the last of each beginning and -1 of the empty one; child_begin
        [nodes + 1] int32: node n has the children child_begin[n] to child_begin[n + 1] - 1; ends
        [nodes] uint8: 1 where a sequence ends.
    """
    items = {tuple(sequence) for sequence in sequences}
    beginnings = {item[:length] for item in items for length in range(len(item) + 1)} | {()}
    nodes = sorted(beginnings, key=lambda beginning: (len(beginning), beginning))
    counts = dict.fromkeys(nodes, 0)
    for node in nodes[1:]:
        counts[node[:-1]] += 1
    child_begin = [1]
    for node in nodes:
        child_begin.append(child_begin[-1] + counts[node])
    return (
        torch.tensor([node[-1] if node else -1 for node in nodes], dtype=torch.int32),
        torch.tensor(child_begin, dtype=torch.int32),
        torch.tensor([node in items for node in nodes], dtype=torch.uint8),
    )


def children(trie: tuple[Tensor, Tensor], node: int) -> list[int]:
    """Return the tokens that may follow a node; none may where there is no such node.

    trie: tokens [nodes] and child_begin [nodes + 1].
    """
    tokens, child_begin = trie
    if not 0 <= node < len(tokens):
        return []
    return tokens[int(child_begin[node]) : int(child_begin[node + 1])].tolist()


def trie_step(trie_tokens: Tensor, child_begin: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """Return the nodes, [n] int32, that tokens [n] lead to from nodes [n]; -1 where none is."""
    following = []
    for node, token in zip(nodes.tolist(), tokens.tolist(), strict=True):
        allowed = children((trie_tokens, child_begin), node)
        found = token in allowed
        following.append(int(child_begin[node]) + allowed.index(token) if found else -1)
    return torch.tensor(following, dtype=torch.int32)
