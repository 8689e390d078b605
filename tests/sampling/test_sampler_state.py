"""What a ``Sampler`` keeps of its sequences: saved, damaged, copied; and sequences alone."""

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.sampling.sampler_rows import LENGTH, OUTPUT_LENGTH, SAMPLER_DIALECTS
from tests.sampling.test_sampler import random_logits, random_parameters
from tests.support.op_contract import on_threads
from tests.support.other_capability import call_elsewhere

VOCAB = 500
PARAMETERS = {
    "temperature": 0.8,
    "repetition_penalty": 1.2,
    "dry_multiplier": 0.8,
    "no_repeat_ngram_size": 3,
    "logit_bias": {(1, 2): 2.0, 3: 1.0},
    "mirostat_tau": 4.0,
}


def used_sampler(seed: int = 1) -> lmdecode.Sampler:
    sampler = lmdecode.Sampler(3, VOCAB, seed=seed, **PARAMETERS)
    sampler.insert(0, [1, 2, 3, 4, 1, 2])
    for step in range(4):
        sampler.sample(logits_of(step))
    return sampler


def logits_of(step: int) -> torch.Tensor:
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(step))


def tokens(sampler: lmdecode.Sampler, steps: range) -> list[list[int]]:
    return [sampler.sample(logits_of(step)).index.tolist() for step in steps]


def test_a_saved_state_goes_on() -> None:
    sampler = used_sampler()
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    other = lmdecode.Sampler(3, VOCAB, seed=7, **PARAMETERS)
    other.load_state_dict(torch.load(file))
    expected = tokens(sampler, range(9, 20))
    assert tokens(other, range(9, 20)) == expected


def test_copies_go_on_apart() -> None:
    sampler = used_sampler()
    copies = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    expected = tokens(sampler, range(9, 20))
    for other in copies:
        assert tokens(other, range(9, 20)) == expected


def test_a_long_text_grows() -> None:
    """Through several sizes of the state, without a change of what is drawn."""
    steps = range(700)
    sampler = lmdecode.Sampler(3, VOCAB, seed=3, repetition_penalty=1.1)
    grown = tokens(sampler, steps)
    roomy = lmdecode.Sampler(3, VOCAB, seed=3, repetition_penalty=1.1)
    roomy._make_room(1024, 0)
    assert tokens(roomy, steps) == grown
    assert sampler.output_lengths.tolist() == [700] * 3


def test_a_damaged_state_is_refused_or_harmless() -> None:
    random = np.random.default_rng(0)
    refused = 0
    saved = used_sampler().state_dict()
    for _ in range(400):
        state = {**saved, "state": saved["state"].clone()}
        memory = state["state"]
        many = int(random.integers(1, 40))
        width = 400 if random.random() < 0.7 else memory.shape[1]  # its fields, or anywhere
        rows, columns = random.integers(0, 3, many), random.integers(0, width, many)
        memory[rows, columns] = torch.from_numpy(random.integers(0, 256, many)).to(torch.uint8)
        sampler = lmdecode.Sampler(3, VOCAB, seed=1, **PARAMETERS)
        before = sampler.state_dict()["state"]
        try:
            sampler.load_state_dict(state)
        except ValueError:
            refused += 1
            assert torch.equal(sampler.state_dict()["state"], before)
            continue
        for step in range(2):
            sampler.sample(logits_of(step))
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("batch", 2, "state has batch 2; expected 3"),
        ("vocab", 9, "state has vocab 9; expected 500"),
        ("order", "vllm", "state has order vllm; expected lmdecode"),
        ("text_capacity", 1 << 20, "expected"),
        ("text_capacity", -1, r"text_capacity'\] is -1; expected an int of 64 bits"),
        ("text_capacity", 1 << 28, r"state\['state'\] has shape"),  # 10 GB, were it believed
        ("text_capacity", "a", r"text_capacity'\] is of type str"),
        ("rules_capacity", None, r"rules_capacity'\] is of type NoneType"),
        ("state", torch.zeros(3, 8, dtype=torch.uint8), "expected"),
        ("state", None, r"state\['state'\] is of type NoneType"),
    ],
)
def test_a_state_of_another_sampler(name: str, value: Any, error: str) -> None:
    sampler = used_sampler()
    with pytest.raises((ValueError, TypeError), match=error):
        sampler.load_state_dict({**sampler.state_dict(), name: value})


