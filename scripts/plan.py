#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Says how many users a model and a GPU serve, by cache dtype, before either is there.

vLLM builds the model without weights, as on that GPU, and plans its cache. This needs
no GPU, and only the model's config.json. The time per output token is an estimate: the
bytes that a step reads, at the share of its bandwidth that an H200 was measured to use.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from turbo_check.needs import check_folder, require_series

# Before the first package is imported.
require_series("plan.py")

from turbo_plan import report  # noqa: E402
from turbo_plan.cure import cure_of  # noqa: E402
from turbo_plan.gpus import ATTENTION, GPUS, parse_gpu  # noqa: E402
from turbo_recipes import device  # noqa: E402

CONTEXT = 32768
# Arguments of vLLM's that are options here, and those that a plan leaves out.
OPTIONS = {
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_model_len": "--context",
    "model": "MODEL",
    "tensor_parallel_size": "--tp",
}
NOT_PLANNED = {
    "quantization": "of weights at load is not planned: give the folder of a quantised "
    "checkpoint's config.json",
    **dict.fromkeys(
        (
            "data_parallel_size",
            "decode_context_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
        ),
        "is not planned: a plan is for one group of tensor-parallel GPUs (--tp)",
    ),
}
DESCRIBING = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def find_model(name: str) -> Path:
    """Returns a folder that describes a model: this one, or the Hub's of this name.

    Raises:
        ValueError: If there is none.

    """
    check_folder(name)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=DESCRIBING))
    except Exception as error:
        raise ValueError(
            f"{name} is no folder, and cannot be had from the Hub; a folder with its "
            f"config.json will do. {type(error).__name__}: {error}"
        ) from error


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def engine_args(text: str) -> dict[str, Any]:
    """Returns vLLM's arguments, all of which a plan takes into account.

    Raises:
        argparse.ArgumentTypeError: If a plan ignores one, or if the text is no JSON
            object.

    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('no JSON object, as in {"max_num_seqs": 64}')
    for name in found:
        if name in OPTIONS:
            raise argparse.ArgumentTypeError(f"{name} is {OPTIONS[name]} here")
        if name in NOT_PLANNED:
            raise argparse.ArgumentTypeError(f"{name} {NOT_PLANNED[name]}")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("model", help="a folder with a config.json, or a Hub's name")
    parser.add_argument(
        "--gpu",
        type=parse_gpu,
        default="H200",
        help=f"{', '.join(GPUS)}, or by number GiB:GB/s[:compute capability], as in "
        "24:936:8.6 (default: H200)",
    )
    parser.add_argument(
        "--tp",
        type=positive,
        default=1,
        help="Tensor parallelism divides the model among this number of GPUs "
        "(default: %(default)s).",
    )
    parser.add_argument(
        "--context",
        type=positive,
        help="Each user has this number of tokens in the cache (default: "
        f"{CONTEXT}, or the model's).",
    )
    parser.add_argument(
        "--users",
        type=positive,
        default=64,
        help="The server has this number of users at once (default: %(default)s).",
    )
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=ATTENTION, default=list(ATTENTION)
    )
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--max-num-batched-tokens", type=positive, default=8192)
    parser.add_argument(
        "--engine-args", type=engine_args, default={}, help="more of vLLM's, as JSON"
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON, and no table")
    parser.add_argument("--plot", type=Path, help="a picture, such as plan.png")
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    try:
        model = find_model(args.model)
    except ValueError as error:
        parser.error(str(error))
    gpu = args.gpu
    # vLLM's warnings are about hardware that this machine lacks.
    logging.disable(logging.WARNING)
    # vLLM finds this package on a GPU: it is nvfp4's backend.
    device.pretend(gpu.device, packages=["flashinfer"])
    from turbo_plan import planner
    from turbo_recipes import build

    build.inspect_in_this_process()
    planned_args = {
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": planner.served_sequences(),
        "tensor_parallel_size": args.tp,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.gpu_memory_utilization is not None:
        planned_args["gpu_memory_utilization"] = args.gpu_memory_utilization
    planned_args |= args.engine_args
    if unknown := planned_args.keys() - planner.known_arguments():
        parser.error(f"--engine-args: vLLM has no {', '.join(sorted(unknown))}")
    longest = planner.longest_context(str(model), **planned_args)
    if args.context is None:
        args.context = min(CONTEXT, longest or CONTEXT)
    elif longest is not None and args.context > longest:
        parser.error(
            f"--context {args.context}: this model has {longest} tokens at most"
        )
    planned_args["max_model_len"] = args.context
    plans = [
        planner.plan(str(model), dtype, gpu, **planned_args)
        for dtype in args.kv_cache_dtype
    ]
    content = {
        "model": args.model,
        "gpu": gpu.device.name,
        "gpus": args.tp,
        "is_estimate": not gpu.is_measured,
        "context": args.context,
        "users": args.users,
        "cure": cure_of(plans, args.tp, args.context),
        "rows": [report.row_of(each, gpu, args.users, args.context) for each in plans],
        "notes": report.notes_of(plans, gpu, args.tp),
    }
    print(json.dumps(content, indent=1) if args.json else report.table(content))
    if args.plot:
        report.draw(plans, content, gpu, args.plot)
    return 0 if any(each.model for each in plans) else 1


if __name__ == "__main__":
    sys.exit(main())
