# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ops that torchvision's import needs where its library does not load.

The published wheel's library links CUDA's. torchvision goes on without it, but its
import describes two ops to PyTorch that the library would have defined. Models with
images need only its transforms, which are Python.
"""

from importlib.machinery import PathFinder

import torch

# Schemas as in the library. A call of such an op fails, with torchvision's message.
SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A Library removes its ops when it is collected.
_libraries: list[torch.library.Library] = []


def _loads(package_folders: list[str]) -> bool:
    """Returns whether the package's library exists and loads."""
    found = PathFinder.find_spec("_C", package_folders)
    if found is None or found.origin is None:
        return False
    try:
        torch.ops.load_library(found.origin)
    except OSError:
        return False
    return True


def define_missing(package: str = "torchvision") -> list[str]:
    """Defines the ops, if the package is installed and its library does not load.

    transformers imports torchvision wherever it is installed, and vLLM imports
    transformers before it calls any plugin of its own. So PyTorch calls this, at the
    end of its import.

    Args:
        package: Its name, which is also the namespace of its ops.

    Returns:
        The names defined by this call.

    """
    found = PathFinder.find_spec(package)
    if found is None or _loads(list(found.submodule_search_locations or ())):
        return []
    ops = getattr(torch.ops, package)
    missing = [name for name in SCHEMAS if not hasattr(ops, name)]
    if missing:
        library = torch.library.Library(package, "FRAGMENT")
        _libraries.append(library)
        for name in missing:
            library.define(name + SCHEMAS[name])
    return missing
