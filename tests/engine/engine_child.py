# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs engines described as JSON, one after the other.

Usage: python engine_child.py JOB RESULT. Triton's interpreter and much of vLLM's state
belong to a process, so that each configuration has its own.
"""

import gc
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from vllm_turbo_cpu_standins.indexers import emulate_indexers
from vllm_turbo_cpu_standins.offloading import emulate_offloading
from vllm_turbo_cpu_standins.quantization import emulate_nvfp4

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.kv_cache_interface import MambaSpec, kv_cache_format_id

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from engine_hooks import StepRecorder, causal_images, changed, reloading  # noqa: E402
from turbo_equality.child import logprobs_of  # noqa: E402

TRANSFER_ATTEMPTS = 5


def summarise(output: RequestOutput) -> dict[str, Any]:
    """Returns a request's tokens, and all tokens' log-probabilities at each."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs_of(output),
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
    }


def copy_parameters(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies weights into a model's parameters in place, as some trainers do."""
    own = dict(model.named_parameters())
    for name, weight in weights.items():
        own[name].data.copy_(weight)


def parameters_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a model's parameters, as they are once a checkpoint is loaded."""
    before = {name: x.clone() for name, x in model.named_parameters()}
    model.load_weights(iter(weights.items()))
    found = {name: x.clone() for name, x in model.named_parameters()}
    copy_parameters(model, before)
    return found


def load(llm: LLM, folder: str, way: str) -> None:
    """Has a running engine load a model's weights, in one of several ways."""
    weights = load_file(Path(folder) / "model.safetensors")
    if way == "load_weights":
        # The names that load_weights returns stay in the worker.
        llm.apply_model(lambda model: bool(model.load_weights(iter(weights.items()))))
    elif way == "copy":
        parameters = llm.apply_model(lambda model: parameters_of(model, weights))[0]
        llm.apply_model(lambda model: copy_parameters(model, parameters))
    elif way == "kernel format":
        parameters = llm.apply_model(lambda model: parameters_of(model, weights))[0]
        told = {"weights_iterator": parameters.items(), "is_checkpoint_format": False}
        with torch.no_grad():
            llm.collective_rpc("reload_weights", kwargs=told)
    elif way == "iterator":
        told = {"weights_iterator": iter(weights.items())}
        llm.collective_rpc("reload_weights", kwargs=told)
    else:
        assert way == "path", way
        # A loader of dummy weights reads no folder.
        change = {"load_config": {"load_format": "safetensors"}}
        llm.collective_rpc("update_config", args=(change,))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def wait_for(path: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Waits for the other engine's file. The harness ends a process that waits on."""
    while not path.exists():
        meanwhile()
        # Both engines share the cores, and even an empty step takes time.
        time.sleep(0.5)


def taken(path: str) -> Path:
    """Returns the file that tells that another engine has the pages."""
    return Path(path).with_suffix(".taken")


def transfers(call: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Returns the parameters that a KV connector gets with each prompt of a call."""
    if call["handed_over"] is not None:
        return [{"do_remote_decode": True} for _ in call["prompts"]]
    if call["taken_over"] is None:
        return [None] * len(call["prompts"])
    path = Path(call["taken_over"])
    wait_for(path)
    return json.loads(path.read_text())


def sampling_params(
    call: dict[str, Any], transfer: dict[str, Any] | None
) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=call["max_tokens"],
        ignore_eos=True,
        logprobs=-1,
        # Else each token of the vocabulary would be made text, at every position.
        detokenize=False,
        extra_args=transfer and {"kv_transfer_params": transfer},
    )


def hand_over(llm: LLM, outputs: list[RequestOutput], path: str, dies: bool) -> None:
    """Leaves transfer parameters for another engine, and waits until it has the pages.

    The engine goes on stepping as a server's does: pages are pushed in its steps. If
    `dies` is set, the process is killed instead.
    """
    told = [output.kv_transfer_params for output in outputs]
    part = Path(path).with_suffix(".part")
    part.write_text(json.dumps(told))
    part.rename(path)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(taken(path), llm.llm_engine.engine_core.get_output)


def adapters(call: dict[str, Any]) -> list[LoRARequest | None]:
    """Returns each prompt's LoRA adapter; a folder has one number in all calls."""
    return [
        folder and LoRARequest(folder, 1 + zlib.crc32(folder.encode()), folder)
        for folder in call["adapters"] or [None] * len(call["prompts"])
    ]


def inputs(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each prompt, with its images if it has some."""
    prompts = call["prompts"]
    found: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in prompts]
    for prompt, paths in zip(found, call["images"] or [[]] * len(prompts), strict=True):
        if paths:
            images = [Image.open(path) for path in paths]
            prompt["multi_modal_data"] = {"image": images}
    return found


def generate(
    llm: LLM,
    requests: list[tuple[dict[str, Any], SamplingParams, LoRARequest | None]],
    lost: bool = False,
) -> list[RequestOutput]:
    """Generates for all requests at once.

    Requests whose transfer failed are asked again, unless `lost` is set: NIXL waits
    five seconds for a first reply, and a busy machine may need longer.

    Raises:
        RuntimeError: If some requests fail every time.

    """
    outputs: dict[int, RequestOutput] = {}
    for _ in range(TRANSFER_ATTEMPTS):
        missing = [i for i in range(len(requests)) if i not in outputs]
        prompts, params, loras = map(list, zip(*(requests[i] for i in missing)))
        found = llm.generate(
            prompts, params, use_tqdm=False, lora_request=loras if any(loras) else None
        )
        for i, output in zip(missing, found, strict=True):
            if lost or output.outputs[0].finish_reason != "error":
                outputs[i] = output
        if len(outputs) == len(requests):
            return [outputs[i] for i in range(len(requests))]
    raise RuntimeError(f"{len(requests) - len(outputs)} requests failed every time")


def run_call(llm: LLM, call: dict[str, Any]) -> dict[str, Any]:
    """Generates greedily for a call's prompts, all at once or one by one."""
    if call["forgets"] or call["forgets_host"]:
        llm.reset_prefix_cache(reset_connector=call["forgets_host"])
    if call["loaded"] is not None:
        load(llm, call["loaded"], call["way"])
    if call["pooled"] is not None:
        return run_pooled(llm, call)
    requests = [
        (prompt, sampling_params(call, transfer), lora)
        for prompt, transfer, lora in zip(
            inputs(call), transfers(call), adapters(call), strict=True
        )
    ]
    batches = [[each] for each in requests] if call["one_by_one"] else [requests]
    outputs = []
    with StepRecorder().watching() as recorder, ExitStack() as stack:
        if call["reloaded"] is not None:
            arguments = (call["reloaded"], call["remade_key_offset"])
            stack.enter_context(reloading(llm, *arguments))
        if call["causal_images"]:
            stack.enter_context(causal_images())
        for batch in batches:
            outputs += generate(llm, batch, call["lost"])
    if call["handed_over"] is not None:
        hand_over(llm, outputs, call["handed_over"], call["dies"])
    if call["taken_over"] is not None:
        taken(call["taken_over"]).touch()
    return recorder.result([summarise(output) for output in outputs])


def run_pooled(llm: LLM, call: dict[str, Any]) -> dict[str, Any]:
    """Pools a call's prompts, all at once."""
    prompts = [{"prompt_token_ids": tokens} for tokens in call["prompts"]]
    with StepRecorder().watching() as recorder:
        outputs = llm.encode(prompts, pooling_task=call["pooled"], use_tqdm=False)
    return recorder.result(
        [
            {
                "data": output.outputs.data.float().flatten().tolist(),
                "num_cached_tokens": output.num_cached_tokens,
            }
            for output in outputs
        ]
    )


def count_drafts(llm: LLM) -> dict[str, int]:
    """Returns how many tokens were drafted and accepted, if the engine counts them."""
    if llm.llm_engine.logger_manager is None:
        return {}
    totals = {metric.name: metric for metric in llm.get_metrics()}
    return {
        name: int(totals[f"vllm:spec_decode_num_{key}_tokens"].value)
        for name, key in (("drafted", "draft"), ("accepted", "accepted"))
        if f"vllm:spec_decode_num_{key}_tokens" in totals
    }


def pages(worker: Any) -> dict[str, tuple[int, bool]]:
    """Returns each layer's bytes a page, and whether some of them are padding.

    The worker knows them: the scheduler has one layer of a group in place of all.
    """
    found = {}
    for group in worker.model_runner.kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for layer in group.layer_names:
            spec = specs.get(layer, group.kv_cache_spec)
            if isinstance(spec, MambaSpec):
                content = spec.real_page_size_bytes
            else:
                content = spec.unpadded_page_size_bytes
            found[layer] = (spec.page_size_bytes, spec.page_size_bytes > content)
    return found


def key_offsets(worker: Any) -> list[list[float]]:
    """Returns each layer's offset of K for the last segment of RoPE's positions."""
    model = worker.model_runner.get_model()
    runners = [layer.impl.runner for layer, _ in key_bias.turbo_layers(model)]
    tables = [runner.scoring.key_offset for runner in runners]
    return [table[-1].flatten().tolist() for table in tables if table is not None]


def run_engine(engine: dict[str, Any]) -> dict[str, Any]:
    """Starts one engine, runs its calls in order, and takes it down.

    An engine that does not start gives its error instead, if the job expects one.
    """
    try:
        llm = LLM(engine["model"], max_logprobs=-1, **engine["args"])
    except Exception as error:
        if not engine["may_fail"]:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    result = {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "num_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "num_tokens": config.cache_config.kv_cache_size_tokens,
        "pages": llm.collective_rpc(pages)[0],
        "key_offsets": llm.collective_rpc(key_offsets)[0],
        "num_kv_cache_groups": len(groups),
        "format": kv_cache_format_id(config.cache_config.cache_dtype, groups),
        "calls": {name: run_call(llm, call) for name, call in engine["calls"].items()},
    } | count_drafts(llm)
    del llm, core, groups
    gc.collect()
    return result


def run_job(job_path: Path, result_path: Path) -> None:
    job = json.loads(job_path.read_text())
    results = {}
    emulate_nvfp4()
    emulate_indexers()
    for name, engine in job.items():
        print(f"engine {name}", flush=True)
        if "kv_transfer_config" in engine["args"]:
            emulate_offloading()
        with changed(engine):
            results[name] = run_engine(engine)
    result_path.write_text(json.dumps(results))


if __name__ == "__main__":
    run_job(*map(Path, sys.argv[1:]))
