# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A layer of MLA takes the mean of latents off in its store, and adds it again.

A pass of a text measures the mean.
"""

import copy
import math

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.attention.backends.mla.turbo_mla import TurboMLABackend
from vllm.v1.attention.ops.turbo.format import LAYOUT_VERSION
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans
from vllm.v1.attention.ops.turbo.keys.run_pass import attention_layers
from vllm.v1.attention.ops.turbo.keys.text_pass import TextPass
from vllm.v1.attention.ops.turbo.latent.mean import BUFFER, with_rotation
from vllm.v1.attention.ops.turbo.reference import inverse_rotate
from vllm.v1.attention.ops.turbo.serving import format_id, means_tables
from vllm.v1.attention.ops.turbo.serving.startup import describe_latent_cache
from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

from ..backend_utils import prefill_modes
from ..utils import DEVICE, ON_GPU, gaussian, requires_triton
from .latent_utils import latent_presets, long_mean
from .mla_utils import (
    FP32,
    NOPE,
    NUM_HEADS,
    MLABatch,
    make_mla_builder,
    make_mla_config,
    make_mla_layer,
)
from .test_mla_backend import BATCHES, LONG, assert_as_expected

# The length of ``long_mean``, in lengths of a Gaussian latent.
LENGTH = 30
pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs"),
    pytest.mark.usefixtures("rank_config"),
]


def layer_with_mean(
    config: VllmConfig, mean: torch.Tensor | None = None
) -> MLAAttention:
    layer = make_mla_layer(config)
    runner = layer.impl.runner
    mean = long_mean(runner.layout) if mean is None else mean
    runner.set_latent_mean(layer, mean, DEVICE)
    return layer


@latent_presets
@prefill_modes
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_batches(folder, name, mode, requests):
    """Outputs are those of whole latents, with scores that include the mean. The first
    tokens of sequences have lost it as well.
    """
    config = make_mla_config(folder, name, turbo_prefill=mode)
    batch = MLABatch.make(layer_with_mean(config), requests)
    raw_from = LONG if mode == "raw" else None
    assert_as_expected(batch, config, raw_from, magnitude=LENGTH)
    # Far from the mean, a stored latent is as close as without one.
    stored, _ = batch.stored(0)
    error = (stored - batch.latents[0][0]).norm() / stored.shape[0] ** 0.5
    assert 0 < error < 0.2 * stored.shape[1] ** 0.5


def test_padding_has_no_mean(folder):
    """Requests without tokens have outputs of zero, not the mean's."""
    config = make_mla_config(folder)
    batch = MLABatch.make(layer_with_mean(config), [(3, 31), (1, 5)], padding=2)
    metadata = make_mla_builder(config, batch.layer).build(0, batch.common)
    output = batch.run(config, metadata)
    expected = batch.expected(LONG)
    assert expected.any() and not output[len(expected) :].any()


@requires_triton
@prefill_modes
def test_triton_kernels(folder, mode):
    """A layer hands its mean to kernels, which store the reference's bytes."""
    config = make_mla_config(folder, dtype=torch.float16, turbo_prefill=mode)
    layer = layer_with_mean(config, gaussian(512, dtype=FP32, seed=5) * 3)
    found = []
    for kernels in (layer.impl.runner.kernels, TritonLatentKernels()):
        layer.impl.runner.kernels = kernels
        batch = MLABatch.make(layer, BATCHES["mixed"])
        metadata = make_mla_builder(config, layer).build(0, batch.common)
        found.append((batch.run(config, metadata), batch.cache))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[1][0], found[0][0], atol=12e-3, rtol=0)


def test_rows_of_the_buffer():
    """The rotated mean is the exact rotation, not one in block fixed point."""
    mean = gaussian(512, dtype=torch.bfloat16, seed=3)
    own, rotated = with_rotation(mean)
    assert torch.equal(own, mean.float().cpu())
    torch.testing.assert_close(inverse_rotate(rotated), own, atol=1e-5, rtol=0)


def test_a_later_mean_is_set_in_place(folder):
    """CUDA graphs read the mean at its address, and checkpoints do not have it."""
    layer = layer_with_mean(make_mla_config(folder))
    runner = layer.impl.runner
    addresses = [x.data_ptr() for x in runner.mean]
    assert dict(layer.named_buffers())[BUFFER].data_ptr() == addresses[0]
    assert BUFFER not in layer.state_dict()
    other = 2 * long_mean(runner.layout)
    runner.set_latent_mean(layer, other, DEVICE)
    assert [x.data_ptr() for x in runner.mean] == addresses
    assert torch.equal(torch.stack(list(runner.mean)).cpu(), with_rotation(other))


def test_reloads_and_sleep_leave_the_mean(folder):
    """Neither changes the tensors that kernels read."""
    config = make_mla_config(folder)
    layer = make_mla_layer(config)
    runner = layer.impl.runner
    record_metadata_for_reloading(layer)
    runner.set_latent_mean(layer, long_mean(runner.layout), DEVICE)
    before = [x.clone() for x in runner.mean]
    with set_current_vllm_config(config):
        initialize_layerwise_reload(layer)
        finalize_layerwise_reload(layer, config.model_config)
    addresses = [x.data_ptr() for x in runner.mean]
    assert getattr(layer, BUFFER).data_ptr() == addresses[0]
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    getattr(layer, BUFFER).fill_(math.nan)
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(kept[name])
    assert all(map(torch.equal, runner.mean, before))


