#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The means of K or of latents that an engine measures here, beside Transformers'.

A model is a folder of models/, or a hybrid family of the engine's tests, which has
seeded weights. Its engine measures the means in a pass of text on this device, once in
the slices of the pass and once in steps of 150 tokens. A row has, of each layer, the
length of the difference from the means of Transformers in fp32, as a share of theirs.

    pass_means.py lfm2 nemotron_h needle-deepseek-v3 --output FILE
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from common import ROOT, Report
from env import has_gpu
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

sys.path.insert(0, str(ROOT / "tests" / "engine"))

STEPS = (0, 150)


def expected_means(folder: str, name: str) -> list:
    import test_hybrid_means
    import test_key_means

    if name == "needle-deepseek-v3":
        return [(x, x) for x in test_key_means.exact_latent_means(folder)]
    own = "k_norm" if name == "needle-qwen3" else "k_proj"
    return test_key_means.exact_means(folder, test_hybrid_means.KEYS.get(name, own))


def measured_means(folder: str, is_hybrid: bool, step: int, root: Path) -> dict:
    """Returns the table that an engine keeps in a cache root of its own."""
    from safetensors.torch import load_file

    from vllm import LLM

    os.environ["VLLM_CACHE_ROOT"] = str(root)
    args = {
        "kv_cache_dtype": "turbo4",
        "dtype": "float16" if is_hybrid else "bfloat16",
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        # A state that may be hit is in the place of a request's last block.
        "enable_prefix_caching": not is_hybrid,
    }
    if not has_gpu():
        args |= ENGINE_ARGS | {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
    if step:
        args |= {"max_num_batched_tokens": step, "enable_chunked_prefill": True}
    LLM(folder, **args)
    (path,) = root.glob("turbo_means/*.safetensors")
    return load_file(path)


def row_of(name: str, step: int, scratch: Path) -> dict:
    import test_hybrid_means
    from families import write_family

    is_hybrid = name in test_hybrid_means.KEYS
    folder = str(ROOT / "models" / name)
    if is_hybrid:
        folder = str(write_family(scratch / "model", name))
    found = measured_means(folder, is_hybrid, step, scratch / "cache")
    row: dict = {"model": name, "step": step}
    parts = zip(("first", "rest"), zip(*expected_means(folder, name)))
    for part, means in parts:
        keys = [key for key in found if key.endswith(f".{part}")]
        keys.sort(key=lambda key: int(key.split("layers.")[1].split(".")[0]))
        pairs = list(zip((found[key] for key in keys), means, strict=True))
        row[part] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    args = parser.parse_args()
    report = Report(args.output)
    for name in args.models:
        for step in STEPS:
            with tempfile.TemporaryDirectory() as scratch:
                report.row(**row_of(name, step, Path(scratch)))


if __name__ == "__main__":
    main()
