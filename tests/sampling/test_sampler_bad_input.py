"""Wrong arguments of ``Sampler`` and ``verify_draft``: clear errors, and nothing has changed."""

from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from tests.sampling.contracts import SIZES, of_rows, results

VOCAB = 50
ops = torch.ops.lmdecode
LOGITS = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))

WRONG_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature is -1.0; expected a number >= 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "1"}, "temperature is of type str"),
    ({"temperature": True}, "temperature is of type bool"),
    ({"temperature": [1.0]}, "temperature has 1 numbers; expected 2"),
    ({"temperature": torch.ones(3)}, "temperature has 3 numbers; expected 2"),
    ({"top_k": 1.5}, "top_k is of type float"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_p": [0.5, 2.0]}, r"top_p\[1\] is 2.0"),
    ({"typical_p": 2.0}, "typical_p is 2.0; expected 0 to 1"),
    ({"epsilon_cutoff": -0.1}, "epsilon_cutoff is -0.1; expected 0 to 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected a number > 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty is inf; expected a finite"),
    ({"repetition_penalty": 1e-50}, "repetition_penalty is 1e-50; expected a number > 0"),
    ({"presence_penalty": 1e39}, "presence_penalty is 1e.39; expected a finite number of float32"),
    ({"logit_bias": {3: 1e39}}, r"logit_bias\[3\] is 1e.39"),
    ({"logit_bias": {3: -1e39}}, r"logit_bias\[3\] is -1e.39"),
    ({"suppress_tokens": b"ab"}, "suppress_tokens is of type bytes"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
    ({"logit_bias": [1]}, "logit_bias is of type list; expected a dict"),
    ({"logit_bias": {VOCAB: 1.0}}, f"is {VOCAB}; expected 0 to {VOCAB - 1}"),
    ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\] is inf"),
    ({"logit_bias": {(): 1.0}}, "a key of logit_bias is empty"),
    ({"logit_bias": {1 << 40: 1.0}}, "a key of logit_bias is 1099511627776; expected 0 to"),
    ({"logit_bias": {(1, 1 << 40): 1.0}}, r"a key of logit_bias\[1\] is 1099511627776"),
    ({"bad_words_ids": [[]]}, r"bad_words_ids\[0\] is empty"),
    ({"bad_words_ids": [[-1]]}, r"bad_words_ids\[0\]\[0\] is -1"),
    ({"suppress_tokens": "ab"}, "suppress_tokens is of type str"),
    ({"eos_token_id": 1.0}, "eos_token_id is of type float"),
    ({"forced_tokens": {0: VOCAB}}, rf"forced_tokens\[0\] is {VOCAB}"),
    ({"forced_tokens": {-1: 1}}, "a key of forced_tokens is -1"),
    ({"seed": 1 << 63}, "seed is 9223372036854775808"),
    ({"dry_breakers": [VOCAB]}, r"dry_breakers\[0\] is 50"),
    ({"penalty": 1.0}, "penalty is no parameter; expected one of"),
    ({"temprature": 1.0}, r"expected one of seed, .*; did you mean temperature\?$"),
    ({"num_logprob": 1}, r"; did you mean num_logprobs\?$"),
    ({"max_tokens": 9}, "max_tokens is no parameter; expected one of .*, dry_breakers$"),
    ({"min_tokens": 3}, "min_tokens is 3 without eos_token_id; expected both"),
    ({"min_tokens": [0, 3], "eos_token_id": []}, "min_tokens is 3 without eos_token_id"),
    ({"temperature": range(3)}, "temperature has 3 numbers; expected 2"),
    ({"reuse_outputs": 1}, "reuse_outputs is of type int"),
    ({"dialect": "sorted"}, "dialect is 'sorted'; expected one of lmdecode, "),
    ({"num_logprobs": 65}, "num_logprobs is 65; expected 0 to 50"),
    ({"logprobs_mode": "raw"}, "logprobs_mode is 'raw'"),
    ({"device": "meta"}, "device is meta; expected cpu"),
    ({"device": "foo"}, "device is foo; expected cpu"),
    ({"device": 2.5}, "device is 2.5; expected cpu"),
    ({"bad_words_ids": [1, 2]}, r"bad_words_ids\[0\] is of type int; expected a list of ints"),
    ({"seed": -(1 << 63) - 1}, "seed is -9223372036854775809; expected an int of 64 bits"),
    ({"adaptive_target": 1.5}, "adaptive_target is 1.5; expected a number <= 1"),
    ({"adaptive_target": float("nan")}, "adaptive_target is nan"),
    ({"adaptive_decay": 1.0}, "adaptive_decay is 1.0; expected 0 to 0.99"),
    ({"adaptive_target": 0.5, "mirostat_tau": 2.0}, "mirostat_tau is 2 and adaptive_target is 0.5"),
    ({"return_logits": 1}, "return_logits is of type int"),
]


