# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Registers the ops that are missing, and no others."""

from collections.abc import Callable

import torch

from vllm_turbo_cpu_standins import (
    attention,
    convolution,
    delta_nets,
    drafting,
    experts,
    paging,
    quantization,
    sampling,
    states,
)

# Schemas as in csrc/cpu/torch_bindings.cpp: callers pass arguments by position.
STANDINS: dict[str, tuple[str, Callable]] = {
    "init_cpu_memory_env": ("(SymInt[] node_ids) -> ()", paging.init_cpu_memory_env),
    "compute_slot_mapping_kernel_impl": (
        "(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a3!) slot_mapping, SymInt block_size) -> ()",
        paging.compute_slot_mapping,
    ),
    "greedy_argmax": ("(Tensor logits) -> Tensor", sampling.greedy_argmax),
    "fused_gumbel_argmax": (
        "(Tensor logits, Tensor seeds) -> Tensor",
        sampling.fused_gumbel_argmax,
    ),
    "rejection_greedy_sample_kernel_impl": (
        "(Tensor(a0!) output_token_ids, Tensor cu_num_draft_tokens, "
        "Tensor draft_token_ids, Tensor target_argmax, Tensor bonus_token_ids, "
        "Tensor? is_greedy, SymInt max_spec_len) -> ()",
        sampling.rejection_greedy_sample,
    ),
    "eagle_prepare_inputs_padded_kernel_impl": (
        "(Tensor cu_num_draft_tokens, Tensor valid_sampled_tokens_count, "
        "Tensor query_start_loc_gpu, Tensor(a3!) token_indices_to_sample, "
        "Tensor(a4!) num_rejected_tokens_gpu, SymInt num_reqs) -> ()",
        drafting.prepare_inputs,
    ),
    "eagle_prepare_next_token_padded_kernel_impl": (
        "(Tensor sampled_token_ids, Tensor discard_request_mask, "
        "Tensor backup_next_token_ids, Tensor(a3!) next_token_ids, "
        "Tensor(a4!) valid_sampled_tokens_count, SymInt vocab_size, "
        "SymInt num_sampled_tokens_per_req, SymInt num_reqs) -> ()",
        drafting.prepare_next_token,
    ),
    "eagle_step_slot_mapping_metadata_kernel_impl": (
        "(Tensor positions, Tensor block_table, Tensor(a2!) seq_lens, "
        "Tensor(a3!) out_clamped_positions, Tensor(a4!) out_slot_mapping, "
        "SymInt block_size, SymInt max_model_len, SymInt PAD_ID) -> ()",
        drafting.step_slot_mapping,
    ),
    "copy_and_expand_eagle_inputs_kernel_impl": (
        "(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, "
        "Tensor(a3!) out_input_ids, Tensor(a4!) out_positions, "
        "Tensor(a5!) out_is_rejected_token_mask, "
        "Tensor(a6!) out_is_masked_token_mask, Tensor(a7!) out_new_token_indices, "
        "Tensor(a8!) out_hidden_state_mapping, Tensor query_start_loc, "
        "Tensor query_end_loc, SymInt padding_token_id, "
        "SymInt parallel_drafting_token_id, SymInt total_input_tokens, "
        "SymInt num_padding_slots_per_request, bool shift_input_ids) -> ()",
        drafting.expand_inputs,
    ),
    "cpu_gemm_wna16": (
        "(Tensor input, Tensor q_weight, Tensor(a2!) output, Tensor scales, "
        "Tensor? zeros, Tensor? bias, SymInt pack_factor, str isa_hint) -> ()",
        quantization.gemm_wna16,
    ),
    "static_scaled_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
        quantization.static_scaled_fp8_quant,
    ),
    "causal_conv1d_update_cpu_vec": (
        "(Tensor(a0!) x, Tensor(a1!) conv_state, Tensor weight, Tensor? bias, "
        "str? activation, Tensor? conv_state_indices, Tensor? query_start_loc, "
        "SymInt pad_slot_id) -> Tensor",
        convolution.update_state,
    ),
    "causal_conv1d_weight_pack": (
        "(Tensor weight) -> Tensor",
        convolution.weight_pack,
    ),
    "causal_conv1d_fwd_cpu": (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a3!)? conv_states, "
        "Tensor? query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, "
        "bool silu_activation, SymInt pad_slot_id, bool is_vnni) -> Tensor",
        convolution.prefill,
    ),
    "causal_conv1d_update_cpu": (
        "(Tensor x, Tensor(a1!) conv_states, Tensor weight, Tensor? bias, "
        "bool silu_activation, Tensor? num_accepted_tokens, "
        "Tensor? conv_state_indices, SymInt pad_slot_id, bool is_vnni) -> Tensor",
        convolution.decode,
    ),
    "fused_gdn_gating_cpu": (
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        delta_nets.gating,
    ),
    "chunk_gated_delta_rule_cpu": (
        "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
        "Tensor(a5!) initial_state, bool output_final_state, Tensor cu_seqlens, "
        "bool head_first, bool use_qk_l2norm_in_kernel, "
        "Tensor initial_state_indices, float eps=1e-5) -> (Tensor, Tensor)",
        delta_nets.prefill,
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
        "Tensor b, Tensor(a7!) initial_state_source, Tensor initial_state_indices, "
        "Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, "
        "float softplus_threshold=20.0) -> Tensor",
        delta_nets.decode,
    ),
    "fused_sigmoid_gating_delta_rule_update_spec_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
        "Tensor b, Tensor(a7!) initial_state_source, Tensor spec_state_indices, "
        "Tensor num_accepted_tokens, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, "
        "float softplus_threshold=20.0) -> Tensor",
        delta_nets.verify,
    ),
    "prepack_moe_weight": (
        "(Tensor weight, Tensor(a1!) packed_weight, str isa) -> ()",
        experts.prepack_weight,
    ),
    "cpu_fused_moe": (
        "(Tensor(a0!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, "
        "Tensor? w2_bias, Tensor topk_weights, Tensor topk_id, bool skip_weighted, "
        "str act, str isa) -> ()",
        experts.fused_experts,
    ),
    "selective_state_update_cpu": (
        "(Tensor(a0!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
        "Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
        "Tensor? state_batch_indices, Tensor? dst_state_batch_indices, "
        "SymInt null_block_id, Tensor(a13!) out, Tensor? num_accepted_tokens, "
        "Tensor? cu_seqlens) -> ()",
        states.update,
    ),
    "mamba_chunk_scan_fwd_cpu": (
        "(Tensor(a0!) out, Tensor(a1!) final_states, Tensor x, Tensor dt, Tensor A, "
        "Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor cu_seqlens) -> ()",
        states.scan,
    ),
    "get_scheduler_metadata": (
        "(int num_req, int num_heads_q, int num_heads_kv, int head_dim, "
        "Tensor seq_lens, ScalarType dtype, Tensor query_start_loc, bool casual, "
        "int window_size, str isa_hint, bool enable_kv_split, "
        'Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor',
        attention.get_scheduler_metadata,
    ),
    "cpu_attn_reshape_and_cache": (
        "(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache, "
        "Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0, "
        'str kv_cache_dtype="auto") -> ()',
        attention.reshape_and_cache,
    ),
    "cpu_attention_with_kv_cache": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output, "
        "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, "
        "Tensor? alibi_slopes, SymInt sliding_window_size, Tensor block_table, "
        "float softcap, Tensor scheduler_metadata, Tensor? s_aux, "
        "Tensor? dynamic_causal, float k_scale=1.0, float v_scale=1.0, "
        'str kv_cache_dtype="auto") -> ()',
        attention.attention_with_kv_cache,
    ),
    "mla_decode_kvcache": (
        "(Tensor! out, Tensor query, Tensor kv_cache, float scale, "
        "Tensor block_tables, Tensor seq_lens) -> ()",
        attention.decode_latents,
    ),
}

# A Library removes its ops when it is collected.
_libraries: list[torch.library.Library] = []


def register_missing(namespace: str = "_C") -> list[str]:
    """Registers each stand-in whose op is absent from `torch.ops.<namespace>`.

    Returns:
        The names registered by this call.

    """
    ops = getattr(torch.ops, namespace)
    missing = [name for name in STANDINS if not hasattr(ops, name)]
    if not missing:
        return []
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    for name in missing:
        schema, implementation = STANDINS[name]
        library.define(name + schema)
        # Several ops take no tensor to dispatch on.
        library.impl(name, implementation, "CompositeExplicitAutograd")
    return missing
