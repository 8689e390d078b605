"""The metadata of a GGUF file, each entry checked where it is read, and its end tokens."""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Any

from lmdecode.readers.gguf.reader import GgufFile, Strings

__all__ = ["READ", "REFUSED", "WITHOUT_EFFECT", "Facts", "end_tokens", "refused"]


#: Read for one architecture at least; another's file with one is refused, if it has an effect.
READ = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length attention.key_length_swa
    attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.recurrent_layers
    attention.scale attention.shared_kv_layers attention.sliding_window
    attention.sliding_window_pattern attention.value_length attention.value_length_swa
    attn_logit_softcapping block_count context_length embedding_length
    embedding_length_per_layer_input embedding_scale expert_count expert_feed_forward_length
    expert_gating_func expert_shared_feed_forward_length expert_used_count expert_weights_scale
    feed_forward_length final_logit_softcapping full_attention_interval leading_dense_block_count
    logit_scale nextn_predict_layers residual_scale rope.dimension_count rope.dimension_count_swa
    rope.freq_base rope.freq_base_swa rope.global.freq_base rope.local.freq_base rope.scale_linear
    rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor
    shortconv.l_cache ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size
    ssm.time_step_rank
    """.split()
)


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


#: Known to change no logits, with the reason; a name that ends in a dot names a group.
WITHOUT_EFFECT = _by_key({
    "the shapes of the tensors say it": "attention.value_length expert_feed_forward_length "
    "expert_shared_count expert_shared_feed_forward_length feed_forward_length vocab_size",
    "it is of images, and a text has none": "deepstack_mapping image_token_id mm. "
    "n_deepstack_layers vision. vision_end_token_id vision_start_token_id",
    "it is of embeddings of texts": "embedding_length_out pooling_type",
    "a text has one position where an image has three": "mrope_sections rope.dimension_sections "
    "rope.mrope_interleaved rope.mrope_section",
    "attention.key_length says it": "attention.head_dim",
    "old converters wrote it for all models": "use_parallel_residual",
    "norms are RMS, with an entry of their own": "attention.layer_norm_epsilon",
    "there are no experts": "expert_used_count",
    "it tells how the model was trained": "rope.scaling.finetuned",
    "an architecture's rows have one order": "tensor_data_layout",
})  # fmt: skip

_OTHERS = "which is of other architectures"
#: Descriptions of entries that are refused, as they may change logits.
REFUSED = _by_key({
    "which is a mixture of experts; expected a dense model": "expert_count",
    "with which a token sees those behind it, as in an encoder": "attention.causal",
    "which bounds or scales what attention computes": "attention.clamp_kqv "
    "attention.max_alibi_bias attention.output_scale attention.temperature_length "
    "attention.temperature_scale rope.scaling.alpha rope.scaling.yarn_log_multiplier",
    "which says how experts are chosen, or weighed": "expert_group_count expert_group_scale "
    "expert_group_used_count expert_weights_norm experts_per_group interleave_moe_layer_step "
    "moe_every_n_layers norm_top_k_prob router_logit_softcapping swiglu_clamp_exp "
    "swiglu_clamp_shexp",
    "with which value heads are in another order": "ssm.v_head_reordered",
    _OTHERS: """
    activation_sparsity_scale altup.active_idx altup.num_inputs attention.decay_lora_rank
    attention.gate_lora_rank attention.group_norm_epsilon attention.group_norm_groups
    attention.iclr_lora_rank attention.indexer.head_count attention.indexer.key_length
    attention.indexer.top_k attention.key_length_mla attention.kv_lora_rank attention.q_lora_rank
    attention.relative_buckets_count attention.value_length_mla
    attention.value_residual_mix_lora_rank classifier.output_labels convnext.block_count
    convnext.embedding_length decoder_block_count decoder_start_token_id
    expert_chunk_feed_forward_length features_length kda.head_dim moe_latent_size posnet.block_count
    posnet.embedding_length rescale_every_n_layers ssm.dt_b_c_rms swin_norm time_decay_extra_dim
    time_mix_extra_dim token_shift_count wkv.head_size {dense}_feat_in {dense}_feat_out
    """,
})  # fmt: skip

# Values that ask for nothing, where these are not 0 and False.
_NOTHING: dict[str, tuple[float, ...]] = {"attention.causal": (True,), "expert_weights_norm": ()}
_NOTHING |= dict.fromkeys(("norm_top_k_prob", "ssm.v_head_reordered"), (True,))  # of Ollama
for _key in ("gating_func", "group_count", "group_used_count", "weights_scale"):
    _NOTHING[f"expert_{_key}"] = (0, 1)


def unread(key: str, value: object) -> str | None:
    """Return the fault of an entry that was not asked for, or None."""
    if key in WITHOUT_EFFECT or key.partition(".")[0] + "." in WITHOUT_EFFECT:
        return None
    if isinstance(value, (int, float)) and value in _NOTHING.get(key, (0,)):
        return None
    what = REFUSED.get(key, _OTHERS if key in READ else "which lmdecode does not know")
    how = "if logits do not depend on it, gguf-new-metadata --remove-metadata leaves it out"
    return f"{what} ({how})" if "expected" in what else f"{what}; expected none ({how})"


_MAX_COUNT = (1 << 31) - 1
_OF_OLLAMA = ("rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image")


def refused(file: GgufFile, what: str) -> ValueError:
    """Return the error of a file that is read, but is no model that there is."""
    return ValueError(f"Decoding.from_pretrained: {file.path} {what}")


def _is_list(value: object) -> bool:
    return isinstance(value, (array, bytes, list, tuple))


class Facts:
    """Metadata of a file's model; keys are without the architecture's name.

    ``architecture`` is the file's ``general.architecture``; ``asked`` are the keys that have been
    read or looked for.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.asked = set[str]()
        self.architecture: str = self._whole("general.architecture", str, "a name")

    def _whole(self, key: str, kind: type, expected: str) -> Any:
        value = self.file.metadata.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise refused(self.file, f"has {value!r} for {key}; expected {expected}")
        return value

    def _name(self, key: str) -> str:
        self.asked.add(key)
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether there is an entry."""
        return self._name(key) in self.file.metadata

    @cached_property
    def is_ollamas(self) -> bool:
        """Whether it is a Gemma with a mark of Ollama's converter, which leaves out much."""
        marks = {f"{self.architecture}.{key}" for key in _OF_OLLAMA}
        marks |= {f"tokenizer.ggml.add_{name}_token" for name in ("padding", "unknown")}
        of_images = any(name.startswith(("v.", "mm.")) for name in self.file.tensors)
        is_gemma = self.architecture in ("gemma2", "gemma3")
        return is_gemma and (of_images or not marks.isdisjoint(self.file.metadata))

    def is_list(self, key: str) -> bool:
        """Whether there is an entry that is a list."""
        return _is_list(self.file.metadata.get(self._name(key)))

    def check_all_read(self) -> None:
        """Refuse an entry that nobody has asked for, unless it is known to have no effect."""
        prefix = f"{self.architecture}."
        for name, value in self.file.metadata.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key not in self.asked and (why := unread(key, value)):
                raise refused(self.file, f"has {_shown(value)} for {name}, {why}")

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an int; a list of one for each layer must have the same for all."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_COUNT:
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected one int of at least {least}"
            )
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a count of features, heads or layers: what a tensor of the file is as large as.

        So nothing is made of a size that a damaged file claims.
        """
        value = self.count(key, default, least=least)
        if value > self._largest_size:
            raise refused(
                self.file,
                f"has {value} for {self.architecture}.{key}; expected at most "
                f"{self._largest_size}, the largest size of its tensors",
            )
        return value

    @cached_property
    def _largest_size(self) -> int:
        tensors = self.file.tensors
        return max(len(tensors), *(max(tensor.shape, default=0) for tensor in tensors.values()), 0)

    def counts(self, key: str, length: int) -> list[int]:
        """Return a list of as many ints or flags, each at least 0; one int stands for all."""
        name = self._name(key)
        value: Any = self.file.metadata.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        numbers = [value] * length if whole else list(value) if _is_list(value) else []
        if len(numbers) != length or not all(
            isinstance(n, int) and 0 <= n < _MAX_COUNT for n in numbers
        ):
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected {length} ints of at least 0"
            )
        return [int(n) for n in numbers]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, neither tiny nor huge."""
        name = self._name(key)
        value: Any = self.file.metadata.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1e-30 <= value <= 1e30:
            raise refused(self.file, f"has {_shown(value)} for {name}; expected a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a flag."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if not isinstance(value, bool):
            raise refused(self.file, f"has {_shown(value)} for {name}; expected True or False")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if not isinstance(value, str):
            raise refused(self.file, f"has {_shown(value)} for {name}; expected a name")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """Return the token of ``tokenizer.ggml``'s entry, or None."""
        name = f"tokenizer.ggml.{key}"
        value = self.file.metadata.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected a token below {vocab_size}"
            )
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.file.tensors:
            raise refused(self.file, f"has no tensor {name!r}; expected one")
        return self.file.tensors[name].shape

    def of_first_layer(self, ending: str) -> str:
        """Return the name of the tensor of the first layer that has one with this ending."""
        names = (f"blk.{i}.{ending}" for i in range(self.count("block_count")))
        return next((name for name in names if name in self.file.tensors), f"blk.0.{ending}")


