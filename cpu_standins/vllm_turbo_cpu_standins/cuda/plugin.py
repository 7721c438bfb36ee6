# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plugin for pytest that runs the tests' CUDA kernels on the emulated GPU:
`-p vllm_turbo_cpu_standins.cuda.plugin`.

It selects a few of the tests, each of which takes seconds. `--all-emulated` runs all
tests that can run here.
"""

import os
import re

import pytest

# The tests read this switch when they are imported, which is later.
os.environ["TURBO_CUDA_EMULATION"] = "1"

# The layouts are one with an offset of K, the store of another with three bits, and one
# whose tiles are shared by warps. Each module of kernels takes the compiler seconds, so
# there are few.
_SELECTED = re.compile(
    r"""test_(
    store\.py::test_bytes_equal_the_reference\[cuda-(1-turbo4-128-bf|4-turbo3-64-fp)16\]
    |store\.py::test_rotated_query\[cuda-turbo4-128-bf16\]
    |latent_gather\.py::test_gather_equals.*\[cuda-turbo(4-576-bf|3-320-fp)16\]
    |latent_store\.py::test_bytes_equal.*\[cuda-(1-turbo4-576-bf|4-turbo3-320-fp)16\]
    |merge\.py::test_against_fp64\[\[64,.*-64-True-bf16-cuda(2|8)-128\]
    |decode\.py::test_keys_of_very.*\[extend_wgmma-turbo4-128\]
    |decode\.py::test_one_key_gives_its_score.*\[extend_mma-turbo4-128\]
    |merge\.py::test_parts_of_ranks\[rows.*-cuda8-(64|256)\]
    |merge\.py::test_sinks\[torch.float16-\[8,.*-51-True-cuda8-128\]
    |latent_decode\.py::test_numbers_of_heads\[(32-warpgroups|64-rows)\]
    |latent_decode\.py::test_tokens_of_a_list\[16-listed-3-48\]
    |latent_decode\.py::test_hidden.*\[(16-warpgroups|64-rows)\]
    |latent_decode\.py::test_several_query_tokens\[(8-slices|16-copying-slices)\]
    |latent_decode\.py::test_lengths\[fp16-16-warpgroups-turbo4-320\]
    |latent_decode\.py::test_lengths\[bf16-16-copying-slices-turbo4-320\]
    |tail\.py::test_rows_and_counts\[offset-bf16-cuda-turbo4-128\]
    |tail\.py::test_every_byte.*\[1-cuda-turbo4-128\]
    |tail\.py::test_(tokens_that|a_prefix).*\[cuda\]
    |tail\.py::test_no_row
    |tail_attention\.py::test_attention\[(offset-8-decode-turbo4-128|plain-8-decode-turbo4-256)\]
    |tail_attention\.py::test_sliding_window\[offset-8-decode-turbo4-128-20\]
    |tail_attention\.py::test_raw.*\[offset-20-extend_wgmma\]
    )
    |test_cuda_(
    store\.py::test_partial_blocks\[(0|17)-cuda-4-turbo4\]
    |attention\.py::test_decodes\[raw-8-3-decode-turbo4-512\]
    |offset\.py::test_store\[(9-1|8-2|7-4)-bf16-turbo4-128\]
    |direction\.py::test_bytes_equal.*\[True-(1-turbo4|2-k4v3|4-turbo3)-128\]
    |direction\.py::test_directions_beside_tails\[4-True-turbo4-64\]
    |features\.py::test_decodes\[3-4-raw-decode-turbo4-128-offset-bf16\]
    |features\.py::test_extends\[7-stored-extend_mma-turbo4-128-offset-fp16\]
    |features\.py::test_extends\[33-stored-extend_wgmma-turbo4-128-offset-bf16\]
    |attention\.py::test_a_pass_of.*\[raw-outputs\]
    |attention\.py::test_extends\[raw-1-ragged-outputs-turbo4-64\]
    |attention\.py::test_queries_of_any_size\[(stored-bf16-40|raw-fp16--100)\]
    |attention\.py::test_tensors_copied
    |features\.py::test_extends\[tails-raw-extend_mma-(turbo4-128|k4v3-256)-window15\]
    |features\.py::test_extends\[tails-raw-outputs-turbo4-128-window15\]
    |outputs\.py::test_batches\[(beside|one).*-raw-fp16\]
    |outputs\.py::test_broken_neighbours\[1-both\]
    |outputs\.py::test_(a_broken|layers|numbers|requests|query_tokens|scratch|warm_up|plans|served|ranks|few|queries)
    |features\.py::test_sinks\[8-raw-outputs-turbo4-128-sinks-window17\]
    |features\.py::test_sinks_of_each_kv_head\[(1|8)-raw-outputs\]
    |features\.py::test_pairs\[raw-(outputs|decode)-turbo4-128-cap-sinks-window17\]
    |features\.py::test_extends\[33-raw-(extend_wgmma|extend_mma)-turbo4-128-cap2\]
    |features\.py::test_decodes\[2-16-raw-decode_wgmma-turbo4-128-cap2\]
    |raw_tokens\.py::test_(batches\[beside|broken|scratch.*\[64\])
    |hybrid_pages\.py::test_(store\[3952-128-cuda|decodes\[3-6-3952-decode-turbo4-128)\]
    |merge\.py::test_results_of_raw.*\[1\.5-bf16-128\]
    |features\.py::test_decodes\[(3-4|1-5)-raw-decode-turbo4-128-window17\]
    |features\.py::test_decodes\[2-16-stored-decode_wgmma-turbo4-128-window17\]
    |attention\.py::test_hidden.*\[4-decode_wgmma\]
    |features\.py::test_pairs\[stored-decode-turbo4-128-offset-window261\]
    |features\.py::test_scores_far_below_zero\[extend_mma\]
    |features\.py::test_pairs\[raw-extend_mma-turbo4-128-offset-sinks-window17\]
    )""",
    re.VERBOSE,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the choice between some of the tests and all."""
    parser.addoption(
        "--all-emulated", action="store_true", help="all tests of CUDA kernels"
    )


def pytest_configure() -> None:
    """Installs the emulated GPU, before tests are imported."""
    from vllm_turbo_cpu_standins.cuda.device import install

    install()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Keeps only the tests that are selected."""
    if config.getoption("--all-emulated"):
        return
    chosen = [item for item in items if _SELECTED.search(item.nodeid)]
    config.hook.pytest_deselected(items=[x for x in items if x not in chosen])
    items[:] = chosen
