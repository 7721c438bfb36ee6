# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""New tokens after cached tokens with MLA: absorbed, or projected up.

One of vLLM's layers, with random weights and without a model, attends from
``--new-tokens`` tokens of each sequence to its context and to these. The output is one
JSON object a line, for each shape, number of new tokens and way:

* ``absorbed``: attention to packed pages, in the coordinates of latents, with the
  projections of queries and outputs.
* ``gathered``: as in prefills, contexts are dequantised in chunks and projected up, and
  vLLM's prefill attends to them.
* ``bf16``: vLLM's own backend for a bf16 cache.

All ways store the new tokens first. The two ways of the turbo dtype must agree. Each
way is captured in a CUDA graph and replayed with a cold L2 cache, the ways in turn. A
way that cannot be captured is launched instead, and its row says so. Serving uses
absorbed attention for up to ``latent.runner.MAX_ABSORBED_LEN`` new tokens.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark_turbo_decode import Report, run_facts
from turbo_decode_timing import capture, measure, measure_device, spread

RANK, ROPE, BLOCK_SIZE = 512, 64, 64
DTYPE = torch.bfloat16
SEED_TOKENS = 4096
# A bound relative to the norm: new tokens see each other as stored, or raw.
TOLERANCE = 0.05
# By way: the longest query that is absorbed; None: as served.
WAYS = {"absorbed": 1 << 20, "gathered": 0, "bf16": None}


class Model(NamedTuple):
    """The sizes of a layer's attention.

    Attributes:
        num_heads: Query heads of a GPU.
        nope: Coordinates of a head's key without the rotary ones.
        value: Coordinates of a head's value.

    """

    num_heads: int
    nope: int
    value: int


MODELS = {"glm-4.7-flash": Model(20, 192, 256), "deepseek-tp8": Model(16, 128, 128)}
DEFAULT_SHAPES = "16x4096", "16x32768", "1x65536"
DEFAULT_NEW_TOKENS = 1, 4, 8, 16, 32, 48, 64, 96, 128


class Launched:
    """A stand-in for the graph of a function that cannot be captured."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.replay = function


@dataclass
class Layer:
    """A layer with a cache and the builder of its metadata.

    Attributes:
        config: The configuration.
        layer: The layer of vLLM.
        builder: The builder of the layer's metadata.
        cache: (num_blocks, BLOCK_SIZE, C).

    """

    config: Any
    layer: Any
    builder: Any
    cache: torch.Tensor


def make_config(
    folder: Path, model: Model, cache_dtype: str, max_model_len: int
) -> Any:
    """The configuration of a DeepSeek V2 with one layer."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    description = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 64 * model.num_heads,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads,
        "kv_lora_rank": RANK,
        "q_lora_rank": None,
        "qk_nope_head_dim": model.nope,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": model.value,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
        "max_position_embeddings": max_model_len,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=DTYPE,
            max_model_len=max_model_len,
        ),
        cache_config=CacheConfig(cache_dtype=cache_dtype, block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=max_model_len, max_num_seqs=16, max_num_batched_tokens=8192
        ),
    )


def make_layer(
    folder: Path, model: Model, cache_dtype: str, num_blocks: int, args: Any
) -> Layer:
    """A layer with random weights and a full cache."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.utils import customize_attention_spec

    device = torch.device(args.device)
    longest = max(context for _, context in args.shapes) + max(args.new_tokens)
    folder.mkdir()
    config = make_config(folder, model, cache_dtype, longest)
    with set_current_vllm_config(config), set_default_torch_dtype(DTYPE), device:
        size = model.num_heads * (model.nope + model.value)
        projection = ColumnParallelLinear(RANK, size, bias=False, prefix="kv_b_proj")
        projection.weight.data.normal_(std=RANK**-0.5)
        layer = MLAAttention(
            num_heads=model.num_heads,
            scale=(model.nope + ROPE) ** -0.5,
            qk_nope_head_dim=model.nope,
            qk_rope_head_dim=ROPE,
            v_head_dim=model.value,
            q_lora_rank=None,
            kv_lora_rank=RANK,
            kv_b_proj=projection,
            cache_config=config.cache_config,
            prefix="attention",
        )
        projection.quant_method.process_weights_after_loading(projection)
        layer.process_weights_after_loading(DTYPE)
        spec = layer.get_kv_cache_spec(config)
        spec = customize_attention_spec(layer.get_attn_backend(), spec)
        make_builder = layer.get_attn_backend().get_builder_cls()
        builder = make_builder(spec, [layer.layer_name], config, device)
        cache = make_cache(layer, num_blocks, device)
    layer.kv_cache = cache
    return Layer(config, layer, builder, cache)


def make_cache(layer: Any, num_blocks: int, device: torch.device) -> torch.Tensor:
    """A cache full of SEED_TOKENS random tokens, repeated."""
    seed_blocks = min(num_blocks, SEED_TOKENS // BLOCK_SIZE)
    num_tokens = seed_blocks * BLOCK_SIZE
    rows = torch.randn(num_tokens, RANK + ROPE, device=device, dtype=DTYPE)
    if not hasattr(layer.impl, "runner"):
        cache = rows.view(seed_blocks, BLOCK_SIZE, -1)
        return cache.repeat(-(-num_blocks // seed_blocks), 1, 1)
    runner = layer.impl.runner
    size = (seed_blocks, BLOCK_SIZE, runner.layout.slot_size)
    cache = torch.zeros(size, dtype=torch.uint8, device=device)
    slots = torch.arange(num_tokens, device=device)
    kv_c, k_pe = rows.split([RANK, ROPE], -1)
    runner.store(cache, slots, kv_c, k_pe)
    return cache.repeat(-(-num_blocks // seed_blocks), 1, 1)


class Step:
    """The new tokens of a step, the same for each way.

    Attributes:
        common: The step's metadata, as from model runners.
        query: (T, Hq, nope + R).
        kv_c: (T, L), latents of the new tokens.
        k_pe: (T, 1, R), rotary keys of the new tokens.

    """

    def __init__(
        self, model: Model, batch: int, context: int, new: int, device: str
    ) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        length, count = context + new, batch * new
        width = -(-length // BLOCK_SIZE)
        order = torch.randperm(batch * width, device=device).int()
        table = order.view(batch, width)
        seq_lens = torch.full((batch,), length, dtype=torch.int32)
        starts = torch.arange(0, count + 1, new, dtype=torch.int32)
        position = torch.arange(context, length, device=device)
        slots = table[:, position // BLOCK_SIZE].long() * BLOCK_SIZE
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            num_reqs=batch,
            num_actual_tokens=count,
            max_query_len=new,
            max_seq_len=length,
            block_table_tensor=table,
            slot_mapping=(slots + position % BLOCK_SIZE).flatten(),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        made = partial(torch.randn, dtype=DTYPE, device=device)
        self.query = made(count, model.num_heads, model.nope + ROPE)
        self.kv_c, self.k_pe = made(count, RANK), made(count, 1, ROPE)
        self.shape = torch.Size((count, model.num_heads * model.value))

    def run(self, layer: Layer, metadata: Any) -> torch.Tensor:
        """The layer's output, (T, Hq * V)."""
        from vllm.forward_context import set_forward_context

        name = layer.layer.layer_name
        slots = {name: self.common.slot_mapping}
        with set_forward_context({name: metadata}, layer.config, slot_mapping=slots):
            return layer.layer(self.query, self.kv_c, self.k_pe, self.shape)

    def way(self, layer: Layer, threshold: int | None) -> Callable[[], torch.Tensor]:
        """A function that runs the step with metadata that is built here."""
        from vllm.config import set_current_vllm_config

        if threshold is not None:
            layer.builder.reorder_batch_threshold = threshold
        with set_current_vllm_config(layer.config):
            metadata = layer.builder.build(0, self.common)
        return partial(self.run, layer, metadata)