def alone_and_in_company(seed: int) -> list[list[int]]:
    """Draw a sequence's tokens alone, then among others that come, go and change places."""
    random = np.random.default_rng(seed)
    vocab = int(random.choice([40, 700, 9000]))
    parameters = random_parameters(random, vocab)
    prompt = random.integers(0, vocab, 12).tolist()
    rows = [random_logits(random, 1, vocab).float() for _ in range(16)]
    alone = lmdecode.Sampler(1, vocab)
    alone.insert(0, prompt, **parameters)
    texts = [[int(alone.sample(row).index) for row in rows]]
    batch = int(random.integers(2, 9))
    company = lmdecode.Sampler(batch, vocab)
    place = int(random.integers(batch))
    company.insert(place, prompt, **parameters)
    text = []
    for row in rows:
        other = int(random.integers(batch))
        if other != place and random.random() < 0.5:
            company.insert(other, prompt[:5], **random_parameters(random, vocab))
        elif other != place and random.random() < 0.3:
            company.remove(other)
        elif random.random() < 0.5:
            order = random.permutation(batch).tolist()
            company.reorder_(order)
            place = order.index(place)
        logits = random_logits(random, batch, vocab).float()
        logits[place] = row
        text.append(int(company.sample(logits).index[place]))
    return [*texts, text]


@pytest.mark.parametrize("seed", range(40))
def test_a_sequence_alone_and_in_company(seed: int) -> None:
    alone, company = alone_and_in_company(seed)
    assert alone == company


def _write_texts(path: Any) -> None:
    torch.save([alone_and_in_company(seed) for seed in range(20)], path)


def test_the_same_tokens_at_another_level(tmp_path: Any) -> None:
    path = tmp_path / "texts.pt"
    call_elsewhere("tests.sampling.test_sampler_state:_write_texts", path)
    assert torch.load(path) == [alone_and_in_company(seed) for seed in range(20)]


def test_any_number_of_threads() -> None:
    options = {"typical_p": 0.9, "presence_penalty": 0.5, "num_logprobs": 3}

    def last_step() -> list[torch.Tensor]:
        sampler = lmdecode.Sampler(64, 20_000, seed=1, **options)
        generator = torch.Generator().manual_seed(0)
        steps = [sampler.sample(torch.randn(64, 20_000, generator=generator)) for _ in range(3)]
        return [part.clone() for part in steps[-1] if part is not None]

    on_threads(last_step, (1, 3))


def test_tokens_taken_back_leave_no_trace() -> None:
    """The room of a text suffices for any number of texts that are tried and taken back."""
    sampler, other = used_sampler(), used_sampler()
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        sampler.accept(0, torch.randperm(VOCAB, generator=generator)[:200])
        sampler.rewind(0, 200)
    assert tokens(sampler, range(9, 20)) == tokens(other, range(9, 20))


def test_a_table_with_foreign_tokens_is_refused() -> None:
    """Such rows would have no room for the text that they promise."""
    saved = lmdecode.Sampler(1, VOCAB, repetition_penalty=1.1).state_dict()
    sampler = lmdecode.Sampler(1, VOCAB, repetition_penalty=1.1)
    full = lmdecode.Sampler(1, VOCAB, repetition_penalty=1.1)
    full.accept(0, list(range(256)))
    fields = full._state.view(torch.int64)
    fields[0, LENGTH] = fields[0, OUTPUT_LENGTH] = 0  # its table is full without a text
    with pytest.raises(ValueError, match="its table is not that of its text and rules"):
        sampler.load_state_dict({**saved, "state": full.state_dict()["state"]})


