# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of the kernels of stores, attention and merges: see cuda_defects.py."""

from planting import BARRIER, Change, Defect

ATTENTION = "kernels/test_cuda_attention.py::test_"
FEATURES = "kernels/test_cuda_features.py::test_"
HIDDEN = f"{ATTENTION}hidden_tokens_of_whole_tiles_change_no_bit"
LAUNCH = "builds/test_cuda_launch.py"
ATTENTION_WAITS = f"{LAUNCH}::test_attention_waits_for_the_kernel_before_it"
STORE_WAITS = f"{LAUNCH}::test_the_store_waits_for_the_kernel_before_it"
MERGE_WAITS = f"{LAUNCH}::test_the_merge_waits_for_the_kernel_before_it"
WAIT = "  wait_for_previous_kernel();\n"
# Unwritten bytes of shared memory are NaN, and not those of a former block.
EXTEND_FROM_NAN = Change(
    "extend_mma/extend_mma.cuh",
    "  if (threadIdx.x == 0) init_stages(shared);\n",
    "  for (int i = threadIdx.x; i < sizeof(shared); i += blockDim.x)\n"
    "    shared_bytes[i] = 0xFF;\n"
    "  __syncthreads();\n"
    "  if (threadIdx.x == 0) init_stages(shared);\n",
)
# Consumers read keys later than producers could write the next ones.
ROWS_READ_LATE = Change(
    "extend_wgmma/consume.cuh",
    "    queries.multiply(scores, m, all_keys + stage.index * kKeyStage);\n",
    "    __nanosleep(20000);\n"
    "    queries.multiply(scores, m, all_keys + stage.index * kKeyStage);\n",
)
# The weights of warpgroups' results are written later than all threads could read them.
COLUMNS_WEIGH_LATE = Change(
    "decode_wgmma/partial.cuh",
    "    float largest = kNoReference, total = 0.0f;\n",
    "    __nanosleep(20000);\n    float largest = kNoReference, total = 0.0f;\n",
)
ATTENTION_DEFECTS = {
    # Hidden tokens in tiles that the sequence fills lack a mask.
    "decode-hidden": Defect(
        "decode/values.cuh",
        "kTiles * TILE_TOKENS + visible.most_hidden;",
        "kTiles * TILE_TOKENS;",
        HIDDEN,
        "decode and not wgmma",
    ),
    "extend-mma-hidden": Defect(
        "extend_mma/consume.cuh",
        "segment.num_tokens - token < Plan::kTokens + p.most_hidden",
        "segment.num_tokens - token < Plan::kTokens",
        HIDDEN,
        "extend_mma",
    ),
    "decode-wgmma-hidden": Defect(
        "decode_wgmma/decode_wgmma.cuh",
        "seen.last - (p.with_raw ? 0 : query_len - 1 - token);",
        "seen.last;",
        HIDDEN,
        "decode_wgmma",
    ),
    # Earlier results are compared to scores without the change of offset.
    "decode-offset": Defect(
        "decode/segment.cuh",
        "if (own != next) {",
        "if (!goes_on) {",
        f"{FEATURES}splits",
        "offset and not extend_mma",
    ),
    # Results of ranges are joined by scores without their offsets.
    "decode-last-offset": Defect(
        "decode/segment.cuh",
        "if (own != next) {",
        "if (own != next && goes_on) {",
        f"{FEATURES}offsets",
        "decode and not wgmma and near",
    ),
    "extend-mma-offset": Defect(
        "extend_mma/offset_rows.cuh",
        "acc.reference[r] += acc.missing[r] - found.scores[r];",
        ";",
        f"{FEATURES}offsets",
        "extend_mma or extend_wgmma",
    ),
    # Warps join warpgroups' results before their weights are known. racecheck reports
    # hazards in this kernel without the defect: see racecheck_sets.cu.
    "decode-wgmma-join": Defect(
        "decode_wgmma/partial.cuh",
        BARRIER + "  const auto* results",
        "  const auto* results",
        f"{ATTENTION}decodes",
        "decode_wgmma and turbo4-128 and raw-8-4",
        shown_by=COLUMNS_WEIGH_LATE,
    ),
    "decode-wgmma-offset": Defect(
        "decode_wgmma/segment.cuh",
        "reference += missing - scores.score;",
        ";",
        f"{FEATURES}offsets",
        "decode_wgmma",
    ),
    # The first token's score has the offset of its neighbours.
    "decode-first": Defect(
        "decode/values.cuh",
        "score += visible.gains[2 * t + i];",
        ";",
        f"{FEATURES}offsets",
        "decode and not wgmma and 2-offsets",
    ),
    # The first token in a window has the gain of the sequence's first token.
    "decode-first-in-window": Defect(
        "decode/offset.cuh",
        "own % kLanes == 0 && limits[column].first == -end",
        "own % kLanes == 0",
        f"{FEATURES}first_token",
        "decode and not wgmma and 17-1",
    ),
    "extend-mma-first": Defect(
        "extend_mma/offset_rows.cuh",
        "gains[r] = found.gains[r];",
        ";",
        f"{FEATURES}offsets",
        "extend_mma or extend_wgmma",
    ),
    "decode-wgmma-first": Defect(
        "decode_wgmma/weigh.cuh",
        "x += shared.first_gains[own.set][2 * pair + i % 2];",
        ";",
        f"{FEATURES}offsets",
        "decode_wgmma and 2-offsets",
    ),
    "tail-first": Defect(
        "merge/tail.cuh",
        "max((last_row - 1) * OFFSET_SEGMENT, 1);",
        "(last_row - 1) * OFFSET_SEGMENT;",
        "kernels/test_tail_attention.py::test_offset_in_scores",
        "decode-turbo4",
    ),
    # A query token sees one token too few, or too many.
    "decode-window": Defect(
        "decode/values.cuh",
        "token >= limits[i % 2].first",
        "token > limits[i % 2].first",
        f"{FEATURES}decodes",
        "window and turbo4",
    ),
    "decode-wgmma-window": Defect(
        "decode_wgmma/weigh.cuh",
        "n >= (i % 2 ? firsts.y : firsts.x)",
        "n > (i % 2 ? firsts.y : firsts.x)",
        f"{FEATURES}decodes",
        "window and turbo4 and decode_wgmma",
    ),
    "extend-mma-window": Defect(
        "extend_mma/rows.cuh",
        "p.first_seen(known_len, query_len, token) : 0;",
        "p.first_seen(known_len, query_len, token) - 1 : 0;",
        f"{FEATURES}extends",
        "window and turbo4",
    ),
    "outputs-window": Defect(
        "extend_wgmma/consume.cuh",
        "max(note.token + 1 - p.sliding_window,",
        "max(0,",
        f"{FEATURES}extends",
        "window and turbo4 and outputs and raw",
    ),
    # A query token sees tokens after it, or before the sequence.
    "outputs-causal": Defect(
        "extend_wgmma/consume.cuh",
        "note.is_inside ? note.token + 1 : query_len;",
        "query_len;",
        f"{ATTENTION}later_tokens_change_no_bit",
        "outputs and raw",
    ),
    "outputs-padding": Defect(
        "extend_wgmma/consume.cuh",
        "query_len - known_len);",
        "0);",
        f"{FEATURES}sinks",
        "turbo4 and outputs and raw",
    ),
    "merge-window": Defect(
        "merge/raw.cuh",
        "1 - missing, p.sliding_window)",
        "1 - missing, p.sliding_window + 1)",
        f"{FEATURES}decodes",
        "window and turbo4",
    ),
    # Scores of a query's first step are compared to zero, and not to their own maximum.
    "extend-mma-begins": Defect(
        "extend_mma/weigh.cuh",
        "reference[r] = kNoRowReference;",
        "reference[r] = 0.0f;",
        f"{FEATURES}scores_far_below_zero",
    ),
    # The sum includes values of tiles that are not read.
    "decode-unseen": Defect(
        "decode/segment.cuh",
        "clear_unseen(tiles, lane);",
        ";",
        f"{FEATURES}pairs",
        "offset and window and turbo4 and not extend_mma",
    ),
    "extend-mma-unseen": Defect(
        "extend_mma/copies.cuh",
        "KEY_OFFSET != 0 && segment.first_seen_tile > index;",
        "false;",
        f"{FEATURES}pairs",
        "offset and window and turbo4 and extend_mma",
        shown_by=EXTEND_FROM_NAN,
    ),
    "decode-wgmma-unseen": Defect(
        "decode_wgmma/segment.cuh",
        "!KEY_OFFSET || own_tile >= segment.first_seen_tile,",
        "true,",
        f"{FEATURES}pairs",
        "offset and window and turbo4 and decode_wgmma",
    ),
    # Sinks have no weight.
    "merge-sinks": Defect(
        "merge/weighted_sum.cuh", "total = 1.0f;", "", f"{FEATURES}sinks", "turbo4"
    ),
    "outputs-sinks": Defect(
        "extend_wgmma/write.cuh",
        "exp2_approx(p.sinks.load(head) - (acc.reference[r] + acc.missing[r]));",
        "0.0f;",
        f"{FEATURES}sinks",
        "turbo4 and outputs",
    ),
    "join-sinks": Defect(
        "extend_wgmma/join.cuh",
        "row.begin_with(p.sinks.load(query % (p.num_kv_heads * p.heads_per_kv)));",
        ";",
        f"{FEATURES}sinks",
        "turbo4 and outputs",
    ),
    # Parts of a row are not joined, or parts of another range are.
    "join-parts": Defect(
        "extend_wgmma/join.cuh",
        "const int count = (pass.last - 1) / ranges.size - range + 1;",
        "const int count = (pass.last - 1) / ranges.size - range;",
        f"{ATTENTION}splits",
        "outputs and padded",
    ),
    # Parts after the first loaded ones are left out.
    "join-later-parts": Defect(
        "extend_wgmma/join.cuh",
        "first < parts[k].count;",
        "first < 0;",
        f"{ATTENTION}a_pass_of_more_than_two_ranges",
        "outputs and raw",
    ),
    "outputs-parts": Defect(
        "extend_wgmma/write.cuh",
        "int64_t(2 * segment.range + segment.begins) * Plan::kRows +",
        "int64_t(2 * segment.range) * Plan::kRows +",
        f"{ATTENTION}splits",
        "outputs and padded",
    ),
    # A pass has more ranges than its results have room for. This takes more blocks than
    # an emulated GPU has.
    "extend-mma-ranges": Defect(
        "extend_mma/ranges.cuh",
        "(longest + p.num_splits - 2) / (p.num_splits - 1)",
        "longest / (p.num_splits - 1)",
        f"{ATTENTION}ranges_by_the_room_for_splits",
        "extend_mma or extend_wgmma",
    ),
    # Operands in shared memory are overwritten while warpgroups' products read them.
    "extend-wgmma-keys": Defect(
        "extend_wgmma/produce.cuh",
        "wait_for(shared.empty_keys[stage.index], stage.parity ^ 1);",
        ";",
        f"{ATTENTION}splits",
        "extend_wgmma and one",
        shown_by=ROWS_READ_LATE,
    ),
    "outputs-values": Defect(
        "extend_wgmma/produce.cuh",
        "wait_for(shared.empty_values[stage.index], stage.parity ^ 1);",
        ";",
        f"{ATTENTION}splits",
        "outputs and one",
    ),
    # The sum includes numbers that are not finite, with a weight of zero.
    "outputs-broken": Defect(
        "extend_wgmma/raw_tiles.cuh",
        "numbers[turn] = is_finite[turn] ? value[turn][j][i] : 0.0f;",
        "numbers[turn] = value[turn][j][i];",
        "layer/test_cuda_outputs.py::test_a_broken_token",
    ),
    "outputs-broken-key": Defect(
        "extend_wgmma/raw_tiles.cuh",
        "__float2half_rn(is_finite[turn] ? key[turn][j][i] : NAN);",
        "__float2half_rn(key[turn][j][i]);",
        "layer/test_cuda_outputs.py::test_a_broken_token",
    ),
    "outputs-large": Defect(
        "extend_wgmma/raw_tiles.cuh",
        "fabsf(y) > kLargestHalf ? copysignf(kLargestHalf, y) : y;",
        "y;",
        "layer/test_cuda_outputs.py::test_numbers_too_large_for_fp16_when_they_are_rotated",
    ),
    # Queries are rotated by another rotation, or their powers of two are lost.
    "outputs-rotation": Defect(
        "extend_wgmma/original_queries.cuh",
        "= pair ^ flips;",
        "= pair;",
        f"{ATTENTION}splits",
        "outputs and padded",
    ),
    "outputs-unit": Defect(
        "extend_wgmma/original_queries.cuh",
        "unit * p.query_factor;",
        "p.query_factor;",
        f"{ATTENTION}queries_of_any_size",
    ),
    # Sequences without tokens have no output.
    "outputs-empty": Defect(
        "extend_wgmma/write.cuh",
        "reinterpret_cast<uint32_t*>(output)[i % kRowWords] = 0;",
        ";",
        f"{ATTENTION}extends",
        "outputs and stored-4-7",
    ),
    # Scores have no soft cap.
    "decode-cap": Defect(
        "decode/values.cuh",
        "soft_cap(own[i] * factor[i % 2])",
        "own[i] * factor[i % 2]",
        f"{FEATURES}pairs",
        "cap and turbo4 and not extend_mma",
    ),
    "extend-mma-cap": Defect(
        "extend_mma/weigh.cuh",
        "exp2_approx(soft_cap(scores[i + c] * factor) - acc.reference[r]);",
        "exp2_approx(scores[i + c] * factor - acc.reference[r]);",
        f"{FEATURES}splits",
        "cap2 and extend_mma",
    ),
    "outputs-cap": Defect(
        "extend_mma/weigh.cuh",
        "if constexpr (SOFT_CAP != 0) scores[i] = soft_cap(scores[i]);",
        "",
        f"{FEATURES}pairs",
        "cap and turbo4 and outputs",
    ),
    "merge-cap": Defect(
        "merge/params.cuh",
        "return soft_cap(score);",
        "return score;",
        f"{FEATURES}pairs",
        "cap and turbo4 and raw",
    ),
    # Tokens have the offset of other tokens of their sequence.
    "store-offset": Defect(
        "store/params.cuh",
        "__ldcg(params.query_start_loc + seq + 1))",
        "__ldcg(params.query_start_loc + seq))",
        "kernels/test_cuda_offset.py::test_store",
        "turbo4",
    ),
    # The lanes of a key disagree on what a moved code leaves.
    "store-direction": Defect(
        "store/moves.cuh",
        "is_chosen ? own.along : INFINITY",
        "worth ? own.along : INFINITY",
        "kernels/test_cuda_direction.py::test_bytes_equal_the_reference",
        "turbo4",
    ),
    # A row of the tail never gets its tag, or is compared to bytes that are
    # being stored.
    "tail-tag": Defect(
        "store/planes.cuh",
        "reinterpret_cast<uint32_t*>(target.tag)[word] = codes;",
        ";",
        "kernels/test_tail.py::test_rows_and_counts",
        "cuda and turbo4",
    ),
    "tail-others": Defect(
        "store/tail.cuh",
        "|| is_being_stored(p, s, num_read)",
        "|| (__syncthreads(), false)",
        "kernels/test_tail.py::test_no_row_counts_beside_tokens_that_another_stores",
    ),
    # A kernel reads tensors that the kernel before has not written yet.
    "store-wait": Defect("store/store.cuh", WAIT, "", STORE_WAITS),
    "decode-wait": Defect(
        "decode/decode.cuh", WAIT, "", ATTENTION_WAITS, "decode and not wgmma"
    ),
    "decode-wgmma-wait": Defect(
        "decode_wgmma/decode_wgmma.cuh", WAIT, "", ATTENTION_WAITS, "decode_wgmma"
    ),
    "extend-mma-wait": Defect(
        "extend_mma/extend_mma.cuh", WAIT, "", ATTENTION_WAITS, "extend_mma"
    ),
    "extend-wgmma-wait": Defect(
        "extend_wgmma/extend_wgmma.cuh", WAIT, "", ATTENTION_WAITS, "extend_wgmma"
    ),
    "merge-wait": Defect("merge/merge.cuh", WAIT, "", MERGE_WAITS),
}