def graph_of(function: Callable[[], Any]) -> tuple[Any, bool]:
    """A graph of a function, or a stand-in that launches it; whether it is a graph."""
    try:
        return capture(function), True
    except RuntimeError:
        torch.accelerator.synchronize()
        return Launched(function), False


def check(ways: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Compare the two ways of the turbo dtype.

    Raises:
        AssertionError: They differ, so that their times would mean nothing.

    """
    absorbed, gathered = (ways[name]().float() for name in ("absorbed", "gathered"))
    far = (absorbed - gathered).norm() / gathered.norm()
    # NaN fails this comparison.
    assert far <= TOLERANCE, f"the ways differ by {far:.3g}"


def time_shape(
    name: str,
    layers: dict[str, Layer],
    shape: tuple[int, int],
    report: Report,
    args: argparse.Namespace,
) -> None:
    """Report a row for each number of new tokens and way."""
    batch, context = shape
    for new in args.new_tokens:
        row = {"model": name, "shape": f"{batch}x{context}", "new_tokens": new}
        try:
            step = Step(MODELS[name], batch, context, new, args.device)
            ways = {way: step.way(layers[way], WAYS[way]) for way in layers}
            check(ways)
            if args.check_only:
                report.row(**row, correct=list(ways))
                continue
            graphs = {way: graph_of(run) for way, run in ways.items()}
            replayed = {way: graph for way, (graph, _) in graphs.items()}
            for way, times in measure(replayed, args.rounds).items():
                facts = {"way": way, "graph": graphs[way][1]}
                report.row(**row, **facts, **spread(times), **args.device_facts)
        except Exception:
            report.error(**row)
            args.failed = True


def parse_shape(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split("x"))
    return batch, context


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        default=[parse_shape(text) for text in DEFAULT_SHAPES],
        metavar="BATCHxCONTEXT",
    )
    parser.add_argument(
        "--new-tokens", nargs="+", type=int, default=list(DEFAULT_NEW_TOKENS)
    )
    parser.add_argument("--cache-dtype", default="turbo4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    return parser


@torch.inference_mode()
def main() -> int:
    args = build_parser().parse_args()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_random_seed
    from vllm.v1.worker.workspace import init_workspace_manager

    args.device, args.block_size = current_platform.device_type, BLOCK_SIZE
    args.failed = False
    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    args.device_facts = {} if args.check_only else measure_device(args.rounds)
    if not current_platform.is_cpu():
        init_workspace_manager(torch.device(args.device))
    most = max(batch * (context // BLOCK_SIZE + 3) for batch, context in args.shapes)
    num_blocks = most + max(args.new_tokens) * 16 // BLOCK_SIZE
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "ranks").mkdir()
        config = make_config(folder, MODELS[args.models[0]], args.cache_dtype, 4096)
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(
            1, 0, f"file://{folder / 'ranks' / 'all'}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        for model in args.models:
            turbo = make_layer(
                folder / model, MODELS[model], args.cache_dtype, num_blocks, args
            )
            layers = {"absorbed": turbo, "gathered": turbo}
            own = folder / f"{model}-bf16"
            try:
                layers["bf16"] = make_layer(
                    own, MODELS[model], "auto", num_blocks, args
                )
            except Exception:
                report.error(model=model, way="bf16")
                args.failed = True
            for shape in args.shapes:
                time_shape(model, layers, shape, report, args)
    return 1 if args.failed else 0


if __name__ == "__main__":
    sys.exit(main())
