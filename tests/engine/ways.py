# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""All ways in which vLLM may serve a prompt, for models of any family.

Query tokens are read from the cache as well (`turbo_prefill` "stored"), so that answers
are the same in all ways.
"""

from dataclasses import dataclass, field
from typing import Any

from harness import Call, Engine, kl_divergences, requests_of
from scenarios import MAX_LEN, text

NUM_GENERATED = 6
# Query tokens of a step where prompts come in chunks.
CHUNK = 48
# Nats at any position: one code of many flips by rounding. See test_engine.py.
KL_TOLERANCE = 1e-3
NUM_SCARCE = 4


@dataclass
class Ways:
    """The ways of one kind of model.

    Attributes:
        block: Tokens of a block.
        cached: Engine arguments of prefix caching.
        scarce_blocks: Blocks so few that requests which outgrow theirs are preempted; 0
            if none does.
        more: Arguments of further engines, by name.
        has_control: Whether an engine does the same with a cache in the model's dtype.

    """

    block: int
    cached: dict[str, Any] = field(default_factory=dict)
    scarce_blocks: int = 0
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_control: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of one token, of lengths around a block, and of several blocks."""
        n = self.block
        lengths = (1, n - 1, n, n + 1, 3 * n + 5)
        return [text(length, seed) for seed, length in enumerate(lengths)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, as the model gets it."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def scarce(self) -> list[list[int]]:
        """Prompts of several blocks, which they outgrow while they generate."""
        length = 3 * self.block - 4
        return [text(length, 300 + index) for index in range(NUM_SCARCE)]

    def engines(self) -> dict[str, Engine]:
        """Returns an engine that runs all ways, and one engine a way."""
        common: dict[str, Any] = {
            "kv_cache_dtype": "turbo4",
            "dtype": "float32",
            "block_size": self.block,
            "attention_config": {"turbo_prefill": "stored"},
        }
        chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}
        cached = {
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        } | self.cached
        scarce = {
            "num_gpu_blocks_override": self.scarce_blocks,
            "max_model_len": min(MAX_LEN, 8 * self.block),
        }

        def call(prompts: list[list[int]] = self.prompts, **options: Any) -> Call:
            return Call(prompts, NUM_GENERATED, **options)

        twice = {"cold": call(), "warm": call()}
        alone = call(self.prompts + self.scarce, one_by_one=True)
        few = cached | {"max_num_batched_tokens": CHUNK + self.block}
        each = {
            "alone": call(one_by_one=True),
            "warm": call(),
            "cold": call(forgets=True),
        }
        found = {
            "few": Engine(common | few, each),
            "plain": Engine(common, {"alone": alone, "batched": call()}),
            "prefix": Engine(common | cached, twice),
            "chunked": Engine(common | chunks, {"chunked": call()}),
            "zeroed": Engine(common, {"batched": call()}, zero_attention=True),
        }
        if self.scarce_blocks:
            calls = {"scarce": call(self.scarce)}
            found["scarce"] = Engine(common | scarce, calls)
        if self.has_control:
            control = common | few | {"kv_cache_dtype": "auto"}
            found["control"] = Engine(control, each)
        more = {name: Engine(common | args, twice) for name, args in self.more.items()}
        return found | more


class Answers:
    """The answers of a model's engines.

    Attributes:
        ways: The model's ways.

    """

    def __init__(self, ways: Ways, engines: dict[str, Any]) -> None:
        self.ways = ways
        self.engines = engines
        engine = "plain" if "plain" in engines else "few"
        prompts = ways.prompts + (ways.scarce if engine == "plain" else [])
        alone = requests_of(engines[engine], "alone")
        self.alone = dict(zip(map(tuple, prompts), alone, strict=True))

    def call(self, engine: str, call: str) -> dict[str, Any]:
        return self.engines[engine]["calls"][call]

    def divergence(
        self, engine: str, call: str, prompts: list[list[int]] | None = None
    ) -> list[float]:
        """Returns each prompt's largest divergence from its run alone, in nats."""
        requests = requests_of(self.engines[engine], call)
        prompts = self.ways.prompts if prompts is None else prompts
        return [
            max(kl_divergences(self.alone[tuple(prompt)], request))
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def cached(self, engine: str, call: str) -> list[int]:
        """Tokens of each prompt that were in the cache."""
        requests = requests_of(self.engines[engine], call)
        return [request["num_cached_tokens"] for request in requests]

    def whole_blocks(self) -> list[int]:
        """Tokens of each prompt that are hit by whole blocks; the last is computed."""
        n = self.ways.block
        return [(length - 1) // n * n for length in self.ways.lengths]

    def assert_alike(self, engine: str, *calls: str) -> None:
        """Asserts that prompts are answered as in their runs alone."""
        for call in calls:
            assert max(self.divergence(engine, call)) < KL_TOLERANCE

    def assert_batched(self) -> None:
        first_step = self.call("plain", "batched")["steps"][0]
        assert first_step == [[length, 0] for length in self.ways.lengths]
        self.assert_alike("plain", "batched")

    def assert_chunked(self) -> None:
        steps = self.call("chunked", "chunked")["steps"]
        assert all(sum(new for new, _ in step) <= CHUNK for step in steps)
        chunks = [new for step in steps for new, computed in step if computed]
        assert sum(new > 1 for new in chunks) > 3
        self.assert_alike("chunked", "chunked")

    def assert_preempted(self) -> None:
        assert self.call("scarce", "scarce")["num_preemptions"] > 0
        divergence = self.divergence("scarce", "scarce", self.ways.scarce)
        assert max(divergence) < KL_TOLERANCE

    def assert_attention_decides(self) -> None:
        """Guards the others: were attention ignored, they would all pass."""
        assert min(self.divergence("zeroed", "batched")) > 100 * KL_TOLERANCE
