# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arguments of `check_model.py`, and their checks before an engine starts."""

import argparse
import contextlib
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from env import has_gpu
from turbo_process.arm import ALL_LAYERS, NO_MEANS, NO_WINDOW, TURBO_DTYPES
from turbo_quality.cases import HELD_OUT

from turbo_check.cases import MIN_CONTEXT, Plan
from turbo_check.jobs import share_memory
from turbo_check.needs import check_folder, check_tokenizer

DTYPES = (*TURBO_DTYPES, "fp8")
REFERENCE = "auto"
MAX_CONTEXT = 8192
LAYERS = 3
# Half of the shortest context.
MAX_STEPS = MIN_CONTEXT // 2
# Arguments of an engine on a CPU, unless the user names others.
CPU_ARGS = {"dtype": "float16"}


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def check_arm(name: str) -> None:
    """Checks the option of an arm, the part behind a colon.

    Raises:
        ValueError: If the dtype has no such option.

    """
    dtype, _, option = name.partition(":")
    if not option:
        return
    if dtype in TURBO_DTYPES:
        is_known = option in (NO_WINDOW, NO_MEANS)
    elif dtype.startswith("turboquant_"):
        is_known = option == ALL_LAYERS
    else:
        is_known = dtype == REFERENCE and option.isdigit() and int(option) > 0
    if not is_known:
        raise ValueError(
            f"{name} is no arm: there are turbo4:{NO_WINDOW} and turbo4:{NO_MEANS} "
            f"(and those of k4v3 and turbo3), turboquant_4bit_nc:{ALL_LAYERS} (and "
            "others of vLLM's) and auto:512, with any number of tokens"
        )


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="check_model.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="name or folder")
    add("--kv-cache-dtype", nargs="+", default=DTYPES, metavar="DTYPE",
        help="dtypes besides the reference, which is auto; auto again shows noise; "
             "turbo4:no-window quantises the newest tokens like the others; "
             "turbo4:no-means stores K with its means; "
             "turboquant_4bit_nc:all leaves no layer in bf16; auto:512 prefills in "
             "chunks of 512 "
             f"(default: {' '.join(DTYPES)})")  # fmt: skip
    add("--text", type=Path, default=HELD_OUT, help="text that is decoded, in UTF-8")
    add("--max-context", type=int, metavar="TOKENS",
        help=f"longest sequence, {MIN_CONTEXT} at least "
             f"(default: {MAX_CONTEXT}, or the model's)")  # fmt: skip
    add("--texts", type=int, default=Plan.texts, help="stretches of text per context")
    add("--decode-steps", type=int, default=Plan.decode_steps, metavar="TOKENS",
        help=f"tokens decoded at the end of each stretch, {MAX_STEPS} at most "
             f"(default: {Plan.decode_steps})")  # fmt: skip
    add("--top", type=int, default=Plan.top, metavar="K",
        help="tokens told apart; with the vocabulary's size KL is exact")  # fmt: skip
    add("--needles", type=int, default=Plan.cases, help="needles per context and depth")
    add("--passkeys", action="store_true",
        help="needles are pass keys in sentences that repeat, which weak models "
             "find")  # fmt: skip
    add("--layers", type=int, nargs="?", const=LAYERS, default=0, metavar="N",
        help="try the N worst layers in bf16, by the effect of their K on scores "
             f"(default: {LAYERS})")  # fmt: skip
    add("--gsm8k", type=int, nargs="?", const=0, metavar="LIMIT",
        help="score GSM8K with lm_eval, all problems or LIMIT")  # fmt: skip
    add("--engine-args", type=json_object, default={}, metavar="JSON",
        help='more arguments of LLM, as {"tensor_parallel_size": 2}; a quantised head '
             'needs {"hf_overrides": {}}')  # fmt: skip
    add("--jobs", type=int, metavar="N",
        help="engines at a time (default: as many as fit GPU memory and cores; 1 "
             "without a GPU)")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--time-limit", type=float, default=3600, help="seconds for all engines")
    add("--output", type=Path, metavar="DIR", help="default: ./check-MODELNAME")
    return parser


