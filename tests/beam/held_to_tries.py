"""Random calls of ``log_softmax_top_k`` whose rows are held to tries."""

import random
from dataclasses import replace

import torch

from lmdecode import Trie
from tests.support.cases import BeamCase
from tests.support.random_cases import beam_cases


def held_to_tries(seed: int, count: int, vocabs: tuple[int, ...]) -> list[BeamCase]:
    """Return random calls with processors, each row at a random node of a trie."""
    choice, cases = random.Random(seed), []
    for case in beam_cases(seed, count, vocab_sizes=vocabs, processors=True):
        rows, vocab = case.logits.shape
        items = [
            [choice.randrange(vocab) for _ in range(choice.randint(1, 4))]
            for _ in range(choice.choice((1, 5, 60, 900)))
        ]
        trie = Trie(items)
        most = trie.num_nodes if choice.random() < 0.5 else min(9, trie.num_nodes)
        nodes = [choice.choice((0, choice.randrange(most), -1)) for _ in range(rows)]
        nodes_of = torch.tensor(nodes, dtype=torch.int32)
        scores = torch.where(torch.rand(rows) < 0.1, -1e9, case.beam_scores)
        more = {"trie": trie, "nodes": nodes_of}
        cases.append(replace(case, beam_scores=scores, processors={**case.processors, **more}))
    return cases