@pytest.mark.parametrize(("parameters", "error"), WRONG_PARAMETERS)
def test_wrong_parameters(parameters: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        lmdecode.Sampler(2, VOCAB, **parameters)


@pytest.mark.parametrize(("batch", "vocab"), [(-1, 5), (1.0, 5), (1, 0), (1, 1 << 31), (True, 5)])
def test_wrong_sizes(batch: Any, vocab: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"Sampler: (batch|vocab) is "):
        lmdecode.Sampler(batch, vocab)


def new_sampler() -> lmdecode.Sampler:
    sampler = lmdecode.Sampler(2, VOCAB, seed=1, repetition_penalty=1.1)
    sampler.sample(LOGITS)
    return sampler


WRONG_CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("sample", (LOGITS.tolist(),), "logits is of type list; expected a tensor"),
    ("sample", (LOGITS, torch.zeros(2, 1, dtype=torch.int32)), r"bitmask has shape \[2, 1\]"),
    ("sample", (LOGITS, torch.zeros(1, 2, dtype=torch.int32)), r"bitmask has shape \[1, 2\]"),
    ("sample", (LOGITS, torch.zeros(2, 2, dtype=torch.int64)), "bitmask has dtype int64"),
    ("sample", (LOGITS, torch.tensor(1, dtype=torch.int32)), r"bitmask has shape \[\]; expected 2"),
    ("sample", (LOGITS, [1]), "sample: bitmask is of type list; expected a tensor or None"),
    ("insert", (0, b"ab"), "insert: prompt is of type bytes"),
    ("load_state_dict", (None,), "load_state_dict: state is of type NoneType"),
    ("insert", (2,), "insert: row is 2; expected 0 to 1"),
    ("insert", (0, [1.5]), r"insert: prompt\[0\] is of type float"),
    ("insert", (0, torch.ones(2)), "insert: prompt has dtype float32"),
    ("insert", (0, [1 << 40]), r"prompt\[0\] is 1099511627776"),
    ("remove", (-1,), "remove: row is -1"),
    ("reorder_", ([0],), "reorder_: rows has 1 numbers; expected 2"),
    ("reorder_", ([0, 2],), r"reorder_: rows\[1\] is 2; expected 0 to 1"),
    ("rewind", (0, 2), "rewind: n is 2; expected 0 to 1, the tokens that were accepted"),
    ("rewind", (0, -1), "rewind: n is -1"),
]


@pytest.mark.parametrize(("method", "arguments", "error"), WRONG_CALLS)
def test_wrong_calls(method: str, arguments: tuple[Any, ...], error: str) -> None:
    sampler, other = new_sampler(), new_sampler()
    with pytest.raises((ValueError, TypeError), match=error):
        getattr(sampler, method)(*arguments)
    for _ in range(3):
        assert torch.equal(sampler.sample(LOGITS).index, other.sample(LOGITS).index)


def test_end_tokens_that_are_switched_off_leave_nothing_for_min_tokens() -> None:
    sampler = lmdecode.Sampler(2, VOCAB, min_tokens=3, eos_token_id=7)
    with pytest.raises(ValueError, match="min_tokens is 3 without eos_token_id"):
        sampler.insert(0, eos_token_id=None)
    sampler.insert(0, eos_token_id=None, min_tokens=0)
    with pytest.raises(TypeError, match=r"promt is no parameter.*; did you mean prompt\?"):
        sampler.insert(0, promt=[1])


def test_a_wrong_prompt_draws_no_seed() -> None:
    sampler = lmdecode.Sampler(1, VOCAB)
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match="prompt"):
        sampler.insert(0, "text")
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_without_a_sequence() -> None:
    sampler = new_sampler()
    sampler.remove(1)
    out = sampler.sample(LOGITS)
    assert out.index[1] == -1
    assert out.status.tolist() == [0, 8]
    assert sampler.output_lengths.tolist() == [2, -1]
    for call in (lambda: sampler.accept(1, 3), lambda: sampler.rewind(1, 1)):
        with pytest.raises(ValueError, match="row 1 has no sequence"):
            call()


