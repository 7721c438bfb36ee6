# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The file that keeps a checkpoint's means of K, beside vLLM's other caches.

GPUs differ in their roundings, and with them the means and the bytes of pages. So the
first engine writes the means, and later ones read them.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
)
from vllm.transformers_utils.repo_utils import hf_api
from vllm.v1.attention.ops.turbo.keys.means import VERSION, LayerMeans, Means

logger = init_logger(__name__)

FOLDER = "turbo_means"
# Files that hold weights. The first pattern that finds some is taken.
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
# Bytes of a checkpoint that its checksum reads: so many pieces, evenly spread. A piece
# lies in each 16 MiB of 16 GiB.
NUM_PIECES, PIECE_BYTES = 1024, 4096
# The bytes at the start of a safetensors file that say how long its header is.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20


def weight_files(vllm_config: VllmConfig) -> list[Path]:
    """The local files of an engine's weights, in order; none if they are not known."""
    model = vllm_config.model_config.model
    if os.path.isfile(model):
        return [Path(model)]
    if not os.path.isdir(model):
        try:
            model = hf_api().snapshot_download(
                model,
                revision=vllm_config.model_config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        except (OSError, ValueError):
            return []
    for pattern in PATTERNS:
        found = sorted(map(str, Path(model).glob(pattern)))
        if pattern == PATTERNS[0]:
            found = filter_duplicate_safetensors_files(
                found, model, SAFE_WEIGHTS_INDEX_NAME
            )
        if found:
            return [Path(name) for name in sorted(found)]
    return []


def checksum(files: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits that identify a checkpoint, by a sample of its bytes.

    All names and shapes of safetensors count, and all bytes of a small checkpoint. The
    names of files and folders do not.

    Args:
        files: The files of the weights, in order.

    Raises:
        OSError: If a file cannot be read.

    """
    sizes = [(path, path.stat().st_size) for path in files]
    stride = max(PIECE_BYTES, sum(size for _, size in sizes) // NUM_PIECES)
    found = hashlib.sha256()
    for path, size in sizes:
        found.update(f"{size};".encode())
        with open(path, "rb") as file:
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                found.update(file.read(min(length, MAX_HEADER_BYTES)))
            for start in range(0, size, stride):
                file.seek(start)
                found.update(file.read(PIECE_BYTES))
    return found.hexdigest()[:16]


def means_path(key: str) -> Path:
    """The file of the checkpoint with this checksum."""
    name = f"{key}-{VERSION}.safetensors"
    return Path(envs.VLLM_CACHE_ROOT) / FOLDER / name


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {list(tensor.shape)};".encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def read_means(path: Path, key: str) -> Means | None:
    """The means in a file; None if there is no file, or none that is of use.

    A file that is damaged or of other weights is warned of.

    Args:
        path: The file.
        key: The checksum of the engine's checkpoint.

    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            told = file.metadata() or {}
        if told.get("checkpoint") != key or told.get("version") != str(VERSION):
            problem = "it is of other weights"
        elif told.get("digest") != _digest(tensors):
            problem = "its bytes have changed"
        else:
            return {
                name: LayerMeans(*(tensors[f"{name}.{x}"] for x in LayerMeans._fields))
                for name in json.loads(told["layers"])
            }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    logger.warning(
        "Turbo KV cache: the means of K are measured again, because %s cannot be "
        "used: %s.",
        path,
        problem,
    )
    return None


def write_means(path: Path, key: str, means: Means) -> Means:
    """Write means to a file that other engines read, and return those that count.

    Another engine may have written the file meanwhile. Then its means count.

    Args:
        path: The file, which is missing or of no use.
        key: The checksum of the engine's checkpoint.
        means: The means of all layers and heads.

    """
    tensors = {
        f"{name}.{part}": tensor.contiguous()
        for name, layer in means.items()
        for part, tensor in layer._asdict().items()
    }
    told = {
        "checkpoint": key,
        "version": str(VERSION),
        "digest": _digest(tensors),
        "layers": json.dumps(list(means)),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        os.chmod(part, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(save(tensors, told))
        other = read_means(path, key)
        if other is not None:
            os.unlink(part)
            return other
        os.replace(part, path)
    except OSError as error:
        logger.warning(
            "Turbo KV cache: the means of K are measured at each start, because %s "
            "cannot be written: %s.",
            path,
            error,
        )
    return means
