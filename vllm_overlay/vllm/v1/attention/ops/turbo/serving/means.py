# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Takes the means of K off in an engine whose weights are loaded: see ``keys.means``.

With MLA these are the means of latents.

All ranks of a model decide together, and all have the means of the first rank. So the
bytes of pages do not depend on the division among ranks.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tp_group,
    get_world_group,
    model_parallel_is_initialized,
)
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.keys import means as key_means
from vllm.v1.attention.ops.turbo.keys.bias import layer_number, turbo_layers
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans, Means
from vllm.v1.attention.ops.turbo.keys.run_pass import (
    PassRunner,
    attention_layers,
    run_pass,
)
from vllm.v1.attention.ops.turbo.keys.text import TEXT
from vllm.v1.attention.ops.turbo.keys.text_pass import PassError
from vllm.v1.attention.ops.turbo.serving.means_file import (
    checksum,
    means_path,
    read_means,
    weight_files,
    write_means,
)
from vllm.v1.attention.ops.turbo.serving.means_tables import (
    kv_head_replicas,
    latent_layers,
    set_tables,
    share_tables,
)

logger = init_logger(__name__)

# Reasons why a model, or a layer, goes without means.
NO_TOKENIZER = "no tokenizer can be loaded"
PASS_FAILS = "a pass of text fails"
SHORT_TEXT = f"the text has fewer than {key_means.MIN_TOKENS} tokens"
OTHER_TOKENS = "the tokenizer has tokens that the model lacks"
NO_LAYER = "no layer has a turbo dtype"
ALL_LAYERS = "all layers have"
# The end of a warning of an error.
WAY_OUT = (
    "The engine serves without them, and --attention-config.turbo_means off does not "
    "measure them."
)


class Problem(NamedTuple):
    """The reason why an engine goes without means.

    Attributes:
        reason: Words that follow "because".
        is_error: Whether something failed, of which users are warned.

    """

    reason: str
    is_error: bool = False

    @classmethod
    def of(cls, what: str, error: Exception) -> "Problem":
        """The problem that something failed by an error."""
        return cls(f"{what}: {type(error).__name__}: {error}", True)


class Start(NamedTuple):
    """The first rank's part of the decision.

    Attributes:
        means: The means of all layers and heads, from a file; None for none.
        path: The file for the means; None if the checkpoint's files are not known.
        key: The checkpoint's checksum, likewise.
        text: The tokens to measure with; none if there are means.
        problem: Why there can be no means; None for none.

    """

    means: Means | None = None
    path: Path | None = None
    key: str = ""
    text: list[int] = []
    problem: Problem | None = None


def _world() -> GroupCoordinator | None:
    """The group of all ranks of a model; None if there is one rank."""
    if not model_parallel_is_initialized() or get_world_group().world_size == 1:
        return None
    return get_world_group()


def _from_first_rank(value: Any) -> Any:
    world = _world()
    return value if world is None else world.broadcast_object(value)


def _gathered(value: Any, group: GroupCoordinator | None) -> list[Any]:
    if group is None or group.world_size == 1:
        return [value]
    found = [value] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def _agreed(problem: Problem | None) -> Problem | None:
    """The problem of the first rank that has one."""
    return next((x for x in _gathered(problem, _world()) if x is not None), None)


def _is_first_rank() -> bool:
    world = _world()
    return world is None or world.rank_in_group == 0


def layers_problem(model: nn.Module) -> Problem | None:
    """The reason why no layer of any rank can have means; None if some can."""
    own: list[str | None] = [None for _ in latent_layers(model)]
    own += [layer.impl.runner.means_problem for layer, _ in turbo_layers(model)]
    found = dict.fromkeys(sum(_gathered(own, _world()), []))
    if None in found:
        return None
    return Problem(f"{ALL_LAYERS} {' or '.join(found)}" if found else NO_LAYER)


def text_tokens(vllm_config: VllmConfig) -> list[int]:
    """The first tokens of the text, as the model's tokenizer has them.

    Raises:
        ValueError: If there is no tokenizer. Loading one may raise other errors.

    """
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    if tokenizer is None:
        raise ValueError("--skip-tokenizer-init")
    model_config = vllm_config.model_config
    hf_config = model_config.hf_text_config
    positions = getattr(hf_config, "max_position_embeddings", None)
    most = min(key_means.MAX_TOKENS, positions or model_config.max_model_len)
    return list(tokenizer.encode(TEXT))[:most]


def _start(vllm_config: VllmConfig) -> Start:
    """Look for means in a file, or else for a text to measure with."""
    path, key = None, ""
    try:
        files = weight_files(vllm_config)
        if files:
            key = checksum(files)
            path = means_path(key)
            found = read_means(path, key)
            if found is not None:
                return Start(found, path, key)
    except OSError as error:
        logger.warning("Turbo KV cache: the weights cannot be read again: %s.", error)
    try:
        text = text_tokens(vllm_config)
    except Exception as error:  # tokenizers raise errors of many classes
        return Start(problem=Problem.of(NO_TOKENIZER, error))
    if len(text) < key_means.MIN_TOKENS:
        return Start(problem=Problem(SHORT_TEXT))
    if max(text) >= vllm_config.model_config.get_vocab_size():
        # On a GPU such a token would end the process.
        return Start(problem=Problem(OTHER_TOKENS))
    return Start(None, path, key, text)


