# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of MLA's decode kernels on Hopper: see cuda_defects.py."""

from planting import Change, Defect

TESTS = "mla/test_latent_decode.py::test_"
# Consumers read a stage later than producers could write it again.
COLUMNS_READ_LATE = Change(
    "latent/columns_kernel.cuh",
    "      const int at = uniform(stage.index);\n",
    "      __nanosleep(20000);\n      const int at = uniform(stage.index);\n",
)
ROWS_READ_LATE = Change(
    "latent/rows_consume.cuh",
    "    weigh_rows(shared, acc, weights, scores, step, limit, own);\n",
    "    weigh_rows(shared, acc, weights, scores, step, limit, own);\n"
    "    __nanosleep(20000);\n",
)
# Producers write a stage later than consumers could read it.
ROWS_WRITTEN_LATE = Change(
    "latent/rows_produce.cuh",
    "  stage.store(LATENT_RANK / 64, fragments[1]);\n",
    "  stage.store(LATENT_RANK / 64, fragments[1]);\n  __nanosleep(20000);\n",
)
LATENT_DEFECTS = {
    # Query tokens see those behind them, in steps that the sequence fills.
    "latent-columns-hidden": Defect(
        "latent/columns_kernel.cuh",
        "const int limit = uniform(s.first_limit);",
        "const int limit = uniform(s.num_tokens);",
        f"{TESTS}hidden_tokens_of_whole_steps_change_no_bit",
        "warpgroups",
    ),
    "latent-rows-hidden": Defect(
        "latent/rows_consume.cuh",
        "const int limit = s.first_limit;",
        "const int limit = s.num_tokens;",
        f"{TESTS}hidden_tokens_of_whole_steps_change_no_bit",
        "rows",
    ),
    # Producers write a stage that consumers still read.
    "latent-columns-free": Defect(
        "latent/columns_produce.cuh",
        "        wait_for(shared.free[group], parity ^ 1);\n",
        "",
        f"{TESTS}numbers_of_heads",
        "16-warpgroups",
        shown_by=COLUMNS_READ_LATE,
    ),
    "latent-rows-free": Defect(
        "latent/rows_produce.cuh",
        "        wait_for(shared.free[stage.index], stage.parity ^ 1);\n",
        "",
        f"{TESTS}numbers_of_heads",
        "64-rows",
        shown_by=ROWS_READ_LATE,
    ),
    # A consumer multiplies blocks that are not full yet.
    "latent-rows-begun": Defect(
        "latent/rows_consume.cuh",
        "    wait_for(shared.begun[of.index], of.parity);\n",
        "",
        f"{TESTS}numbers_of_heads",
        "64-rows",
        shown_by=ROWS_WRITTEN_LATE,
    ),
    # A consumer keeps its reference when the other one has raised it.
    "latent-rows-follow": Defect(
        "latent/rows_weigh.cuh",
        "  if (!uniform(shared.is_raised[stage])) return;\n",
        "  return;\n",
        f"{TESTS}numbers_of_heads",
        "64-rows",
    ),
    # A listed token has the scales of the rope of a neighbour.
    "latent-listed-scales": Defect(
        "latent/listed.cuh",
        "own % kScaleTokens * (ROPE_SIZE / 16)",
        "0 * own",
        f"{TESTS}tokens_of_a_list",
        "16-listed",
    ),
}
