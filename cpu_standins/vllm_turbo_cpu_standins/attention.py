# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the ops of vLLM's CPU attention backend.

The native ops agree among themselves on the order of bytes in a page. So do these
two, which keep the row of a token and head together.
"""

import torch

PLAIN_CACHE_DTYPES = ("auto", "bfloat16", "float16")


def serve_any_cpu() -> None:
    """Has vLLM's CPU attention start with packed caches on CPUs without AVX-512 or AMX.

    vLLM requires these instructions for its native FP8 ops. It takes every quantised
    cache dtype for FP8, even for layers that are not packed. The ops below need no such
    instructions.
    """
    from vllm.v1.attention.backends import cpu_attn

    isa_of = cpu_attn._get_attn_isa
    if getattr(isa_of, "serves_any_cpu", False):
        return

    def isa_of_plain(
        dtype: torch.dtype,
        block_size: int,
        head_size: int | None = None,
        kv_cache_dtype: str | None = None,
    ) -> str:
        # vLLM refuses head sizes that its FP8 does not support.
        refused = head_size is not None and head_size % 32 != 0
        return isa_of(dtype, block_size, head_size, kv_cache_dtype if refused else None)

    isa_of_plain.serves_any_cpu = True  # type: ignore[attr-defined]
    cpu_attn._get_attn_isa = isa_of_plain


def get_scheduler_metadata(
    num_req: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor,
    casual: bool,
    window_size: int,
    isa_hint: str,
    enable_kv_split: bool,
    dynamic_causal: torch.Tensor | None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """Returns an empty plan: the attention below handles one request at a time."""
    return torch.empty(0, dtype=torch.int8)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Writes each token's key and value into its slot; slot -1 is skipped.

    Args:
        key: [>= num_tokens, num_kv_heads, head_size].
        value: As `key`.
        key_cache: [num_blocks, num_kv_heads, block_size, head_size].
        value_cache: As `key_cache`.
        slot_mapping: int64 [num_tokens].
        isa: Ignored.
        k_scale: Ignored; for FP8 pages only.
        v_scale: Ignored; for FP8 pages only.
        kv_cache_dtype: Must name the model's own precision.

    """
    _require_plain(kv_cache_dtype)
    block_size = key_cache.shape[2]
    tokens = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[tokens]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[tokens].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[tokens].to(value_cache.dtype)


def attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window_size: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Attends each request's queries to its cached tokens, in fp32.

    Args:
        query: [num_tokens, num_heads, head_size].
        key_cache: [num_blocks, num_kv_heads, block_size, head_size].
        value_cache: As `key_cache`.
        output: As `query`; written.
        query_start_loc: int32 [num_reqs + 1].
        seq_lens: int32 [num_reqs], the new tokens included.
        scale: Softmax scale.
        causal: Whether a query sees only positions up to its own.
        alibi_slopes: Must be None.
        sliding_window_size: Positions that a query sees, with its own; -1 for all.
        block_table: int32 [num_reqs, max_blocks].
        softcap: The cap that bounds logits by a tanh; 0 for none.
        scheduler_metadata: Ignored.
        s_aux: [num_heads] sink logits, which take weight but add no value.
        dynamic_causal: Must be None.
        k_scale: Ignored; for FP8 pages only.
        v_scale: Ignored; for FP8 pages only.
        kv_cache_dtype: Must name the model's own precision.

    """
    _require_plain(kv_cache_dtype)
    if alibi_slopes is not None or dynamic_causal is not None:
        raise NotImplementedError(
            "the CPU stand-ins have no ALiBi and no causality by request; "
            "use a native CPU build of vLLM"
        )
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        positions = torch.arange(seq_len)
        visible = _visible(
            positions[seq_len - (last - first) :],
            positions,
            causal,
            sliding_window_size,
        )
        output[first:last] = _attend(
            query[first:last],
            _gather(key_cache, block_table[row], seq_len),
            _gather(value_cache, block_table[row], seq_len),
            visible,
            scale,
            softcap,
            s_aux,
        ).to(output.dtype)


def decode_latents(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Attends each request's one query to its cached latents, in fp32.

    Args:
        out: [num_reqs, num_heads, kv_lora_rank]; written.
        query: [num_reqs, num_heads, kv_lora_rank + rope].
        kv_cache: [num_blocks, block_size, kv_lora_rank + rope].
        scale: Softmax scale.
        block_tables: int32 [num_reqs, max_blocks].
        seq_lens: int32 [num_reqs].

    """
    cache = kv_cache.unsqueeze(1)
    for row, seq_len in enumerate(seq_lens.tolist()):
        key = _gather(cache, block_tables[row], seq_len)
        value = key[..., : out.shape[-1]]
        visible = torch.ones(1, seq_len, dtype=torch.bool)
        own = query[row : row + 1]
        out[row] = _attend(own, key, value, visible, scale, 0.0, None)[0].to(out.dtype)


def _require_plain(kv_cache_dtype: str) -> None:
    if kv_cache_dtype not in PLAIN_CACHE_DTYPES:
        raise NotImplementedError(
            f"the CPU stand-ins have no {kv_cache_dtype} pages; "
            "use a native CPU build of vLLM"
        )


def _gather(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Returns one sequence's rows as fp32 [num_kv_heads, seq_len, head_size]."""
    block_size = cache.shape[2]
    pages = cache[blocks[: -(-seq_len // block_size)].long()]
    return pages.transpose(0, 1).flatten(1, 2)[:, :seq_len].float()


def _visible(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """Returns bool [num_queries, num_keys]: whether a query may see a key."""
    distance = query_positions[:, None] - key_positions[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window >= 0:
        visible &= distance < window
        visible &= distance > -window
    return visible


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns [num_queries, num_heads, head_size] of one sequence's attention."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, seq_len, _ = key.shape
    # [num_kv_heads, heads per KV head, num_queries, head_size]
    grouped = query.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    logits = grouped @ key.unsqueeze(1).transpose(-1, -2) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, -1, 1, 1)
        logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., :seq_len]
    attended = weights @ value.unsqueeze(1)
    return attended.flatten(0, 1).transpose(0, 1)
