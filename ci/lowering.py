# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton's IR of kernels for an NVIDIA GPU, on machines without one.

Triton's interpreter takes what its compiler refuses, such as a variable whose type
changes in a loop.
"""

from collections.abc import Mapping
from typing import Any

from triton import backends
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend


def pretend_to_have_a_gpu() -> None:
    """Lets vLLM's modules choose what they choose on an NVIDIA GPU.

    vLLM uses Triton only if exactly one driver is there, and asks the platform.
    """
    for name, backend in backends.backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    from vllm.platforms import current_platform

    type(current_platform).is_cuda = lambda self: True


def source_of(
    kernel: Any, constants: Mapping[str, Any], types: Mapping[str, Any]
) -> ASTSource:
    """Returns a kernel with its arguments.

    Args:
        kernel: A function with `triton.jit`.
        constants: Values of arguments that the compiler knows.
        types: Types of other arguments, as Triton names them, or tuples of types; i32
            where one is missing.

    """
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, places, {})


def lower(source: ASTSource, options: Mapping[str, Any]) -> None:
    """Makes Triton's IR of a kernel."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    functions = backend.get_codegen_implementation(parsed)
    source.make_ir(target, parsed, functions, backend.get_module_map(), context)