def test_a_row_of_a_device_goes_to_the_cpu_and_back() -> None:
    """Where the ops are that change it. The device is a stand-in, whose memory is the CPU's."""
    here, there = used_sampler(), used_sampler()
    there.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    for sampler in (here, there):
        sampler.insert(1, [7, 8], seed=3, top_k=5)
        sampler.rewind(2, 2)
        sampler.accept(0, [1, 9])
        with pytest.raises(ValueError, match="n is 3; expected 0 to 2"):
            sampler.rewind(2, 3)
        sampler.remove(1)
        with pytest.raises(ValueError, match="row 1 has no sequence"):
            sampler.accept(1, [1])
        assert torch.equal(sampler.state_dict()["state"], here.state_dict()["state"])
    assert not torch.equal(here.state_dict()["state"], used_sampler().state_dict()["state"])


def test_verified_drafts_find_room(device: torch.device) -> None:
    """Room is counted as if all drafts were accepted, and looked for where that is too much."""
    sampler = lmdecode.Sampler(2, VOCAB, seed=1, repetition_penalty=1.2, device=device)
    plain = lmdecode.Sampler(2, VOCAB, seed=1, repetition_penalty=1.2, device=device)
    logits = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    draft = torch.full((2, 5), -1, device=device)
    for _ in range(300):
        verified = lmdecode.verify_draft(logits, draft, sampler)
        assert torch.equal(verified.tokens[:, 0], plain.sample(logits[:, 0]).index)
    assert sampler.output_lengths.tolist() == [300, 300]


def test_a_device_gives_what_the_cpu_gives(device: torch.device) -> None:
    """Every result and every byte of the state, of all dialects, through a row's whole life."""
    for seed, dialect in enumerate(SAMPLER_DIALECTS):
        random = np.random.default_rng(seed)
        options = dict(
            dialect=dialect, num_logprobs=5, return_logits=True, return_kept_set=True,
            return_stages=True, seed=seed, top_k=40, top_p=0.95, typical_p=0.9, top_n_sigma=3.0,
            xtc_probability=0.5, **PARAMETERS,
        )  # fmt: skip
        cpu = lmdecode.Sampler(3, VOCAB, **options)
        other = lmdecode.Sampler(3, VOCAB, device=device, **options)
        for step in range(12):
            logits = torch.from_numpy(random.normal(size=(3, VOCAB)).astype(np.float32) * 3)
            mask = torch.from_numpy(random.integers(-(2**31), 2**31, (3, 16)).astype(np.int32))
            for sampler in (cpu, other):
                if step == 4:
                    sampler.insert(1, [5, 6, 5, 6], temperature=1.3)
                if step == 6:
                    sampler.rewind(0, 3)
                    sampler.accept(2, [7, 8])
                if step == 8:
                    sampler.reorder_([2, 2, 1])
                if step == 10:
                    sampler.remove(0)
            expected = cpu.sample(logits, mask)
            result = other.sample(logits.to(device), mask.to(device))
            for a, b in zip(flat(expected), flat(result), strict=True):
                assert torch.equal(a, b.cpu())
            assert torch.equal(cpu.state_dict()["state"], other.state_dict()["state"].cpu())
        cpu.load_state_dict(other.state_dict())


def flat(output: lmdecode.SamplerOutput) -> list[torch.Tensor]:
    tensors = [part for part in output if isinstance(part, torch.Tensor)]
    assert output.kept_set is not None
    return [*tensors, *output.kept_set]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (18, float("nan"), "temperature of sequence 0 is nan"),
        (18, -1.0, "temperature of sequence 0 is -1"),
        (18, 0.1, "temperature of sequence 0 is 0.1; expected a number of float32"),
        (21, float("nan"), "typical_p of sequence 0 is nan"),
        (28, -2.0, "repetition_penalty of sequence 0 is -2"),
        (37, 9.0, "adaptive_target of sequence 0 is 9"),
        (10, float("nan"), "the state of mirostat or adaptive-p of sequence 0 is nan"),
        (16, -5, "min_tokens of sequence 0 is -5"),
    ],
)
def test_parameters_that_no_sampler_writes_are_not_loaded(
    place: int, value: float, message: str
) -> None:
    sampler = lmdecode.Sampler(1, 50, seed=1)
    state = sampler.state_dict()
    kind = torch.int64 if isinstance(value, int) else torch.float64
    state["state"].view(kind)[0, place] = value
    before = sampler.state_dict()["state"]
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert torch.equal(sampler.state_dict()["state"], before)