DRAFT = torch.tensor([[1, 2], [3, 4]])
DRAFT_LOGITS = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
WRONG_DRAFTS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "sure"}, "mode is 'sure'; expected one of match, rejection"),
    ({"sampler": 3}, "sampler is of type int"),
    ({"draft": DRAFT.float()}, "draft has dtype float32"),
    ({"draft": DRAFT[0]}, "draft has dtype int64 and shape"),
    ({"num_draft": torch.tensor([1, 3])}, r"num_draft\[1\] is 3; expected 0 to 2"),
    ({"num_draft": torch.tensor([1])}, r"num_draft has shape \[1\]"),
    ({"parents": torch.tensor([[-1, 1], [-1, 0]])}, r"parents\[0, 1\] is 1; expected -1 to 0"),
    ({"parents": DRAFT, "mode": "rejection"}, "parents"),
    ({"draft_logits": DRAFT_LOGITS[:, :2]}, "draft_logits is given with mode match"),
    ({"draft_logits": DRAFT_LOGITS, "mode": "rejection"}, r"draft_logits has shape \[2, 3, 50\]"),
    ({"bitmask": [1]}, "verify_draft: bitmask is of type list"),
    ({"bitmask": torch.zeros(2, 2, dtype=torch.int32)}, r"bitmask has shape \[2, 2\]"),
]


@pytest.mark.parametrize(("changes", "error"), WRONG_DRAFTS)
def test_wrong_drafts(changes: dict[str, Any], error: str) -> None:
    sampler, other = new_sampler(), new_sampler()
    arguments = {"logits": DRAFT_LOGITS, "draft": DRAFT, "sampler": sampler, **changes}
    with pytest.raises((ValueError, TypeError), match=error):
        lmdecode.verify_draft(**arguments)
    assert torch.equal(sampler.sample(LOGITS).index, other.sample(LOGITS).index)


def test_numbers_of_numpy_and_of_tensors() -> None:
    sampler = lmdecode.Sampler(
        2, np.int64(VOCAB), top_k=np.int64(5), top_p=np.float32(0.9), seed=torch.tensor(3),
        temperature=torch.tensor([0.5, 1.0]), suppress_tokens=torch.tensor([1, 2]),
    )  # fmt: skip
    plain = lmdecode.Sampler(
        2, VOCAB, top_k=5, top_p=0.9, seed=3, temperature=[0.5, 1.0], suppress_tokens=[1, 2]
    )
    assert torch.equal(sampler.sample(LOGITS).index, plain.sample(LOGITS).index)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_strides_and_modes(batch: int) -> None:
    logits = torch.randn(VOCAB, batch)
    samplers = [lmdecode.Sampler(batch, VOCAB, seed=1, frequency_penalty=0.5) for _ in range(4)]
    plain = logits.T.contiguous()
    expected = samplers[0].sample(plain).index
    assert torch.equal(samplers[1].sample(logits.T).index, expected)
    assert torch.equal(samplers[2].sample(plain.requires_grad_()).index, expected)
    with torch.inference_mode():
        assert torch.equal(samplers[3].sample(plain * 1).index, expected)


def test_in_and_out_of_inference_mode() -> None:
    """Made, grown and used in either."""

    def use(sampler: lmdecode.Sampler) -> list[int]:
        sampler.insert(0, [1] * 300)
        sampler.accept(0, [2])
        sampler.rewind(0, 1)
        sampler.reorder_([1, 0])
        drafted = lmdecode.verify_draft(LOGITS[:, None].expand(-1, 3, -1), DRAFT, sampler)
        return [*sampler.sample(LOGITS).index.tolist(), *drafted.tokens.flatten().tolist()]

    plain, outer = new_sampler(), new_sampler()
    expected = [use(plain), use(plain)]
    with torch.inference_mode():
        inner = new_sampler()
        assert use(outer) == expected[0]
    assert [use(inner), use(outer)] == expected
    inner.remove(0)


@pytest.mark.skipif(lmdecode.has_cuda(), reason="there are CUDA kernels")
def test_a_device_without_kernels() -> None:
    with pytest.raises(ValueError, match="device is cuda:0; expected cpu: there are no CUDA ker"):
        lmdecode.Sampler(2, VOCAB, device="cuda:0")