def _measured(
    runner: PassRunner, vllm_config: VllmConfig, text: list[int]
) -> tuple[Means, Problem | None]:
    """The means of all layers and heads by a pass, and why if there are none."""
    first = key_means.first_tokens(vllm_config.model_config.get_vocab_size())
    own: Means = {}
    problem = None
    try:
        own = run_pass(runner, vllm_config, text, first)
    except PassError as error:
        problem = Problem(f"{PASS_FAILS}: {error}")
    except Exception as error:  # a model's may be of any class
        problem = Problem.of(PASS_FAILS, error)
    if runner.device.type != "cpu":
        torch.accelerator.empty_cache()
    problem = _agreed(problem)
    if problem is not None:
        return {}, problem
    if not model_parallel_is_initialized():
        return own, None
    tp_group, model = get_tp_group(), runner.get_model()
    layers = attention_layers(model)
    heads = {
        name: means
        for name, means in own.items()
        if tp_group.rank_in_group % kv_head_replicas(*layers[name]) == 0
    }
    stage: dict[str, list[LayerMeans]] = {}
    for each in _gathered(heads, tp_group):
        for name, means in each.items():
            stage.setdefault(name, []).append(means)
    whole = {
        name: LayerMeans(*map(torch.cat, zip(*parts))) for name, parts in stage.items()
    }
    merged: Means = {}
    for each in _gathered(whole, get_pp_group()):
        merged |= each
    return merged, None


def set_key_means(runner: PassRunner, vllm_config: VllmConfig) -> None:
    """Take the means of K off in all layers that can have them, and log how many.

    All ranks call this when weights are loaded, and before format ids are told. The
    means are read from a file, or else measured and written to it. A layer with an
    offset of its bias of K gets the means instead, which include the bias.

    Args:
        runner: The engine's model runner.
        vllm_config: The engine's configuration.

    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    if not is_turbo_cache_dtype(cache_dtype):
        return
    if vllm_config.attention_config.turbo_means == "off":
        return
    began_s = time.monotonic()
    model = runner.get_model()
    reason = refusals.means_problem(vllm_config)
    problem = Problem(reason) if reason else layers_problem(model)
    start = Start()
    if problem is None:
        start = _from_first_rank(_start(vllm_config) if _is_first_rank() else None)
        problem = start.problem
    means = start.means
    if problem is None and means is None:
        means, problem = _measured(runner, vllm_config, start.text)
        if start.path is not None and problem is None and _is_first_rank():
            means = write_means(start.path, start.key, means)
        means = _from_first_rank(means)
    if problem is not None:
        _report_problem(vllm_config, problem)
        return
    assert means is not None
    max_model_len = vllm_config.model_config.max_model_len
    used, without = set_tables(model, means, max_model_len)
    share_tables(vllm_config)
    _report(vllm_config, used, without, start, time.monotonic() - began_s)


def _stored(vllm_config: VllmConfig) -> str:
    """The word for vectors that have a mean."""
    return "latents" if vllm_config.model_config.use_mla else "K"


def _report_problem(vllm_config: VllmConfig, problem: Problem) -> None:
    """Log why an engine goes without means."""
    if not _is_first_rank():
        return
    line = (
        f"KV cache {vllm_config.cache_config.cache_dtype}: the means of "
        f"{_stored(vllm_config)} stay in, because {problem.reason}."
    )
    if problem.is_error:
        logger.warning_once("%s %s", line, WAY_OUT)
    else:
        logger.info_once("%s", line)


def _report(
    vllm_config: VllmConfig,
    used: dict[str, float],
    without: dict[str, str],
    start: Start,
    seconds: float,
) -> None:
    """Log how many layers have means, how long these are, and their file."""
    if model_parallel_is_initialized() and not get_tp_group().is_first_rank:
        return
    stored, count = _stored(vllm_config), f"{len(used)} of {len(used | without)}"
    line = f"the means of {stored} are taken off in {count} layers"
    if used:
        shares = sorted(100 * share for share in used.values())
        line += f", and are {shares[0]:.0f} to {shares[-1]:.0f} % as long as {stored}"
    source = "read from" if start.means is not None else "measured, and kept in"
    kept = f"{source} {start.path}" if start.path else "measured, and kept in no file"
    words = [f"{line}; {kept} ({seconds:.1f} s)", *_grouped(without)]
    if used and not vllm_config.model_config.use_mla:
        words.append("Errors of K are orthogonal to where most queries look")
    cache_dtype = vllm_config.cache_config.cache_dtype
    logger.info_once("KV cache %s: %s.", cache_dtype, ". ".join(words), scope="process")
    if used and vllm_config.kv_transfer_config is not None:
        logger.info_once(
            "Engines that exchange pages need the same means of %s: copy the file to "
            "VLLM_CACHE_ROOT of the others, or start all with "
            "--attention-config.turbo_means off.",
            stored,
            scope="process",
        )


def _grouped(without: dict[str, str]) -> Iterator[str]:
    """Words for layers without means, by their reason."""
    for reason in dict.fromkeys(without.values()):
        names = [layer_number(name) for name in without if without[name] == reason]
        yield f"Layers {', '.join(names)} have none, because of {reason}"
