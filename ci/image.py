# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Starts an engine as in the image: its kernels are built, and there is no nvcc.

The image's last step runs in a copy of the installed vLLM. The engine then has a PATH
with only the tools that Triton compiles with, and an empty cache of FlashInfer's. The
result is one JSON object on a line: `wrong`, the kernels that the engine names, and the
seconds of the build and of the start.

With --archive the copy gets a release's kernels instead, by `apply.sh --kernels`, and
nothing is built.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from common import Report  # noqa: E402
from turbo_engine import link_or_copy  # noqa: E402
from turbo_equality.run import built_kernels, used_kernels  # noqa: E402
from turbo_process.log import emit  # noqa: E402
from turbo_process.runner import (  # noqa: E402
    engine_variables,
    exit_when_told,
    run_for_row,
)
from turbo_seeded.model import build_parser as model_parser  # noqa: E402
from turbo_seeded.model import write_model  # noqa: E402

BUILD = "vllm.v1.attention.ops.turbo.cuda.build"
# Options that select the kernels of the seeded model's layers.
KERNELS = ("--kv-cache-dtype", "turbo4", "--head-size", "128")
# Triton's launchers are C.
TOOLS = ("cc", "gcc", "as", "ld")
TOKENS = 4


def copy_vllm(target: Path) -> None:
    """Makes a copy of vLLM whose files are links to the installed ones."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed")
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    package = Path(spec.origin).parent
    # The last two tell the series which vLLM is installed, and what is applied.
    names = ["vllm", *(x.name for x in package.parent.glob("vllm-*.dist-info"))]
    for name in (*names, ".turbo-series"):
        source = package.parent / name
        shutil.copytree(
            source, target / name, ignore=ignored, copy_function=link_or_copy
        )


def add_kernels(archive: Path | None, capability: str, path: str, site: Path) -> None:
    """Builds the kernels of the seeded model's layers, or unpacks an archive's."""
    if archive is None:
        command = [sys.executable, "-m", BUILD, "--arch", capability, *KERNELS]
    else:
        apply = str(ROOT / "scripts" / "apply.sh")
        command = [apply, "--kernels", str(archive.resolve()), str(site)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


def bare_path(folder: Path) -> str:
    """Returns a PATH that has only TOOLS."""
    folder.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def generate(model: str) -> None:
    """Starts an engine, and lets it answer."""
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        kv_cache_dtype="turbo4",
        attention_config={"turbo_kernel": "cuda"},
        max_model_len=512,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
    )
    startup_s = time.perf_counter() - start
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = llm.generate(["What the image has built."], params, use_tqdm=False)
    emit(startup_s=startup_s, tokens=len(output.outputs[0].token_ids))


def check(
    folder: Path, archive: Path | None, log: Path, time_limit: float
) -> dict[str, Any]:
    """Returns the row."""
    from vllm.platforms import current_platform

    model, site, cache = (folder / name for name in ("model", "site", "cache"))
    write_model(model, model_parser().parse_args([str(model)]))
    copy_vllm(site)
    cache.mkdir()
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    capability = current_platform.get_device_capability()
    assert capability is not None, "there is no GPU"
    start = time.perf_counter()
    add_kernels(archive, capability.as_version_str(), path, site)
    build_s = time.perf_counter() - start
    variables = engine_variables(on_cpu=False) | {
        "PYTHONPATH": path,
        "PATH": bare_path(folder / "bin"),
        "CUDA_HOME": "/nowhere",
        "FLASHINFER_WORKSPACE_BASE": str(cache),
    }
    command = [sys.executable, str(Path(__file__)), "--child", str(model)]
    row = run_for_row(command, log, variables, time_limit)
    wrong = row.pop("wrong", [])
    kernels = used_kernels(log)
    if kernels != {"CUDA"}:
        wrong.append(f"the kernels are {sorted(kernels)}")
    if built := built_kernels(log):
        wrong.append(f"built at the start: {built}")
    if libraries := [each.name for each in cache.rglob("turbo*.so")]:
        wrong.append(f"in FlashInfer's cache: {libraries}")
    return row | {"build_s": build_s, "kernels": sorted(kernels), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file that the row is added to")
    parser.add_argument("--archive", type=Path, help="a release's kernels")
    parser.add_argument("--log", type=Path, default=Path("/tmp/turbo-image.log"))
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        generate(args.child)
        return 0
    exit_when_told()
    with tempfile.TemporaryDirectory() as name:
        row = check(Path(name), args.archive, args.log, args.time_limit)
    Report(args.output).row(part="image", **row)
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
