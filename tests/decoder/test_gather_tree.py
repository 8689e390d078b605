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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "step_ids has shape"),
        ({"ids": torch.zeros(2, 1, 2)}, "step_ids has dtype float32"),
        ({"parents": torch.zeros(2, 1, 3, dtype=torch.int64)}, "parent_ids has shape"),
        ({"parents": torch.zeros(2, 1, 2, dtype=torch.int32)}, "parent_ids has dtype int32"),
        ({"lengths": torch.tensor([1, 2])}, "max_sequence_lengths has shape"),
        ({"parents": torch.full((2, 1, 2), 2)}, "parent_ids of step 1"),
        ({"parents": torch.full((2, 1, 2), -1)}, "parent_ids of step 1"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, torch.Tensor], message: str) -> None:
    case = dict(
        ids=torch.zeros(2, 1, 2, dtype=torch.int64),
        parents=torch.zeros(2, 1, 2, dtype=torch.int64),
        lengths=torch.tensor([2]),
    )
    case |= change
    with pytest.raises(ValueError, match=message):
        lmdecode.gather_tree(case["ids"], case["parents"], case["lengths"], 0)


def test_lists_are_no_tensors() -> None:
    ids = torch.zeros(2, 1, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match="gather_tree: max_sequence_lengths is of type list"):
        lmdecode.gather_tree(ids, ids, [2], 0)