def first_lines(error: Exception) -> str:
    """Returns an error's first line, without pydantic's heading and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]
    return lines[0] if lines else type(error).__name__


def check_early(args: argparse.Namespace) -> None:
    """Makes the checks that need neither vLLM nor the model's configuration.

    Raises:
        ValueError: If something is wrong.

    """
    for name in ("texts", "decode_steps", "top", "needles", "time_limit", "jobs"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has to be positive, and is {value}")
    if args.decode_steps > MAX_STEPS:
        raise ValueError(
            f"--decode-steps is {args.decode_steps}, and {MAX_STEPS} at most"
        )
    if args.max_context is not None and args.max_context < MIN_CONTEXT:
        raise ValueError(
            f"--max-context is {args.max_context}, shorter than {MIN_CONTEXT}"
        )
    for name in args.kv_cache_dtype:
        check_arm(name)
        if args.gsm8k is not None and name.endswith(f":{ALL_LAYERS}"):
            raise ValueError(
                f"--gsm8k serves vLLM as it is, and so not {name}: leave out one"
            )
    check_folder(args.model)
    if "tokenizer" not in args.engine_args:
        check_tokenizer(args.model)
    if args.gsm8k is not None and not importlib.util.find_spec("lm_eval"):
        raise ValueError("--gsm8k needs lm_eval: pip install lm-eval")
    try:
        args.text_content = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {args.text}: {error}") from error


def read_model(args: argparse.Namespace) -> Any:
    """Lets vLLM read the model's tokenizer and its configuration, which it returns.

    Raises:
        ValueError: If vLLM cannot read them, or does not know a dtype.

    """
    # The import takes seconds, which --help need not wait for.
    from vllm.config.cache import KV_CACHE_DTYPES
    from vllm.engine.arg_utils import EngineArgs
    from vllm.tokenizers import cached_tokenizer_from_config

    # Engines say the same in their logs.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # A tokenizer warns of texts longer than the model's context, which are cut later.
    tokenizers = logging.getLogger("transformers.tokenization_utils_base")
    tokenizers.setLevel(logging.ERROR)
    for name in args.kv_cache_dtype:
        dtype = name.partition(":")[0]
        if dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"{dtype} is no KV cache dtype of this vLLM, which has "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
    try:
        of_device = CPU_ARGS if args.on_cpu else {}
        engine_args = of_device | args.engine_args
        config = EngineArgs(args.model, **engine_args).create_model_config()
        args.tokenizer = cached_tokenizer_from_config(config)
    except Exception as error:
        raise ValueError(f"{args.model}: {first_lines(error)}") from error
    args.model_context = config.max_model_len
    args.vocab_size = config.get_vocab_size()
    # A quantised checkpoint's scheme decides the dtype of auto, which may be FP8.
    own = str(config.dtype).removeprefix("torch.")
    is_plain = getattr(config.hf_config, "quantization_config", None) is None
    args.unquantised = REFERENCE if is_plain or own not in KV_CACHE_DTYPES else own
    return config


def complete(args: argparse.Namespace) -> None:
    """Checks arguments, and adds those that follow from them.

    Raises:
        ValueError: If something is wrong.

    """
    check_early(args)
    args.on_cpu = not has_gpu()
    config = read_model(args)
    longest = args.max_context or min(MAX_CONTEXT, args.model_context)
    if longest > args.model_context:
        raise ValueError(
            f"a context of {longest} is longer than the model's, {args.model_context}"
        )
    if longest < MIN_CONTEXT:
        raise ValueError(f"a context of {longest} is shorter than {MIN_CONTEXT}")
    args.plan = Plan(
        max_context=longest,
        texts=args.texts,
        decode_steps=args.decode_steps,
        top=args.top,
        cases=args.needles,
        passkeys=args.passkeys,
    )
    share_memory(args, config)
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    args.output = args.output or Path(f"check-{name.rpartition('/')[-1]}")
    with contextlib.suppress(FileExistsError):
        args.output.mkdir(parents=True)
    if not args.output.is_dir():
        raise ValueError(f"--output {args.output} is not a folder")
