"""The ascend dialects round p and min-p to the dtype of the logits, in the op itself."""

import pytest
import torch

import lmdecode
import lmdecode.reference

VOCAB = 400
HALVES = [torch.float16, torch.bfloat16]
ASCEND = ["ascend_v1", "ascend_v2", "ascend_v2_probabilities"]


def logits_of(dtype: torch.dtype, dialect: str) -> torch.Tensor:
    x = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    return (x.softmax(-1) if dialect == "ascend_v2_probabilities" else x).to(dtype)


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize("p", [0.9, 0.999, 0.9996, 1e-9, -1e9, 1e9])
@pytest.mark.parametrize("name", ["top_p", "min_p"])
@pytest.mark.parametrize("dialect", ASCEND)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_fraction_is_that_of_the_dtype(
    dtype: torch.dtype, dialect: str, name: str, p: float, as_rows: bool
) -> None:
    x = logits_of(dtype, dialect)
    options = {"return_logits": True, "return_logprob": True, "seed": 3, "dialect": dialect}
    rounded = torch.full((3,), p, dtype=torch.float32).to(dtype)
    given = torch.full((3,), p) if as_rows else p
    got = lmdecode.top_k_top_p_sample(x, **{name: given}, **options)
    for want in (
        lmdecode.top_k_top_p_sample(x, **{name: rounded}, **options),
        lmdecode.reference.top_k_top_p_sample(x, **{name: given}, **options),
    ):
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dialect", ["ascend_v1", "ascend_v2"])
def test_what_rounds_to_one_is_off_and_what_rounds_to_zero_is_zero(dialect: str) -> None:
    x = logits_of(torch.bfloat16, dialect)
    assert lmdecode.top_k_top_p_sample(x, top_p=0.999, dialect=dialect).kept_count.eq(VOCAB).all()
    tiny = lmdecode.top_k_top_p_sample(x.half(), top_p=1e-9, dialect=dialect)
    assert tiny.kept_count.eq(VOCAB if dialect == "ascend_v1" else 1).all()


@pytest.mark.parametrize("dialect", ["lmdecode", "transformers", "vllm"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_other_dialects_take_float32(dtype: torch.dtype, dialect: str) -> None:
    x = logits_of(dtype, dialect)
    got = lmdecode.top_k_top_p_sample(x, top_p=0.9996, dialect=dialect)
    assert got.kept_count.lt(VOCAB).all()
