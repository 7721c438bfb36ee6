# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stand-ins, held to plain definitions of the native ops."""

import os

import pytest
import torch
from vllm_turbo_cpu_standins import quantization, registry
from vllm_turbo_cpu_standins.attention import serve_any_cpu
from vllm_turbo_cpu_standins.inspection import inspect_here

from vllm.model_executor.models import registry as models
from vllm.v1.attention.backends import cpu_attn

NAMESPACE = "turbo_standins_test"


def test_registers_only_what_is_missing():
    own = torch.library.Library(NAMESPACE, "FRAGMENT")
    own.define("greedy_argmax(Tensor logits) -> Tensor")
    own.impl("greedy_argmax", lambda logits: logits.new_zeros(1), "CPU")
    registered = registry.register_missing(NAMESPACE)
    assert set(registered) == set(registry.STANDINS) - {"greedy_argmax"}
    ops = getattr(torch.ops, NAMESPACE)
    # The op that was there is unchanged.
    assert ops.greedy_argmax(torch.tensor([[0.0, 1.0]])).tolist() == [0.0]
    assert registry.register_missing(NAMESPACE) == []
    ops.init_cpu_memory_env([0])


@pytest.mark.parametrize("has_avx512", [True, False])
def test_attention_begins_on_any_cpu(monkeypatch, has_avx512: bool):
    """It does not need the CPU's instructions.

    It takes dtypes that vLLM takes for FP8, and refuses heads that FP8 cannot have.
    """
    cpu = torch.cpu
    monkeypatch.setattr(cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", cpu_attn._get_attn_isa)
    serve_any_cpu()
    for cache_dtype in ("auto", "fp8", "turbo4"):
        isa = cpu_attn._get_attn_isa(torch.bfloat16, 32, 64, cache_dtype)
        assert isa in ("vec", "neon")
    with pytest.raises(NotImplementedError, match="divisible by 32"):
        cpu_attn._get_attn_isa(torch.bfloat16, 32, 80, "fp8")


def test_models_are_inspected_in_this_process(monkeypatch):
    monkeypatch.setattr(models, "_run_in_subprocess", models._run_in_subprocess)
    inspect_here()
    assert models._run_in_subprocess(os.getpid) == os.getpid()


def test_slot_mapping_follows_each_sequences_blocks(ops):
    block_size = 4
    block_table = torch.tensor([[7, 2, 9], [5, 1, 0]], dtype=torch.int32)
    positions = torch.tensor([3, 4, 5, 0, 1, 99, 99])
    query_start_loc = torch.tensor([0, 3, 5], dtype=torch.int32)
    slots = torch.full((7,), -1)
    ops.compute_slot_mapping_kernel_impl(
        query_start_loc, positions, block_table, slots, block_size
    )
    # The last two are padding and stay untouched.
    assert slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 5 * 4 + 1, -1, -1]


def test_greedy_is_the_first_largest(ops):
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, -1.0, 0.0]])
    assert ops.greedy_argmax(logits).tolist() == [1, 0]


def test_gumbel_follows_the_distribution_and_the_seed(ops):
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0])
    num_draws = 4000
    logits = probabilities.log().expand(num_draws, -1).contiguous()
    seeds = torch.arange(num_draws)
    tokens = ops.fused_gumbel_argmax(logits, seeds)
    shares = torch.bincount(tokens, minlength=4) / num_draws
    assert torch.allclose(shares, probabilities, atol=0.04)
    assert shares[3] == 0
    # A row's draw depends on its own seed, not on its neighbours.
    alone = ops.fused_gumbel_argmax(logits[17:18], seeds[17:18])
    assert alone.item() == tokens[17]


