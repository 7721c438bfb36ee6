# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The bias that some models add to K, which can be too long to be stored well.

Rotation spreads a bias over all coordinates of a key. There it takes codebook levels
and scales away from the differences between keys. Before RoPE it is the same in every
key of a head, so the checkpoint shows how bad this is. The first and last layers of
Qwen2.5-7B have biases of several hundred.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.utils import is_weights_pre_processed
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel

logger = init_logger(__name__)

# A Euclidean norm of a KV head's bias. It makes the KL divergence of attention weights
# ten times as large as without a bias, for keys of a standard deviation of 1.
LONGEST_KEY_BIAS = 40.0
# Names that models give a norm of K, or of Q and K. It follows the bias, and bounds K.
KEY_NORMS = ("k_norm", "key_norm", "k_layernorm", "key_layernorm", "qk_norm")
CAPPED_LAYERS = (
    "Turbo KV cache: no offset is taken off K where logits have a soft cap, though the "
    "model adds a bias to it: the offset cannot be added back to scores after a tanh."
)
UNKNOWN_ROTATION = (
    "Turbo KV cache: no offset is taken off K in layers %s, though the model adds a "
    "bias to it: how %s rotates K is not known. If vLLM has the model itself, use "
    "--model-impl vllm."
)
LAGGING_POSITIONS = (
    "Turbo KV cache: images and videos of more than %d tokens in a sequence leave more "
    "than %.0f of the bias of K in layers %s, because they take fewer positions than "
    "tokens: keys after them are stored badly. For such sequences keep these layers "
    "in the model's dtype: --kv-cache-dtype-skip-layers %s"
)


def turbo_layers(model: nn.Module) -> Iterator[tuple[Attention, nn.Module]]:
    """Each attention layer of a turbo dtype, and the module that holds it."""
    for parent in model.modules():
        for layer in parent.children():
            if isinstance(layer, Attention) and is_turbo_cache_dtype(
                layer.kv_cache_dtype
            ):
                yield layer, parent


class OffsetRunner(Protocol):
    """The part of a layer's ``TurboRunner`` that concerns an offset of K."""

    context_parallel: ContextParallel | None
    key_bias: "KeyBias | None"
    key_offset_replicas: int
    scoring: Scoring

    def set_key_offset(self, offset: torch.Tensor | None) -> None:
        """Take an offset off K before it is stored."""


class _HasRunner(Protocol):
    runner: OffsetRunner


def _runner(layer: Attention) -> OffsetRunner:
    return cast(_HasRunner, layer.impl).runner


def _find_key_projection(
    layer: Attention, parent: nn.Module, is_processed: bool = False
) -> tuple[LinearBase, torch.Tensor] | None:
    """The linear layer that adds a bias to K, and the bias, as in ``find_key_bias``."""
    for name, module in parent.named_children():
        linear = getattr(module, "base_layer", module)  # below a LoRA
        bias = getattr(linear, "bias", None)
        if bias is None:
            continue
        if is_processed and isinstance(linear, LinearBase) and is_permuted(linear):
            bias = in_order_of_heads(bias)
        if isinstance(linear, QKVParallelLinear):
            start = linear.num_heads * linear.head_size
            bias = bias[start : start + linear.num_kv_heads * linear.head_size]
        elif not (isinstance(linear, LinearBase) and name == "k_proj"):
            continue
        if bias.numel() == layer.num_kv_heads * layer.head_size:
            return linear, bias.detach().view(layer.num_kv_heads, layer.head_size)
    return None


def find_key_bias(layer: Attention, parent: nn.Module) -> torch.Tensor | None:
    """The bias that a model adds to K, for this rank's KV heads.

    It is searched beside the attention layer: the K part of a ``QKVParallelLinear`` of
    any name, or a linear layer named ``k_proj``. Kernels may permute biases when they
    repack weights, so this has to be called before that.

    Args:
        layer: An attention layer.
        parent: The module that holds it.

    Returns:
        (num_kv_heads, head_size), a view of the parameter; None if there is none.

    """
    found = _find_key_projection(layer, parent)
    return found and found[1]


def is_permuted(linear: LinearBase) -> bool:
    """Whether the bias is in Marlin's own order.

    It is so after weights have been processed. Weights that are quantised while they
    are loaded, or that come processed from a cache, are so from the start.
    """
    is_processed = is_weights_pre_processed() or getattr(
        linear, "_already_called_process_weights_after_loading", False
    )
    if not is_processed or linear.quant_method is None:
        return False
    parts = vars(linear.quant_method).values()
    return any("Marlin" in type(part).__name__ for part in parts)