def test_means_that_are_refused(folder):
    layer = make_mla_layer(make_mla_config(folder))
    mean = torch.zeros(512)
    mean[7] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        layer.impl.runner.set_latent_mean(layer, mean, DEVICE)
    assert layer.impl.runner.mean is None and not hasattr(layer, BUFFER)


def test_layers_with_and_without_a_mean_launch_different_kernels(folder):
    config = make_mla_config(folder)
    plain, other = make_mla_layer(config), layer_with_mean(config)
    assert plain.impl.runner.launch_key != other.impl.runner.launch_key


def test_pages_say_their_mean(folder):
    """Layers with other means have pages of another format."""

    def found(*means: torch.Tensor | None) -> str:
        config = make_mla_config(folder)
        specs = {}
        for mean in means:
            layer = make_mla_layer(config)
            if mean is not None:
                layer.impl.runner.set_latent_mean(layer, mean, DEVICE)
            spec = TurboMLABackend.customize_spec(layer.get_kv_cache_spec(config))
            specs[layer.layer_name] = spec
        (word,) = {
            x.format_id for x in format_id.with_format_ids(specs, config).values()
        }
        return word

    mean = gaussian(512, dtype=FP32, seed=1).cpu()
    near = copy.deepcopy(mean)
    near[3] += 2**-20
    cases = [(mean, None), (None, mean), (mean, mean), (near, None), (mean, near)]
    words = [found(*means) for means in cases]
    assert len(set(words)) == len(cases) and found(None, None) == str(LAYOUT_VERSION)
    assert found(mean, None) == words[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_the_mean(folder, rank):
    """All ranks have the mean, and the format does not depend on their number."""
    config = make_mla_config(folder)
    layer = layer_with_mean(config)
    ((_, means),) = format_id._own_formats(config, {layer.layer_name}, rank).values()
    assert len(means) == (rank == 0)


def test_line_at_the_start(folder):
    config = make_mla_config(folder)
    impls = [make_mla_layer(config).impl, layer_with_mean(config).impl]
    assert "; latents' mean: 1 of 2 layers (" in describe_latent_cache(impls)


NUM_TEXT, NUM_FIRST = 40, 3
NUM_TOKENS = NUM_TEXT + NUM_FIRST


def expected_outputs(
    layer: MLAAttention, query: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor
) -> torch.Tensor:
    """Attention by query token and head, in the plainest way."""
    weight = layer.kv_b_proj.weight.double().unflatten(0, (NUM_HEADS, -1))
    outputs = []
    for token in range(NUM_TOKENS):
        seen = slice(0 if token < NUM_TEXT else token, token + 1)
        for head in range(NUM_HEADS):
            keys, values = (kv_c[seen].double() @ weight[head].T).split(
                [NOPE, layer.v_head_dim], -1
            )
            keys = torch.cat([keys, k_pe[seen, 0].double()], -1)
            scores = keys @ query[token, head].double() * layer.scale
            outputs.append(scores.softmax(-1) @ values)
    return torch.stack(outputs).view(NUM_TOKENS, -1).float()


@pytest.mark.parametrize("step", [NUM_TOKENS, 16])
def test_a_pass_attends_as_the_model_does(folder, step):
    """Its latents are raw, and all of the text's give the mean."""
    layer = make_mla_layer(make_mla_config(folder))
    shapes = [(NUM_HEADS, layer.qk_head_dim), (512,), (1, 64)]
    tensors = [
        gaussian(NUM_TOKENS, *shape, dtype=FP32, seed=i)
        for i, shape in enumerate(shapes)
    ]
    tensors[1] += 1
    text_pass = TextPass({}, NUM_TEXT, NUM_TOKENS)
    outputs = []
    with text_pass.running([layer]):
        for start in range(0, NUM_TOKENS, step):
            text_pass.begin(start)
            part = [x[start : start + step] for x in tensors]
            output = torch.empty(len(part[0]), NUM_HEADS * layer.v_head_dim)
            layer.forward_impl(*part, None, None, output=output)
            outputs.append(output)
    assert "forward_impl" not in vars(layer)
    torch.testing.assert_close(torch.cat(outputs), expected_outputs(layer, *tensors))
    means = text_pass.means[layer.layer_name]
    text = tensors[1][:NUM_TEXT]
    torch.testing.assert_close(means.rest, text.mean(0)[None])
    assert torch.equal(means.first, means.rest)
    length = text.square().sum(-1).mean().sqrt()
    torch.testing.assert_close(means.length, length[None])


def test_layers_get_the_means_of_a_pass(folder):
    """Layers whose means are of another size or not finite have none."""
    config = make_mla_config(folder)
    fine, unseen, misfit, broken = layers = [make_mla_layer(config) for _ in range(4)]
    model = nn.ModuleList(nn.Sequential(layer) for layer in layers)
    assert [layer for layer, _ in attention_layers(model).values()] == layers
    mean = gaussian(1, 512, dtype=FP32, seed=1).cpu()
    found = LayerMeans(mean, mean, 2 * mean.norm(dim=-1), torch.zeros_like(mean))
    means = {
        fine.layer_name: found,
        misfit.layer_name: LayerMeans(*(x.repeat(2, 1) for x in found)),
        broken.layer_name: found._replace(length=torch.full((1,), math.nan)),
    }
    used, without = means_tables.set_tables(model, means, 4096)
    assert used == {fine.layer_name: pytest.approx(0.5)}
    assert set(without) == {x.layer_name for x in (unseen, misfit, broken)}
    assert torch.equal(fine.impl.runner.mean.latent.cpu(), mean[0])
    assert all(x.impl.runner.mean is None for x in (unseen, misfit, broken))