def test_rejection_stops_at_the_first_mismatch(ops):
    # Requests with 2 drafts (all right), 3 (the second wrong), 0, and 1 (not greedy).
    output = torch.full((4, 4), -1)
    ops.rejection_greedy_sample_kernel_impl(
        output,
        torch.tensor([2, 5, 5, 6]),
        torch.tensor([10, 11, 20, 99, 22, 30]),
        torch.tensor([10, 11, 20, 21, 22, 30]),
        torch.tensor([[12], [23], [42], [31]]),
        torch.tensor([True, True, True, False]),
        3,
    )
    assert output.tolist() == [
        [10, 11, 12, -1],
        [20, 21, -1, -1],
        [42, -1, -1, -1],
        [-1, -1, -1, -1],
    ]


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_scattered_pages(
    ops, window: int, softcap: float, with_sinks: bool
):
    """Two sequences, one with cached context, are held to a loop over tokens."""
    generator = torch.Generator().manual_seed(1)
    num_heads, num_kv_heads, head_size, block_size = 4, 2, 8, 4
    seq_lens, query_lens = [9, 5], [3, 5]
    block_table = torch.tensor([[6, 0, 3], [2, 5, 0]], dtype=torch.int32)
    key_cache = torch.full((8, num_kv_heads, block_size, head_size), float("nan"))
    value_cache = key_cache.clone()
    keys = [
        torch.randn(n, num_kv_heads, head_size, generator=generator) for n in seq_lens
    ]
    values = [torch.randn(k.shape, generator=generator) for k in keys]
    for row, seq_len in enumerate(seq_lens):
        positions = torch.arange(seq_len)
        slots = block_table[row, positions // block_size] * block_size
        slots = slots.long() + positions % block_size
        slots[0] = -1 if row else slots[0]
        ops.cpu_attn_reshape_and_cache(
            keys[row], values[row], key_cache, value_cache, slots, "vec"
        )
        if row:
            # Slot -1 wrote nothing: the token is put there by hand.
            assert key_cache[2, :, 0].isnan().all()
            key_cache[2, :, 0], value_cache[2, :, 0] = keys[row][0], values[row][0]
    query = torch.randn(sum(query_lens), num_heads, head_size, generator=generator)
    sinks = torch.randn(num_heads, generator=generator) if with_sinks else None
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query, key_cache, value_cache, output,
        torch.tensor([0, 3, 8], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        0.5, True, None, window, block_table, softcap, torch.empty(0), sinks, None,
    )  # fmt: skip
    token = 0
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens)):
        for position in range(seq_len - query_len, seq_len):
            start = max(0, position - window + 1) if window > 0 else 0
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                seen = slice(start, position + 1)
                logits = 0.5 * keys[row][seen, kv_head] @ query[token, head]
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                weights = logits.exp()
                total = weights.sum() + (sinks[head].exp() if with_sinks else 0)
                expected = weights @ values[row][seen, kv_head] / total
                assert torch.allclose(output[token, head], expected, atol=1e-5)
            token += 1


def test_latents_are_attended_to(ops):
    """Each request has one query, and the cache's first coordinates are K and V."""
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(5, 4, 6, generator=generator)
    query = torch.randn(2, 3, 6, generator=generator)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    lengths = torch.tensor([6, 1], dtype=torch.int32)
    out = torch.full((2, 3, 4), torch.nan)
    ops.mla_decode_kvcache(out, query, cache, 0.5, table, lengths)
    keys = torch.cat([cache[4], cache[1, :2]])
    weights = (query[0] @ keys.T * 0.5).softmax(-1)
    torch.testing.assert_close(out[0], weights @ keys[:, :4])
    torch.testing.assert_close(out[1], cache[2, 0, :4].expand(3, -1))


def test_attention_refuses_what_it_has_not(ops):
    page = torch.zeros(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match="fp8"):
        ops.cpu_attn_reshape_and_cache(
            page[0, :, :1], page[0, :, :1], page, page, torch.zeros(1), "vec",
            kv_cache_dtype="fp8",
        )  # fmt: skip


def test_inputs_of_a_drafter_leave_out_what_was_rejected(ops):
    last, rejected = torch.empty(3, dtype=torch.int32), torch.empty(3).long()
    ops.eagle_prepare_inputs_padded_kernel_impl(
        torch.tensor([2, 2, 5]),
        torch.tensor([1, 1, 4]),
        torch.tensor([0, 3, 4, 8], dtype=torch.int32),
        last,
        rejected,
        3,
    )
    assert rejected.tolist() == [2, 0, 0]
    assert last.tolist() == [0, 3, 7]


def test_next_token_is_the_last_that_was_sampled(ops):
    token, count = torch.empty(3).long(), torch.empty(3).long()
    sampled = torch.tensor([[5, 6, -1], [7, 8, 9], [-1, -1, -1]])
    discarded = torch.tensor([False, True, False])
    backup = torch.tensor([1, 2, 3])
    ops.eagle_prepare_next_token_padded_kernel_impl(
        sampled, discarded, backup, token, count, 20, 3, 3
    )
    assert token.tolist() == [6, 2, 3]
    assert count.tolist() == [2, 0, 0]