def in_order_of_heads(bias: torch.Tensor) -> torch.Tensor:
    """Reorder a bias, (N,), from Marlin's own order to that of a checkpoint."""
    _, order = get_scale_perms()
    if bias.numel() % len(order):
        return bias
    back = torch.tensor(order, device=bias.device).argsort()
    return bias.view(-1, len(order))[:, back].flatten()


@dataclass
class KeyBias:
    """The bias that a layer adds to K, from which an offset follows.

    Attributes:
        layer: The attention layer.
        parent: The module that holds it.
        rotary: The rotation of K, from ``key_offset.mean_rotary``; None for none.
        loaded: (num_kv_heads, head_size) fp32 on the CPU, the bias that the layer's
            offset is or would be computed from.
        is_legible: Whether the bias can be read from processed weights; None until
            weights are processed.
        was_reloaded: Whether weights were loaded since the bias was last compared.
        remainder: The offset less the part that follows from the bias, if the offset is
            the mean of K: see ``keys.means``; None if it is of the bias alone.

    """

    layer: Attention
    parent: nn.Module
    rotary: key_offset.Rotary | None
    loaded: torch.Tensor
    is_legible: bool | None = None
    was_reloaded: bool = False
    remainder: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor | None:
        """The offset, (G, num_kv_heads, head_size) fp32; None if there is none."""
        return _runner(self.layer).scoring.key_offset

    def read(self) -> torch.Tensor | None:
        """The layer's current bias, (num_kv_heads, head_size); None if not found."""
        found = _find_key_projection(self.layer, self.parent, is_processed=True)
        return found and found[1]

    def note_loading(self) -> None:
        """Note that weights were loaded and processed.

        ``loaded`` was read from the first weights. If their processed bias differs from
        it, the order of the bias is unknown, and it is not read again.
        """
        if self.is_legible is None:
            bias = self.read()
            self.is_legible = bias is not None and torch.equal(
                bias.to("cpu", torch.float32), self.loaded
            )
        else:
            self.was_reloaded = True

    def set_offset(self, bias: torch.Tensor) -> None:
        """Compute the layer's offset from a bias, at the address that kernels have.

        Args:
            bias: (num_kv_heads, head_size) fp32 on the CPU.

        """
        self.loaded = bias
        if self.table is None:
            return
        table = key_offset.mean_rotated(bias, self.rotary)
        if self.remainder is not None:
            table = table + self.remainder
        self.table.copy_(table)

    def set_means(self, table: torch.Tensor) -> None:
        """Note that the offset is the mean of K, (G, num_kv_heads, head_size)."""
        self.remainder = table - key_offset.mean_rotated(self.loaded, self.rotary)


def key_bias_norms(model: nn.Module) -> dict[str, float]:
    """The norm of the longest bias of K of any rank's KV heads, by layer name.

    Layers without a bias, with a norm of K after it, or with an offset are left out.
    """
    norms = {}
    for layer, parent in turbo_layers(model):
        bias = find_key_bias(layer, parent)
        has_offset = hasattr(layer, key_offset.BUFFER)
        if bias is not None and not is_normalised(parent) and not has_offset:
            norms[layer.layer_name] = bias.float().norm(dim=-1).max().item()
    group = get_tp_group()
    if norms and group.world_size > 1:
        longest = torch.tensor(list(norms.values()), device="cpu")
        torch.distributed.all_reduce(
            longest, torch.distributed.ReduceOp.MAX, group.cpu_group
        )
        norms = dict(zip(norms, longest.tolist()))
    return norms


def is_normalised(parent: nn.Module) -> bool:
    """Whether a module normalises K after its bias, so that it has no fixed offset."""
    return any(name in KEY_NORMS for name, _ in parent.named_children())


