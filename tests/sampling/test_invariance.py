"""A row's result depends on the row alone: not on threads, other rows, or the width of vectors."""

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode.reference import top_k_top_p_sample as reference
from lmdecode.sampling.types import DIALECTS, SampleOutput
from tests.sampling.contracts import OUTPUTS, cases
from tests.support.cases import SamplingCase, assert_same_bits
from tests.support.processes import run_python


def sample(case: SamplingCase) -> SampleOutput:
    return case.call(lmdecode.top_k_top_p_sample, **OUTPUTS)


def take(out: SampleOutput, rows: list[int]) -> SampleOutput:
    return SampleOutput(*(None if field is None else field[rows] for field in out))


def test_row_alone_in_batch_and_permuted(device: torch.device) -> None:
    for number, case in enumerate(cases(4, 60, vocab_sizes=(5, 33, 200, 1000), max_batch=9)):
        case = case.to(device)
        whole = sample(case)
        batch = len(case.logits)
        for row in range(batch):
            assert_same_bits(sample(case.rows([row])), take(whole, [row]), case)
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(number)).tolist()
        assert_same_bits(sample(case.rows(order)), take(whole, order), case)
        twice = [*range(batch), *range(batch)]
        assert_same_bits(sample(case.rows(twice)), take(whole, twice), case)


def test_other_rows_do_not_matter(device: torch.device) -> None:
    """A row next to rows of NaN, of infinities, and with other parameters."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 700, generator=generator) * 2
    alone = lmdecode.top_k_top_p_sample(
        row.to(device), 40, 0.9, seed=torch.tensor([5], device=device), **OUTPUTS
    )
    for value in (float("nan"), float("inf"), -float("inf"), 0.0, 3e38):
        logits = torch.cat((torch.full((2, 700), value), row, torch.full((1, 700), value)))
        parameters = {
            "top_k": torch.tensor([0, 1, 40, 3]),
            "top_p": torch.tensor([1.0, 0.0, 0.9, float("nan")]),
            "temperature": torch.tensor([0.0, 1e-30, 1.0, -1.0]),
            "seed": torch.tensor([-1, 9, 5, 0]),
        }
        out = lmdecode.top_k_top_p_sample(
            logits.to(device), **{k: v.to(device) for k, v in parameters.items()}, **OUTPUTS
        )
        assert_same_bits(take(out, [2]), alone, f"next to {value}")


def test_memory_layout_does_not_matter(device: torch.device) -> None:
    for case in cases(5, 100, vocab_sizes=(5, 33, 1000)):
        case = case.to(device)
        dense = {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in case.arguments.items()
        }
        copy = SamplingCase(case.name, case.logits.contiguous(), dense)
        assert_same_bits(sample(case), sample(copy), case)


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
LEVELS = st.sampled_from([-2.0, -1.0, -0.5, 0.0, -0.0, 0.5, 1.0])
ROWS = st.one_of(
    st.lists(FLOATS, min_size=1, max_size=40), st.lists(LEVELS, min_size=1, max_size=40)
)
PARAMETERS = st.fixed_dictionaries(
    {
        "top_k": st.one_of(st.none(), st.integers(-1, 45)),
        # A number above 1 is refused; a tensor's, as all of ascend's, switches the filter off.
        "top_p": st.one_of(
            st.none(),
            st.floats(-0.5, 1.0, width=32),
            st.floats(-0.5, 1.5, width=32).map(lambda p: torch.tensor([p])),
        ),
        "min_p": st.one_of(st.none(), st.floats(-0.5, 1.5, width=32)),
        "temperature": st.one_of(st.none(), st.floats(0, 2.0**100, width=32)),
        "seed": st.one_of(st.none(), st.integers(-1, 2**63 - 1)),
        "dialect": st.sampled_from(DIALECTS),
    }
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(row=ROWS, parameters=PARAMETERS)
def test_any_row_equals_the_reference(row: list[float], parameters: dict[str, object]) -> None:
    case = SamplingCase("hypothesis", torch.tensor([row]), parameters)
    assert_same_bits(sample(case), case.call(reference, **OUTPUTS), case)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=ROWS, parameters=PARAMETERS)
def test_no_input_gives_nonsense(row: list[float], parameters: dict[str, object]) -> None:
    out = sample(SamplingCase("hypothesis", torch.tensor([row]), parameters))
    index, count, status = out.index.item(), out.kept_count.item(), out.status.item()
    assert 0 <= index < len(row)
    assert 0 <= count <= len(row)
    assert (count == 0) == (status & 2 != 0)
    assert not out.logprob.isnan().any() and not out.kept_logits.isnan().any()
    if parameters["dialect"] != "ascend_v2_probabilities":
        assert (out.kept_logits > -float("inf")).sum().item() == count
        if count:
            assert out.kept_logits[0, index].item() > -float("inf")
            assert out.logprob.item() <= 1e-6


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    row=st.lists(LEVELS, min_size=1, max_size=40), parameters=PARAMETERS, extra=st.integers(1, 40)
)
def test_filtered_tokens_do_not_matter(
    row: list[float], parameters: dict[str, object], extra: int
) -> None:
    """Tokens of logit -inf at the end of a row change nothing, but where V itself is a rule."""
    if parameters["top_k"] is not None:  # k >= V switches the stage off
        parameters = {**parameters, "top_k": min(int(str(parameters["top_k"])), len(row) - 1)}
    if parameters["dialect"] == "ascend_v2_probabilities":
        parameters = {**parameters, "dialect": "ascend_v2"}
    short = sample(SamplingCase("short", torch.tensor([row]), parameters))
    padded = torch.tensor([row + [-float("inf")] * extra])
    long = sample(SamplingCase("padded", padded, parameters))
    assert short.kept_logits is not None and long.kept_logits is not None
    assert_same_bits(
        long._replace(kept_logits=long.kept_logits[:, : len(row)].contiguous()), short, parameters
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=ROWS, data=st.data(), parameters=PARAMETERS)
def test_smaller_parameters_keep_fewer(
    row: list[float], data: st.DataObject, parameters: dict[str, object]
) -> None:
    """The kept set of a smaller p is part of that of a larger p, with the same k."""
    low = data.draw(st.floats(2.0**-7, 1, width=32))
    high = data.draw(st.floats(low, 1, width=32))
    parameters = {**parameters, "min_p": None}
    if not parameters["temperature"]:
        parameters["temperature"] = 1.0
    kept = []
    for p in (low, high):
        out = sample(SamplingCase("p", torch.tensor([row]), {**parameters, "top_p": p}))
        assert out.kept_logits is not None
        filler = 0.0 if parameters["dialect"] == "ascend_v2_probabilities" else -float("inf")
        kept.append(out.kept_logits != filler)
    assert not (kept[0] & ~kept[1]).any()


def test_unknown_cpu_capability() -> None:
    code = "import lmdecode, torch; lmdecode.top_k_top_p_sample(torch.zeros(1, 3))"
    run = run_python("-c", code, env={**os.environ, "LMDECODE_CPU_CAPABILITY": "sse9"})
    assert run.returncode != 0
    assert "LMDECODE_CPU_CAPABILITY" in run.stderr and "sse9" in run.stderr
