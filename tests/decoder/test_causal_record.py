"""The ops read each part and each field that ``PackedCausalModel`` writes, by its name."""

import contextlib
import dataclasses

import pytest
import torch

from lmdecode.models.configs import CausalConfig
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.record import config_entries, config_of, places_of, read_record
from lmdecode.models.weights import CausalLayerWeights, CausalWeights
from tests.decoder.causal_steps import Entry, forward_arguments, new_caches, packed
from tests.support.causal_models import CASES, random_tokens
from tests.support.records import with_entries

ops = torch.ops.lmdecode


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_each_part_is_looked_at(architecture: str, variant: str) -> None:
    model = packed(architecture, variant, "int8")
    ops.causal_workspace_bytes(model.memory, [1, 1, 1])
    for name, _, size in places_of(model.record):
        memory = with_entries(model.memory, {f"weights.{name}": [1 << 40, size]})
        with pytest.raises(ValueError, match=rf"weights\.{name} is at byte 1099511627776; expec"):
            ops.causal_workspace_bytes(memory, [1, 1, 1])


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_each_entry_is_read(architecture: str, variant: str) -> None:
    """None is written that has no effect: what nothing reads is refused, and so are other types."""
    model = packed(architecture, variant, "int8")
    for name in model.record:
        memory = with_entries(model.memory, {name: {}})
        with pytest.raises(ValueError, match=r"^causal_workspace_bytes: ") as error:
            ops.causal_workspace_bytes(memory, [1, 1, 1])
        assert f"{name} is {{}}; expected" in str(error.value) or name == "kind"


def test_a_switch_that_is_off_is_not_written() -> None:
    """A record that does not name it is that of a release without it, and so is its hash."""
    model = packed("llama", "plain")
    off = {
        f"config.{field.name}"
        for field in dataclasses.fields(CausalConfig)
        if not field.default and getattr(model.config, field.name) == field.default
    }
    assert off > {"config.ffn_beside", "config.value_norm", "config.logits_softcap"}
    assert not off & model.record.keys()


def test_each_part_is_in_some_case() -> None:
    names = {
        name.split(".")[-1] for case in CASES for name, _, _ in places_of(packed(*case).record)
    }
    of_mtp = {"embedding_norm_gamma", "hidden_norm_gamma", "embedding_projection",
              "hidden_projection"}  # fmt: skip
    fields = {*CausalWeights._fields, *CausalLayerWeights._fields} - {"layers", "mtp"}
    assert fields - names == of_mtp
    assert names <= fields


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_the_config_is_that_of_the_record(architecture: str, variant: str) -> None:
    model = packed(architecture, variant, "int8")
    found = config_of(CausalConfig, model.record)
    assert found == model.config
    assert dataclasses.asdict(found) == dataclasses.asdict(model.config)


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_an_entry_that_is_absent_is_off_or_refused(architecture: str, variant: str) -> None:
    """Both sides take it alike: what the ops compute is what they do with the config it gives."""
    model = packed(architecture, variant, "int8")
    caches, names = new_caches(model, 1, 32), [n for n in model.record if n.startswith("config.")]
    arguments = forward_arguments(caches, Entry(0, random_tokens(9), num_logits=9))

    def logits(memory: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.causal_forward_(memory, *arguments[1:])
        caches.truncate([0], [0])
        return found

    for name in names:
        memory = with_entries(model.memory, {name: None}, num_layers=model.config.num_layers)
        try:
            ops.causal_workspace_bytes(memory, [1, 1, 1])
            config = config_of(CausalConfig, read_record(memory))
        except (TypeError, ValueError):
            continue
        said = dict.fromkeys(names) | config_entries(config)
        whole = with_entries(memory, said, num_layers=config.num_layers)
        assert logits(memory).equal(logits(whole)), name


def test_a_hash_takes_numbers_as_the_ops_take_them() -> None:
    """A GGUF file has an epsilon in float32, a config in float64: both are one model."""
    model = packed("llama", "plain", "int8")
    epsilon = float(torch.tensor(model.config.norm_epsilon, dtype=torch.float32))
    assert epsilon != model.config.norm_epsilon
    for value, is_same in ((epsilon, True), (2 * epsilon, False)):
        other = PackedCausalModel.of_memory(
            with_entries(model.memory, {"config.norm_epsilon": value})
        )
        assert (other.weights_hash() == model.weights_hash()) == is_same


def test_a_mixer_that_no_layer_has() -> None:
    """Nor one that all layers have: a model has caches of keys, and states where it has a mixer."""
    model = packed("lfm2", "convolutions at the ends", "int8")
    layers = len(model.config.windows)
    for changed in (None, [False] * layers, [True] * layers):
        memory = with_entries(model.memory, {"config.mixer.layers": changed})
        with pytest.raises(ValueError, match=r"config.mixer.layers are all alike; expected a laye"):
            ops.causal_workspace_bytes(memory, [1, 1, 1])
        with pytest.raises((KeyError, ValueError)):
            PackedCausalModel.of_memory(memory)


HOSTILE = [-1, 0, 1 << 31, 1 << 40, (1 << 63) - 64, 10**30, 1e308, float("inf"), "x", None, True,
           [], [0], [64, 64], [-64, 64], [64, 1 << 62], [1 << 62, 1 << 62], [[1]]]  # fmt: skip


@pytest.mark.parametrize(("architecture", "variant"), CASES[::8])
def test_hostile_values_are_refused_or_do_no_harm(architecture: str, variant: str) -> None:
    """Each of each entry: read here, by the ops, and in a step; nothing but a ValueError comes."""
    model = packed(architecture, variant, "int8")
    caches = new_caches(model, 1, 32)
    for name in model.record:
        for value in HOSTILE:
            memory = with_entries(model.memory, {name: value})
            entry = Entry(0, random_tokens(3))
            arguments = [memory, *forward_arguments(caches, entry)[1:]]
            with contextlib.suppress(ValueError):
                assert int(ops.causal_workspace_bytes(memory, [1, 1, 1])) > 0
                ops.causal_forward_(*arguments)
            caches.truncate([0], [0])
