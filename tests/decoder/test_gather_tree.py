"""gather_tree against plain torch."""

import pytest
import torch

import lmdecode


def test_what_it_spells() -> None:
    ids = torch.tensor([[[1, 2]], [[3, 4]], [[9, 6]], [[7, 8]]])
    parents = torch.tensor([[[0, 0]], [[1, 0]], [[1, 0]], [[1, 0]]])
    result = lmdecode.gather_tree(ids, parents, torch.tensor([4]), 9)
    assert result[:, 0, 0].tolist() == [2, 3, 6, 7]
    assert result[:, 0, 1].tolist() == [1, 4, 9, 9]  # behind the end token there are end tokens


@pytest.mark.parametrize("parent", [2, -1])
def test_parents_out_of_range(parent: int) -> None:
    ids = torch.zeros(2, 1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="parent_ids of step 1"):
        lmdecode.gather_tree(ids, torch.full((2, 1, 2), parent), torch.tensor([2]), 0)
