# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The part of `child.py` that records the distributions of a prompt's later chunks.

They come from vLLM itself. The reference asks for its likeliest tokens at each
position, and other engines for the log-probabilities of those tokens.
"""

from pathlib import Path

import numpy as np

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

# The least probability of all tokens that are not told apart. The probabilities of the
# others are fp32, and their sum may be 1.
MIN_REST = 1e-6


def prefill_params(
    tokens: list[int], first: int, count: int, reference: Path | None
) -> SamplingParams:
    """Returns parameters that score a prompt's positions from `first` on.

    Args:
        tokens: The prompt.
        first: The first position whose next token is scored.
        count: Tokens that are told apart.
        reference: The reference's record; None for the reference itself.

    """
    params = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, flat_logprobs=True
    )
    if reference is None:
        params.prompt_logprobs = count
        return params
    targets = np.array(tokens[first + 1 :])[:, None]
    ids = np.concatenate([np.load(reference)["ids"], targets], axis=1)
    params.prompt_logprob_token_ids = ids.astype(np.int32)
    params.prompt_logprob_start = first
    return params


def likeliest(output: RequestOutput, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that a request told apart, and scores of these and the next.

    Args:
        output: The reference's, whose parameters are `prefill_params`.
        first: As there.

    Returns:
        (position, k) ids, falling; (position, k + 1) log-probabilities, the last of the
        prompt's own next token.

    """
    found = output.prompt_logprobs
    assert isinstance(found, FlatLogprobs)
    # The entry of a position is about its own token, which comes first.
    start = found.start_indices[first + 1]
    rows = len(found.start_indices) - first - 1
    ids = np.array(found.token_ids[start:]).reshape(rows, -1)
    scores = np.array(found.logprobs[start:], dtype=np.float32).reshape(rows, -1)
    return ids[:, 1:], np.roll(scores, -1, axis=1)


def save_prefill(
    output: RequestOutput, first: int, path: Path, reference: Path | None
) -> None:
    """Writes a request's record, whose parts are those of `probe.Record`.

    Args:
        output: The request's, whose parameters are `prefill_params`.
        first: As there.
        path: The .npz file.
        reference: As there.

    Raises:
        RuntimeError: If a log-probability is no number.

    """
    if reference is None:
        ids, scores = likeliest(output, first)
    else:
        ids, scores = np.load(reference)["ids"], output.prompt_token_id_logprobs
        assert scores is not None and len(scores) == len(ids)
    if np.isnan(scores).any():
        raise RuntimeError(f"the logits of {path.stem} are not numbers (NaN)")
    apart, target = scores[:, :-1], scores[:, -1]
    rest = np.log(np.maximum(1 - np.exp(apart, dtype=np.float64).sum(1), MIN_REST))
    np.savez(
        path,
        ids=ids,
        logprobs=np.concatenate([apart, rest[:, None]], axis=1, dtype=np.float32),
        target=target,
        top=np.take_along_axis(ids, apart.argmax(1)[:, None], axis=1)[:, 0],
    )