def test_next_draft_lies_one_further_and_not_past_the_longest(ops):
    positions, lens = torch.tensor([3, 9]), torch.tensor([4, 10], dtype=torch.int32)
    slots = torch.empty(3).long()
    table = torch.tensor([[5, 6, 7], [8, 9, 1]], dtype=torch.int32)
    ops.eagle_step_slot_mapping_metadata_kernel_impl(
        positions, table, lens, positions, slots, 4, 10, -1
    )
    assert positions.tolist() == [4, 0] and lens.tolist() == [5, 1]
    assert slots.tolist() == [24, -1, -1]


@pytest.mark.parametrize("shift", [False, True])
def test_room_for_more_drafts(ops, shift: bool):
    """Two requests have three tokens each. One token of the second was rejected."""
    added, num_new = 2, 6 + 2 * (1 if shift else 2)
    ids, positions = torch.empty(num_new).long(), torch.empty(num_new).long()
    rejected, masked = torch.empty(num_new).bool(), torch.empty(num_new).bool()
    new, places = torch.empty(4, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    ops.copy_and_expand_eagle_inputs_kernel_impl(
        torch.tensor([10, 11, 12, 20, 21, 22]),
        torch.tensor([5, 6, 7, 0, 1, 2]),
        torch.tensor([13, 23]),
        ids,
        positions,
        rejected,
        masked,
        new,
        places,
        torch.tensor([0, 3, 6], dtype=torch.int32),
        torch.tensor([2, 4], dtype=torch.int32),
        0,
        99,
        6,
        added,
        shift,
    )
    expected = [[10, 11, 12, 13, 99], [20, 21, 23, 99, 0]]
    first = [row[1:] if shift else row for row in expected]
    assert ids.tolist() == first[0] + first[1]
    assert masked.tolist() == [token == 99 for token in ids.tolist()]
    assert rejected.tolist() == [token == 0 for token in ids.tolist()]
    assert ids[new.long()].tolist() == [13, 99, 23, 99]
    # Positions go on in order, and a rejected token has position 0.
    length = num_new // 2
    assert positions.tolist() == [*range(5, 5 + length), *range(length - 1), 0]
    assert places.tolist() == ([0, 1, 2, 4, 5, 6] if shift else [0] * 6)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("query_lens", [None, [1, 3, 0, 2]])
def test_convolutions_go_on_from_their_states(ops, activation, query_lens):
    """They give as much as whole sequences; padding has no output and no state."""
    torch.manual_seed(0)
    dim, width, before = 6, 3, 5
    lens = query_lens or [1] * 4
    slots, padding = torch.tensor([2, 0, 4, 5]), 0
    columns = slots if query_lens is None else slots[:, None]
    weight, bias = torch.randn(dim, width), torch.randn(dim)
    sequences = [torch.randn(dim, before + new) for new in lens]
    state = torch.randn(6, dim, width - 1)
    for slot, sequence in zip(slots, sequences):
        state[slot] = sequence[:, before - width + 1 : before]
    unused = state[[0, 1, 3]].clone()
    x = torch.cat([sequence[:, before:].T for sequence in sequences])
    starts = None
    if query_lens is not None:
        starts = torch.tensor([0, *lens]).cumsum(0).int()
    output = ops.causal_conv1d_update_cpu_vec(
        x.clone(), state, weight, bias, activation, columns, starts, padding
    )
    expected = []
    for slot, sequence, new in zip(slots.tolist(), sequences, lens):
        sums = torch.stack(
            [
                (sequence[:, end - width + 1 : end + 1] * weight).sum(1) + bias
                for end in range(before, before + new)
            ]
            or [torch.empty(0, dim)]
        ).view(new, dim)
        if activation == "silu":
            sums = sums * torch.sigmoid(sums)
        expected.append(sums if slot != padding else torch.zeros(new, dim))
        if slot != padding:
            torch.testing.assert_close(state[slot], sequence[:, -width + 1 :])
    torch.testing.assert_close(output, torch.cat(expected))
    assert torch.equal(state[[0, 1, 3]], unused)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_experts_are_summed_up_by_their_weights(ops, is_weighted: bool):
    """There are three experts, and each token has two."""
    torch.manual_seed(0)
    hidden, inner = 6, 4
    weights = torch.randn(3, 2 * inner, hidden), torch.randn(3, hidden, inner)
    biases = torch.randn(3, 2 * inner), torch.randn(3, hidden)
    packed = [torch.empty_like(weight) for weight in weights]
    for weight, copy in zip(weights, packed):
        ops.prepack_moe_weight(weight, copy, "vec")
    x, out = torch.randn(4, hidden), torch.full((4, hidden), float("nan"))
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [0, 2]], dtype=torch.int32)
    shares = torch.rand(4, 2)
    ops.cpu_fused_moe(
        out, x, *packed, *biases, shares, ids, not is_weighted, "silu", "vec"
    )
    for row, experts in enumerate(ids.tolist()):
        expected = torch.zeros(hidden)
        for expert, share in zip(experts, shares[row]):
            gate, up = (weights[0][expert] @ x[row] + biases[0][expert]).split(inner)
            made = weights[1][expert] @ (gate * torch.sigmoid(gate) * up)
            made += biases[1][expert]
            expected += share * made if is_weighted else made
        torch.testing.assert_close(out[row], expected)
    with pytest.raises(NotImplementedError, match="gelu"):
        rest = (shares, ids, False, "gelu", "vec")
        ops.cpu_fused_moe(out, x, *packed, None, None, *rest)