def set_key_offsets(model: nn.Module) -> None:
    """Set the offset of K in layers that add a bias to it: see ``keys.offset``.

    Layers with a soft cap have no offset, because it cannot be added back to scores
    after a tanh. Layers whose cache they read have none either, nor do layers whose
    rotation of K is unknown.

    Kernels read the offset at this address from now on. After later loads of weights
    it is updated between requests: see ``weight_updates``.

    Args:
        model: A model with its checkpoint's weights, not processed yet.

    Raises:
        ValueError: If ranks share the context of a layer that adds a bias.

    """
    layers = {layer.layer_name: layer for layer, _ in turbo_layers(model)}
    capped = [x for x in layers.values() if _runner(x).scoring.soft_cap is not None]
    without = {x.layer_name for x in capped}
    without |= {x.kv_sharing_target_layer_name or "" for x in capped}
    means: dict[nn.Module | None, key_offset.Rotary | None] = {None: None}
    unknown: dict[str, str] = {}
    for layer, parent in turbo_layers(model):
        if hasattr(layer, key_offset.BUFFER) or is_normalised(parent):
            continue
        found = _find_key_projection(layer, parent)
        if found is None or is_permuted(found[0]):
            continue
        bias, runner = found[1], _runner(layer)
        rotary = None
        try:
            rotary = key_offset.find_rotary(parent, model)
            if rotary is not None and rotary not in means:
                means[rotary] = key_offset.mean_rotary(rotary)
        except key_offset.UnknownRotation as error:
            if bias.any():
                unknown[layer.layer_name] = str(error)
        loaded = bias.to("cpu", torch.float32, copy=True)
        runner.key_bias = KeyBias(layer, parent, means.get(rotary), loaded)
        if not bias.any() or layer.layer_name in unknown:
            continue
        if layer.layer_name in without:
            logger.info_once(CAPPED_LAYERS)
            continue
        if runner.context_parallel is not None:
            # A rank's consecutive tokens are of several segments.
            reason = reasons.DCP_OF_KEY_OFFSETS
            raise ValueError(refusals.refusal(layer.kv_cache_dtype, [reason]))
        offset = key_offset.mean_rotated(bias, means[rotary])
        layer.register_buffer(
            key_offset.BUFFER, offset.to(bias.device), persistent=False
        )
        runner.set_key_offset(getattr(layer, key_offset.BUFFER))
        replicas = getattr(found[0], "num_kv_head_replicas", 1)
        runner.key_offset_replicas = replicas
    if unknown:
        names = ", ".join(map(layer_number, unknown))
        classes = " or ".join(sorted(set(unknown.values())))
        logger.warning_once(UNKNOWN_ROTATION, names, classes, scope="process")
    for layer in layers.values():
        target = layers.get(layer.kv_sharing_target_layer_name or "")
        if target is not None:
            _runner(layer).set_key_offset(_runner(target).scoring.key_offset)


def layer_number(layer_name: str) -> str:
    """The number of a layer for ``--kv-cache-dtype-skip-layers``.

    It is the layer's name if that has no number. The flag does not take such a name.
    """
    return next((part for part in layer_name.split(".") if part.isdigit()), layer_name)


def warn_of_long_biases(norms: dict[str, float], model: str) -> None:
    """Warn of layers whose keys a turbo dtype stores badly, and name the way out.

    Args:
        norms: The norm of the longest bias of K of a KV head, by layer name, for layers
            without an offset.
        model: The model's name.

    """
    found = {name: norm for name, norm in norms.items() if norm > LONGEST_KEY_BIAS}
    if not found or get_tensor_model_parallel_rank() != 0:
        return
    layers = list(map(layer_number, found))
    config = get_current_vllm_config_or_none()
    skipped = config.cache_config.kv_cache_dtype_skip_layers if config else []
    logger.warning_once(
        "The bias of K in layers %s of %s is up to %.0f long a head. Beyond %.0f a "
        "turbo KV cache stores keys so badly that answers suffer. Keep these layers "
        "in the model's dtype: --kv-cache-dtype-skip-layers %s",
        ", ".join(layers),
        model,
        max(found.values()),
        LONGEST_KEY_BIAS,
        " ".join([*skipped, *layers]),
        scope="process",
    )


def warn_of_key_biases(model: nn.Module) -> None:
    """Warn of a model's layers whose keys a turbo dtype stores badly.

    Args:
        model: A model with its checkpoint's weights, not processed yet.

    """
    warn_of_long_biases(key_bias_norms(model), type(model).__name__)


def warn_of_lagging_positions(biases: Iterable[KeyBias]) -> None:
    """Warn of layers whose RoPE positions may lag too far behind sequence positions.

    The offset then leaves too much of a long bias: see ``lag_until``.
    """
    config = get_current_vllm_config_or_none()
    model_config = config and config.model_config
    longest = model_config.max_model_len if model_config else 0
    lags = {}
    for bias in biases:
        if bias.table is not None and isinstance(bias.rotary, MRotaryEmbedding):
            lag = key_offset.lag_until(bias.table.cpu(), LONGEST_KEY_BIAS)
            if lag is not None and (longest <= 0 or lag < longest):
                lags[bias.layer.layer_name] = lag
    if not lags or config is None or get_tensor_model_parallel_rank() != 0:
        return
    layers = list(map(layer_number, lags))
    skipped = [*config.cache_config.kv_cache_dtype_skip_layers, *layers]
    logger.warning_once(
        LAGGING_POSITIONS,
        min(lags.values()),
        LONGEST_KEY_BIAS,
        ", ".join(layers),
        " ".join(skipped),
        scope="process",
    )