def test_defaults_of_torch_do_not_matter() -> None:
    parameters: dict[str, Any] = {"repetition_penalty": 1.1, "logit_bias": {1: 1.0}}
    returns = {"return_logits": True, "return_kept_set": True, "num_logprobs": 2}
    outs = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                sampler = lmdecode.Sampler(2, VOCAB, **parameters, **returns)
                sampler.insert(1, [1, 2], top_k=5)
                outs.append(sampler.sample(LOGITS))
        finally:
            torch.set_default_dtype(default)
    assert outs[0].kept_logits is not None and outs[1].kept_logits is not None
    assert torch.equal(outs[0].kept_logits, outs[1].kept_logits)
    assert torch.equal(outs[0].index, outs[1].index)


def a_step() -> list[Any]:
    """Return the arguments of a step of two rows, the state first."""
    call = of_rows(ops.sampler_step_, LOGITS, None, results(), None, None, None, *SIZES, -1, 1)
    return list(call.arguments.values())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({7: VOCAB + 1}, r"state\[0\] is not a row of these sizes"),
        ({8: -1}, "text_capacity is -1"),
        ({10: VOCAB + 1}, "num_logprobs is 51"),
        ({5: torch.zeros(2, VOCAB, dtype=torch.int64)}, "kept_ids or kept_logprobs is None"),
        ({4: torch.zeros(2, 3)}, r"kept_logits has shape \[2, 3\]"),
    ],
)
def test_wrong_sizes_of_a_step(changes: dict[int, Any], error: str) -> None:
    step = a_step()
    state, before = step[0], step[0].clone()
    for place, value in changes.items():
        step[place] = value
    with pytest.raises(ValueError, match=error):
        ops.sampler_step_(*step)
    assert torch.equal(state, before)


def test_a_full_text() -> None:
    step = a_step()
    ops.sampler_accept_(step[0], *SIZES, 0, torch.zeros(61, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"state\[0\] has 64 tokens of text; expected room for 1"):
        ops.sampler_step_(*step)
    with pytest.raises(ValueError, match="tokens are 1 behind 64; expected at most 64"):
        ops.sampler_accept_(step[0], *SIZES, 0, torch.tensor([1]))


@pytest.mark.parametrize(
    "rules", [[1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0, VOCAB, 0], [0, 0, 0, 0, 1, 1, 3, 0], [9] * 7]
)
def test_wrong_rules(rules: list[int]) -> None:
    state = a_step()[0]
    before = state.clone()
    with pytest.raises(ValueError, match="rules is not what it should be"):
        ops.sampler_insert_(
            state, *SIZES, 0, torch.zeros(7, dtype=torch.int64),
            torch.zeros(21, dtype=torch.float64), torch.tensor(rules, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int64),
        )  # fmt: skip
    assert torch.equal(state, before)


def test_an_error_takes_nothing_from_torchs_generator() -> None:
    sampler = lmdecode.Sampler(1, VOCAB, presence_penalty=1.0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"prompt\[0\] is 1099511627776"):
        sampler.insert(0, [2**40])
    both = dict(mirostat_tau=5.0, adaptive_target=0.2)
    with pytest.raises(ValueError, match="expected one of both"):
        sampler.insert(0, **both)
    with pytest.raises(ValueError, match="expected one of both"):
        lmdecode.Sampler(1, VOCAB, **both)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_steps_are_told_is_named_as_users_call_it() -> None:
    sampler = lmdecode.Sampler(2, VOCAB)
    with pytest.raises(ValueError, match=r"Sampler\.sample: logits is on meta"):
        sampler.sample(LOGITS.to("meta"))
    with pytest.raises(TypeError, match=r"Sampler\.sample: accept is of type str"):
        sampler.sample(LOGITS, accept="no")  # type: ignore[arg-type]
    sampler.remove(1)
    for change in (lambda: sampler.accept(1, [0]), lambda: sampler.rewind(1, 0)):
        with pytest.raises(ValueError, match=r"row 1 has no sequence; expected one that insert"):
            change()
    for wrong, kind in (("ab", "str"), ({1, 2}, "set"), (1.5, "float")):
        with pytest.raises(TypeError, match=f"prompt is of type {kind}; expected an int, a list"):
            sampler.insert(0, wrong)
    with pytest.raises(ValueError, match="prompt"):
        sampler.insert(0, torch.zeros(2, dtype=torch.int64, device="meta"))
    sampler.insert(0, np.array([1, 2]))
    sampler.insert(0, iter([1, 2]))
    with pytest.raises(ValueError, match="row is 0; expected a sampler with rows"):
        lmdecode.Sampler(0, VOCAB).insert(0)