@pytest.mark.parametrize("with_zeros", [False, True])
def test_product_with_codes_of_four_bits(ops, with_zeros: bool):
    """Columns are in blocks of 16. Each 8 rows have a scale, and may have a zero."""
    torch.manual_seed(0)
    k, n, group = 32, 48, 8
    codes = torch.randint(16, (k, n))
    zeros = torch.randint(16, (k // group, n)) if with_zeros else None
    scales, bias = torch.rand(k // group, n), torch.randn(n)

    def pack(values: torch.Tensor) -> torch.Tensor:
        words = [
            sum(code << 4 * place for place, code in enumerate(row[i : i + 8]))
            for row in values.tolist()
            for i in range(0, values.shape[1], 8)
        ]
        signed = [word - 2**32 if word >= 2**31 else word for word in words]
        return torch.tensor(signed, dtype=torch.int32).view(len(values), -1)

    blocks = [pack(block).flatten() for block in codes.split(16, dim=1)]
    rows, out = torch.randn(3, k), torch.empty(3, n)
    packed = None if zeros is None else pack(zeros)
    ops.cpu_gemm_wna16(rows, torch.stack(blocks), out, scales, packed, bias, 8, "vec")
    offset = 8 if zeros is None else zeros.repeat_interleave(group, 0)
    weight = (codes - offset) * scales.repeat_interleave(group, 0)
    torch.testing.assert_close(out, rows @ weight + bias)


def test_fp8_codes_saturate_and_leave_padding(ops):
    values = torch.tensor([[1.0, -3.0, 1000.0, -1000.0]])
    out = torch.full((2, 4), 5.0).to(torch.float8_e4m3fn)
    ops.static_scaled_fp8_quant(out, values, torch.tensor([2.0]))
    assert out.float().tolist() == [[0.5, -1.5, 448.0, -448.0], [5.0] * 4]


def test_scales_of_groups_are_refused(ops):
    values = torch.ones(2, 4)
    out = values.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="whole tensors"):
        ops.static_scaled_fp8_quant(out, values, torch.ones(2), [1, -1])


def test_fp8_products_are_not_onednns(monkeypatch):
    """The reference of oneDNN takes minutes where another CPU takes a second."""
    seen = []

    def scaled_mm(*args: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._get_mkldnn_enabled())
        return args[0]

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    quantization.multiply_fp8_without_onednn()
    quantization.multiply_fp8_without_onednn()
    assert torch._scaled_mm(torch.ones(1)) == 1
    assert seen == [False] and torch._C._get_mkldnn_enabled()


def test_halves_are_multiplied_in_fp32(monkeypatch):
    """Their own product takes eight times as long on some CPUs."""
    seen = []

    def linear(x: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    quantization.multiply_halves_in_fp32()
    quantization.multiply_halves_in_fp32()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ones = torch.ones(2, 2, dtype=dtype)
        assert torch.nn.functional.linear(ones, ones, ones[0]).dtype == dtype
    assert seen == [torch.float32, torch.float32, torch.float64]
