"""What becomes of each entry below an architecture's name: read, without effect, or refused.

An entry that a model's config does not ask for is looked up here. Names are those of the package
gguf, and some of older files and of Ollama's.
"""

from __future__ import annotations

__all__ = ["READ", "REFUSED", "WITHOUT_EFFECT", "unread"]

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


#: Known to change no logits, with the reason; a name that ends in a dot is that of a group.
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
#: Refused, as it may change logits: what it is.
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
    """Return what is wrong with an entry that nobody has asked for, None where nothing is."""
    if key in WITHOUT_EFFECT or key.partition(".")[0] + "." in WITHOUT_EFFECT:
        return None
    if isinstance(value, (int, float)) and value in _NOTHING.get(key, (0,)):
        return None
    what = REFUSED.get(key, _OTHERS if key in READ else "which lmdecode does not know")
    how = "if logits do not depend on it, gguf-new-metadata --remove-metadata leaves it out"
    return f"{what} ({how})" if "expected" in what else f"{what}; expected none ({how})"
