# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reports the kernels of an engine's ranks: the last rank to start logs one line.

No rank waits for another. A pipeline stage may have no layer that stores K and V, and
data parallel ranks start at different times.
"""

from functools import cache
from itertools import groupby

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from vllm.distributed.parallel_state import (
    get_world_group,
    model_parallel_is_initialized,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

_KEY = "turbo_kernels"


def exchange(used: str, rank: int, world_size: int, store: Store) -> list[str] | None:
    """Report this rank's kernels to the other ranks.

    Args:
        used: The kernels that this rank runs, and the reason.
        rank: The index of this rank.
        world_size: The number of ranks, each of which reports once.
        store: The store of all ranks.

    Returns:
        Each rank's kernels if this rank is the last to report; else None.

    """
    store.set(f"{_KEY}/{rank}", used)
    told = store.add(f"{_KEY}/number", 1)
    keys = [f"{_KEY}/{number}" for number in range(world_size)]
    # A rank that was started again has reported twice.
    if told != world_size or not store.check(keys):
        return None
    return [store.get(key).decode() for key in keys]


def _ranges(numbers: list[int]) -> str:
    """Ranges of ascending numbers, such as 0-2, 5."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    bounds = ([number for _, number in run] for _, run in runs)
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in bounds)


def describe_ranks(used: list[str]) -> str:
    """One line on the kernels of all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(used):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{text} (ranks {_ranges(who)})" for text, who in ranks.items()]
    return f"Turbo KV cache, kernels of {len(used)} ranks: {'; '.join(parts)}."


def log_ranks(used: list[str]) -> None:
    """Log the kernels of all ranks, as a warning if they differ."""
    line = describe_ranks(used)
    # Only kernels are compared, because reasons may differ.
    if len({text.split()[0] for text in used}) == 1:
        logger.info("%s", line)
        return
    logger.warning(
        "%s A step waits for its slowest rank. With attention_config.turbo_kernel=cuda "
        "the engine does not start where one rank cannot run CUDA's.",
        line,
    )


@cache
def report_kernels(used: str) -> None:
    """Make one of several ranks log the kernels of all; called once in a process."""
    if not model_parallel_is_initialized() or get_world_group().world_size == 1:
        return
    world = get_world_group()
    all_used = exchange(used, world.rank, world.world_size, _get_default_store())
    if all_used is not None:
        log_ranks(all_used)