def _shown(value: object) -> str:
    """Return a value as an error shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Tokens that end a text beside the file's own end token, as in llama.cpp.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
         "<EOT>", "<|end_of_text|>", "<|return|>", "<|call|>", "<turn|>",
         "<|tool_response>")  # fmt: skip
# Where these are, "<|end|>" ends a message, and more of them follow.
_OF_MESSAGES = ("<|return|>", "<|call|>")
_SPECIAL = (3, 4)  # of tokenizer.ggml.token_type: control, and the user's


def end_tokens(facts: Facts, vocab_size: int) -> list[int]:
    """Return the tokens that end a text, from the file's entries and by known names."""
    ends = [facts.token(f"{key}_token_id", vocab_size) for key in ("eos", "eot", "eom")]
    tokens = facts.file.metadata.get("tokenizer.ggml.tokens")
    kinds = facts.file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, Strings) and isinstance(kinds, array):
        count = min(len(tokens), vocab_size)
        found = {
            tokens[i]: i
            for i, kind in enumerate(kinds[:count])
            if kind in _SPECIAL and tokens[i] in _ENDS
        }
        ends += found.values()
        if all(name in found for name in _OF_MESSAGES):
            ends = [end for end in ends if end != found.get("<|end|>")]
    return list(dict.fromkeys(end for end in ends if end is not None))
