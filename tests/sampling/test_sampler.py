"""``Sampler`` and ``verify_draft`` against the reference, bit for bit, in random lives of rows."""

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.reference.drafts import verify_draft as reference_verify_draft
from lmdecode.reference.sampler import Sampler as ReferenceSampler
from lmdecode.sampling.sampler_rows import LENGTH, OUTPUT_LENGTH, SAMPLER_DIALECTS
from tests.support.op_contract import on_threads
from tests.support.other_capability import call_elsewhere

DIALECTS = lmdecode.sampling.SAMPLER_DIALECTS
INF = float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Random = np.random.Generator


def random_parameters(random: Random, vocab: int) -> dict[str, Any]:
    """Some parameters of one row."""

    def token() -> int:
        return int(random.integers(vocab))

    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: float(random.choice([0.0, 0.5, 1.0, 1.7, random.uniform(0.1, 3)])),
        "top_k": lambda: int(random.integers(-1, vocab + 2)),
        "top_p": lambda: float(random.choice([0.0, 0.5, 0.9, 1.0, random.random()])),
        "min_p": lambda: float(random.choice([0.0, 0.05, 1.0, random.random()])),
        "typical_p": lambda: float(random.choice([0.2, 0.95, 1.0, random.random()])),
        "epsilon_cutoff": lambda: float(random.choice([0.001, 0.3, random.random() / 9])),
        "eta_cutoff": lambda: float(random.choice([0.001, 0.3, random.random() / 9])),
        "top_n_sigma": lambda: float(random.uniform(0, 3)),
        "top_h": lambda: float(random.choice([0.4, 1.0, random.random()])),
        "xtc_probability": lambda: float(random.choice([0.5, 1.0])),
        "xtc_threshold": lambda: float(random.choice([0.1, 0.02])),
        "repetition_penalty": lambda: float(random.uniform(0.5, 2)),
        "presence_penalty": lambda: float(random.uniform(-1, 2)),
        "frequency_penalty": lambda: float(random.uniform(-1, 2)),
        "no_repeat_ngram_size": lambda: int(random.integers(0, 4)),
        "dry_multiplier": lambda: float(random.uniform(0, 2)),
        "dry_base": lambda: float(random.uniform(0.9, 2)),
        "dry_allowed_length": lambda: int(random.integers(0, 3)),
        "dry_breakers": lambda: [token() for _ in range(int(random.integers(0, 3)))],
        "mirostat_tau": lambda: float(random.uniform(0, 6)),
        "mirostat_eta": lambda: float(random.uniform(0, 1)),
        "dynamic_temperature_range": lambda: float(random.uniform(0, 2)),
        "dynamic_temperature_exponent": lambda: float(random.choice([1.0, 0.5, 2.0])),
        "adaptive_target": lambda: float(random.choice([-1.0, 0.0, 1.0, random.random()])),
        "adaptive_decay": lambda: float(random.uniform(0, 0.99)),
        "logit_bias": lambda: {
            **{token(): float(random.choice([-INF, 2.0, -3.0])) for _ in range(3)},
            (token(), token()): 1.5,
            (token(), token(), token()): -INF,
        },
        "bad_words_ids": lambda: [[token()], [token(), token()]],
        "suppress_tokens": lambda: [token(), token()],
        "forced_tokens": lambda: {int(random.integers(0, 9)): token()},
        "seed": lambda: int(random.choice([-1, random.integers(1 << 62)])),
    }
    picked = random.choice(list(choices), int(random.integers(0, 7)), replace=False)
    made = {name: choices[name]() for name in picked}
    if made.get("adaptive_target", -1) >= 0:
        made.pop("mirostat_tau", None)  # one of both
    made.setdefault("seed", int(random.integers(1 << 62)))
    if random.random() < 0.3:
        made |= {"min_tokens": int(random.integers(1, 9)), "eos_token_id": [token(), token()]}
    return made


def random_logits(random: Random, batch: int, vocab: int) -> torch.Tensor:
    x = torch.from_numpy(random.normal(0, random.choice([0.5, 3, 10]), (batch, vocab)))
    if random.random() < 0.4:
        x = (x * 2).round() / 2  # ties
    for value in (INF, -INF, float("nan")):
        if random.random() < 0.15:
            x[torch.from_numpy(random.random((batch, vocab)) < random.choice([0.01, 0.3, 1]))] = (
                value
            )
    x = x.to(DTYPES[int(random.integers(3))])
    return x.T.contiguous().T if random.random() < 0.2 else x