def test_counts_and_biases_are_those_of_text_and_rules() -> None:
    sampler = lmdecode.Sampler(1, 50, seed=1, presence_penalty=0.5, logit_bias={7: 1.25})
    sampler.insert(0, [3, 3, 5])
    sampler.accept(0, [5, 9])
    good = sampler.state_dict()
    sampler.load_state_dict(good)
    words = good["state"].view(torch.int32)[0]
    bias = torch.tensor([1.25]).view(torch.int32).item()
    # The bias in the table, before that of the rule; behind it token 3's count in the prompt.
    of_bias = int((words == bias).nonzero()[0])
    of_count = of_bias + int((words[of_bias:] == 2).nonzero()[0])
    for wanted in (of_bias, of_count):
        wrong = {**good, "state": good["state"].clone()}
        wrong["state"].view(torch.int32)[0, wanted] += 1
        with pytest.raises(ValueError, match=r"from\[0\] is no row of a sampler"):
            sampler.load_state_dict(wrong)


def test_a_row_without_text_takes_no_room_for_it() -> None:
    sampler = lmdecode.Sampler(4, 64)
    before = sampler.state_dict()["state"].shape
    sampler.accept(0, [1] * 5000)
    assert sampler.state_dict()["state"].shape == before
    assert sampler.output_lengths.tolist() == [5000, 0, 0, 0]


def test_room_is_made_for_the_texts_that_lack_it() -> None:
    sampler = lmdecode.Sampler(2, 64, repetition_penalty=1.2)
    sampler.insert(1, repetition_penalty=1.0)  # keeps no text
    sampler.accept(1, [1] * 5000)
    for row in (0, 1, 0):  # a text that has ended, or goes back, counts no more
        sampler.insert(row)
        sampler.accept(row, [1] * 250)
        sampler.rewind(row, 250)
        sampler.accept(row, [1] * 250)
        sampler.remove(row)
    sampler.insert(0, repetition_penalty=1.0)
    sampler.insert(1, [2] * 200)
    for _ in range(56):
        sampler.sample(torch.zeros(2, 64))
    assert sampler.state_dict()["text_capacity"] == 256
    sampler.sample(torch.zeros(2, 64))
    assert sampler.state_dict()["text_capacity"] == 512


def test_the_layout_has_the_places_of_a_row() -> None:
    layout = torch.ops.lmdecode.sampler_layout
    names = [each.name for each in layout.default._schema.returns]
    at = dict(zip(names, layout(), strict=True))
    sampler = lmdecode.Sampler(
        1, VOCAB, dialect="vllm", seed=77, temperature=0.5, repetition_penalty=1.2, mirostat_tau=4.0
    )
    sampler.insert(0, [1, 2, 3])
    sampler.accept(0, [4, 5])
    fields = sampler.state_dict()["state"].view(torch.int64)[0]
    places = ("active", "length", "output_length", "integers", "seed", "keeps_text")
    dialect = SAMPLER_DIALECTS.index("vllm")
    assert [int(fields[at[name]]) for name in places] == [1, 5, 2, dialect, 77, 1]
    numbers = fields.view(torch.float64)
    assert [float(numbers[at[name]]) for name in ("mu", "numbers")] == [8.0, 0.5]
    assert len({at["accept"], at["raw_logprobs"], at["stage_counts"]}) == 3


def test_biases_of_a_token_and_of_a_tuple_of_it_are_summed() -> None:
    sampler = lmdecode.Sampler(1, 8, seed=-1, return_logits=True, logit_bias={5: 1.0, (5,): 2.0})
    assert sampler.sample(torch.zeros(1, 8)).kept_logits[0, 5] == 3.0


def test_subnormal_parameters_are_kept_where_torch_flushes_them() -> None:
    plain = lmdecode.Sampler(1, 4, temperature=1e-39, seed=1).state_dict()["state"]
    torch.set_flush_denormal(True)
    try:
        flushed = lmdecode.Sampler(1, 4, temperature=1e-39, seed=1).state_dict()["state"]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)
