# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` as a process that answers over HTTP."""

import heapq
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import TIMEOUT_S, Server, group_is_gone, serving, tie
from ways import KL_TOLERANCE

NUM_GENERATED = 8
TIE = tie(KL_TOLERANCE)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPTS = [
    f"Number {index} of several prompts:" + index * " more" for index in range(6)
]


@pytest.fixture(scope="module", params=[("turbo4", "v2")], ids="-".join)
def server(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    dtype, runner = request.param
    folder = tmp_path_factory.mktemp("serve")
    with serving(
        folder, model, runner,
        "--kv-cache-dtype", dtype, "--dtype", "float16", "--block-size", "32",
        "--served-model-name", "seeded", "--max-model-len", "512",
        "--max-num-seqs", "8", "--kv-cache-memory-bytes", "32M",
        "--attention-config", '{"turbo_prefill": "stored"}',
    ) as running:  # fmt: skip
        yield running


def completion(prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": "seeded", "prompt": prompt, "max_tokens": NUM_GENERATED}
    return body | {"temperature": 0, "ignore_eos": True, "logprobs": 2} | options


def text(answer: dict[str, Any]) -> str:
    assert answer["status"] == 200, answer
    return answer["choices"][0]["text"]


def decided_text(answer: dict[str, Any]) -> str:
    """Returns an answer's text before the first token that rounding may decide."""
    logprobs = answer["choices"][0]["logprobs"]
    decided = ""
    for token, likeliest in zip(logprobs["tokens"], logprobs["top_logprobs"]):
        best, second = heapq.nlargest(2, likeliest.values())
        if best - second <= TIE:
            break
        decided += token
    return decided


def test_says_once_what_the_cache_is(server: Server):
    log = server.log.read_text()
    says = "bytes a token and layer", "the means of K are taken off in"
    assert [log.count(words) for words in says] == [1, 1]
    assert log.count("KV cache turbo4: ") == len(says)


def test_concurrent_as_one_by_one(server: Server):
    bodies = [completion(prompt) for prompt in PROMPTS]
    answers = [server.post(COMPLETIONS, body) for body in bodies]
    assert len(set(map(text, answers))) == len(PROMPTS)
    alone = [decided_text(answer) for answer in answers]
    # A token is a byte.
    assert 2 * len("".join(alone)) > NUM_GENERATED * len(PROMPTS)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = pool.map(lambda body: server.post(COMPLETIONS, body), bodies)
    for answer, decided in zip(together, alone, strict=True):
        assert text(answer).startswith(decided)


def test_streamed_as_whole(server: Server):
    body = completion(PROMPTS[2])
    whole = server.post(COMPLETIONS, body)
    pieces = [e["choices"][0]["text"] for e in server.stream(COMPLETIONS, body)]
    assert len(pieces) > 1
    assert len("".join(pieces)) == len(text(whole)) == NUM_GENERATED
    assert decided_text(whole) and "".join(pieces).startswith(decided_text(whole))


def test_chat_with_default_sampling(server: Server):
    messages = [{"role": "user", "content": "Say something."}]
    body = {"model": "seeded", "messages": messages, "max_tokens": 8}
    answer = server.post(CHAT, body)
    assert answer["status"] == 200, answer
    assert answer["usage"]["completion_tokens"] > 0


def test_too_long_a_prompt_is_refused(server: Server):
    answer = server.post(COMPLETIONS, completion(600 * "x"))
    assert answer["status"] == 400
    assert "512" in answer["error"]["message"]


def test_ends_cleanly_when_asked(server: Server):
    """This test is the last, because the others need the server."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(TIMEOUT_S) == 0
    assert group_is_gone(server.process)