def random_bitmask(random: Random, batch: int, vocab: int) -> torch.Tensor | None:
    if random.random() < 0.6:
        return None
    words = random.integers(-(1 << 31), 1 << 31, (batch, (vocab + 31) // 32))
    if random.random() < 0.4:
        words &= random.integers(-(1 << 31), 1 << 31, words.shape)
        words &= random.integers(-(1 << 31), 1 << 31, words.shape)
    return torch.from_numpy(words).to(torch.int32)


def assert_same(ours: Any, expected: Any, where: str) -> None:
    for name, a, b in zip(ours._fields, ours, expected, strict=False):
        if a is None or b is None:
            assert a is None
            assert b is None
        elif isinstance(a, tuple):
            assert_same(a, b, where)
        else:
            a, b = a.contiguous(), b.contiguous()
            same = a.dtype == b.dtype and a.shape == b.shape
            if same and a.dtype.is_floating_point:
                same = torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert same and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), (
                f"{where}: {name} {a} {b}"
            )


def change_rows(random: Random, samplers: list[Any], vocab: int) -> None:
    """Do the same to the rows of both."""
    batch = samplers[0].batch
    row = int(random.integers(batch))
    what = int(random.integers(6))
    if what == 0:
        prompt = random.integers(0, vocab, int(random.integers(0, 30))).tolist()
        parameters = random_parameters(random, vocab)
        for sampler in samplers:
            sampler.insert(row, prompt, **parameters)
    elif what == 1:
        for sampler in samplers:
            sampler.remove(row)
    elif what == 2:
        order = random.integers(0, batch, batch).tolist()
        for sampler in samplers:
            sampler.reorder_(order)
    elif what == 3 and samplers[1].rows[row] is not None:
        tokens = random.integers(0, vocab, 3).tolist()
        for sampler in samplers:
            sampler.accept(row, tokens)
    elif what == 4 and samplers[1].rows[row] is not None:
        count = int(random.integers(0, len(samplers[1].rows[row].output) + 1))
        for sampler in samplers:
            sampler.rewind(row, count)
    elif what == 5:
        state = samplers[0].state_dict()
        fresh = lmdecode.Sampler(batch, vocab, dialect=samplers[0].dialect)
        fresh.load_state_dict(state)
        samplers[0].load_state_dict(fresh.state_dict())


def walk(seed: int, dialect: str, steps: int, vocab: int) -> None:
    random = np.random.default_rng([seed, DIALECTS.index(dialect)])
    batch = int(random.integers(1, 5))
    options = {
        "dialect": dialect,
        "num_logprobs": [None, 0, 5][int(random.integers(3))],
        "logprobs_mode": ["raw_logprobs", "processed_logprobs"][int(random.integers(2))],
    }
    for name in ("return_logits", "return_kept_set", "return_stages"):
        options[name] = bool(random.random() < 0.3)
    if options["num_logprobs"] is not None:
        options["num_logprobs"] = min(options["num_logprobs"], vocab)
    parameters = random_parameters(random, vocab)
    samplers = [
        make(batch, vocab, **options, **parameters) for make in (lmdecode.Sampler, ReferenceSampler)
    ]
    for step in range(steps):
        while random.random() < 0.3:
            change_rows(random, samplers, vocab)
        logits = random_logits(random, batch, vocab)
        bitmask = random_bitmask(random, batch, vocab)
        accept = bool(random.random() < 0.9)
        ours, expected = (sampler.sample(logits, bitmask, accept) for sampler in samplers)
        assert_same(ours, expected, f"seed {seed}, dialect {dialect}, step {step}")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(12))
def test_random_lives(dialect: str, seed: int) -> None:
    walk(seed, dialect, 12, int(np.random.default_rng(seed).choice([1, 2, 31, 64, 200, 1000])))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_large_vocabulary(dialect: str) -> None:
    walk(99, dialect, 3, 20_000)


def test_the_same_bits_as_top_k_top_p_sample() -> None:
    """Where these stages are all there is."""
    random = torch.Generator().manual_seed(5)
    seeds = torch.arange(6) + 17
    for dialect in ("lmdecode", "transformers", "vllm"):
        for vocab in (50, 5000, 40_000):
            logits = torch.randn(6, vocab, generator=random) * 4
            k = [0, 1, 5, 50, 49, 0]
            p = [1.0, 0.9, 0.5, 0.95, 1.0, 0.7]
            t = [1.0, 0.7, 1.3, 0.0, 2.0, 0.5]
            sampler = lmdecode.Sampler(
                6, vocab, dialect=dialect, top_k=k, top_p=p, temperature=t, min_p=0.01,
                seed=seeds, return_logits=True,
            )  # fmt: skip
            for position in range(3):
                expected = lmdecode.top_k_top_p_sample(
                    logits, k, p, min_p=0.01, temperature=t, seed=seeds, position=position,
                    return_logits=True, dialect=dialect,
                )  # fmt: skip
                ours = sampler.sample(logits)
                for name in ("index", "kept_logits", "kept_count", "status"):
                    assert torch.equal(getattr(ours, name), getattr(expected, name)), (
                        dialect,
                        name,
                    )


