# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` as a process, asked over HTTP."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Server, group_is_gone, serving

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
    body = {"model": "seeded", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return body | {"ignore_eos": True} | options


def text(answer: dict[str, Any]) -> str:
    assert answer["status"] == 200, answer
    return answer["choices"][0]["text"]


def test_says_once_what_the_cache_is(server: Server):
    log = server.log.read_text()
    assert log.count("KV cache turbo4: ") == log.count("bytes a token and layer") == 1


def test_concurrent_as_one_by_one(server: Server):
    bodies = [completion(prompt) for prompt in PROMPTS]
    alone = [text(server.post(COMPLETIONS, body)) for body in bodies]
    assert len(set(alone)) == len(PROMPTS)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = pool.map(lambda body: server.post(COMPLETIONS, body), bodies)
    assert [text(answer) for answer in together] == alone


def test_streamed_as_whole(server: Server):
    body = completion(PROMPTS[2])
    whole = text(server.post(COMPLETIONS, body))
    pieces = [e["choices"][0]["text"] for e in server.stream(COMPLETIONS, body)]
    assert len(pieces) > 1
    assert "".join(pieces) == whole


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
    """Runs last: the others need the server."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert group_is_gone(server.process)