@pytest.mark.parametrize("seed", range(30))
def test_drafts(seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab, batch = int(random.choice([3, 20, 300])), int(random.integers(1, 4))
    dialect = DIALECTS[seed % len(DIALECTS)]
    parameters = random_parameters(random, vocab)
    samplers = [
        make(batch, vocab, dialect=dialect, **parameters)
        for make in (lmdecode.Sampler, ReferenceSampler)
    ]
    for step in range(6):
        width = int(random.integers(1, 7))
        logits = random_logits(random, batch * (width + 1), vocab).reshape(batch, width + 1, vocab)
        draft = torch.from_numpy(random.integers(0, vocab, (batch, width)))
        if random.random() < 0.7:  # likely ones
            draft = logits[:, :-1].float().nan_to_num(-9.0).argmax(-1)
        options: dict[str, Any] = {"mode": ["match", "rejection"][int(random.integers(2))]}
        if random.random() < 0.5:
            options["num_draft"] = torch.from_numpy(random.integers(0, width + 1, batch))
        if options["mode"] == "rejection" and random.random() < 0.7:
            q = logits[:, :-1].float() + torch.from_numpy(random.normal(0, 1, 1)).float()
            noise = torch.from_numpy(random.normal(0, 2, q.shape)).float()
            options["draft_logits"] = q + noise
        elif options["mode"] == "match" and random.random() < 0.5:
            parents = [[int(random.integers(-1, i)) for i in range(width)] for _ in range(batch)]
            options["parents"] = torch.tensor(parents)
        ours = lmdecode.verify_draft(logits, draft, samplers[0], **options)
        expected = reference_verify_draft(logits, draft, samplers[1], **options)
        assert_same(ours, expected, f"seed {seed}, step {step}, {options}")
        # The states are the same.
        logits = random_logits(random, batch, vocab)
        ours, expected = (sampler.sample(logits) for sampler in samplers)
        assert_same(ours, expected, f"seed {seed}, behind step {step}")


@pytest.mark.parametrize("seed", range(6))
def test_results_of_a_step_stay_when_others_follow(seed: int) -> None:
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"num_logprobs": 3} if seed % 2 else {}
    for name in ("return_logits", "return_kept_set", "return_stages"):
        options[name] = bool(random.random() < 0.5)
    logits = [random_logits(random, 3, 40) for _ in range(5)]
    fresh, reused = (
        lmdecode.Sampler(3, 40, seed=seed, top_k=9, **options, **reuse)
        for reuse in ({}, {"reuse_outputs": True})
    )
    kept = [fresh.sample(step) for step in logits]
    for step, out in zip(logits, kept, strict=True):
        assert_same(out, reused.sample(step), f"seed {seed}")
    memory = {part.data_ptr() for out in kept for part in out if isinstance(part, torch.Tensor)}
    tensors = sum(isinstance(part, torch.Tensor) for out in kept for part in out)
    assert len(memory) == tensors
    again = [reused.sample(logits[0]).status.data_ptr() for _ in range(2)]
    assert len(set(again)) == 1


def test_the_chosen_tokens_of_a_step_stay_when_the_next_one_is_taken() -> None:
    logits = torch.randn(6, 3, 50, generator=torch.Generator().manual_seed(4))
    plain = lmdecode.Sampler(3, 50, seed=5)
    told = lmdecode.Sampler(3, 50, seed=5, num_logprobs=2)
    kept = lmdecode.Sampler(3, 50, seed=5, return_kept_set=True)
    steps = [(plain.sample(step), told.sample(step), kept.sample(step)) for step in logits]

    indices = torch.stack([mine.index for mine, _, _ in steps])
    assert len(set(map(tuple, indices.tolist()))) > 1
    assert all(torch.equal(told.index, mine.index) for mine, told, _ in steps)
    assert all(torch.equal(kept.index, mine.index) for mine, _, kept in steps)
    expected = logits.log_softmax(-1).gather(2, indices[..., None])[..., 0]
    torch.testing.assert_close(torch.stack([told.logprob for _, told, _ in steps]), expected)
    ranks = (logits > logits.gather(2, indices[..., None])).sum(-1) + 1
    assert torch.equal(torch.stack([told.rank for _, told, _ in steps]), ranks)


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
    call_elsewhere("tests.sampling.test_sampler:_write_texts", path)
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
