# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton's interpreter with less overhead per operation, and the same results.

On tensors of a few thousand elements it spends most of its time on types. At each call
of a device function it wraps the whole language again. For each result it makes objects
again that depend on its shape alone. Here both are done once.

Its numbers, checks and errors are Triton's. The module is also a plugin for pytest:
`-p vllm_turbo_cpu_standins.interpreter`.
"""

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# The most constants that are kept, each of some KiB.
MAX_CONSTANTS = 4096


def patch_language_once() -> None:
    """Keeps the language as interpreted functions need it.

    Otherwise each launch and each call of a device function wraps all of it, and only
    launches restore it.
    """
    patch_lang = interpreter._patch_lang

    def visible(fn: Any) -> tuple[bool, ...]:
        modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
        return tuple(any(x is lang for x in modules) for lang in (tl, core))

    functions, languages = set(), set()

    def patch_once(fn: Any) -> Any:
        if fn not in functions:
            if visible(fn) not in languages:
                patch_lang(fn)
                languages.add(visible(fn))
            functions.add(fn)
        return interpreter._LangPatchScope()

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def patched(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, patched)

    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attr


@cache
def of_type(sizes: tuple[int, ...]) -> tuple[core.tuple, int, str]:
    """The common part of types of a shape: shape, size and the name's beginning."""
    shape = core.tuple(sizes)
    return shape, validate_block_shape(shape), f"<{shape}, "


@cache
def of_tensor(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """The common part of tensors of a shape: shape and size."""
    shape = core.tuple([core.constexpr(size) for size in sizes])
    return shape, core.constexpr(math.prod(sizes))


def share_shapes() -> None:
    """Lets types and tensors of a shape share objects that depend on it alone."""

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        sizes = tuple(
            size.value if isinstance(size, core.constexpr) else size for size in shape
        )
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, name = of_type(sizes)
        self.name = f"{name}{element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = of_tensor(sizes)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        if blocks and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_unlike


def know_dtypes() -> None:
    """Keeps NumPy's dtypes by Triton's. Otherwise each use makes a table of them."""
    get_np_dtype = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def get_known(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = get_np_dtype(dtype.scalar)
        return known[name]

    interpreter._get_np_dtype = get_known


def look_for_overflow_if_told() -> None:
    """Leaves out sums that are only for an assertion, unless it is enabled."""
    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize_if_told(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize_if_told


def know_operands() -> None:
    """Keeps the results of the check of two operands' types.

    It keeps pairs of types whose operands stay as they are. It also keeps the tensors
    that numbers become beside a type. Both depend on types and on the number alone.
    No code writes to such a tensor.
    """
    check = TritonSemantic.binary_op_type_checking_impl
    stay: set[tuple] = set()
    constants: dict[tuple, Any] = {}

    def check_unknown(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        options = (flags, *named.items())
        is_left, is_right = (isinstance(x, core.tensor) for x in (lhs, rhs))
        if is_left and is_right:
            key = (lhs.type.name, rhs.type.name, options)
            if key in stay:
                return lhs, rhs
            checked = check(self, lhs, rhs, *flags, **named)
            if checked[0] is lhs and checked[1] is rhs:
                stay.add(key)
            return checked
        if not is_left and not is_right:
            return check(self, lhs, rhs, *flags, **named)
        tensor, number = (lhs, rhs) if is_left else (rhs, lhs)
        # `repr` tells zeros of both signs apart. A NaN would not be found again.
        key = (tensor.type.name, number, repr(number), is_left, options)
        if key in constants:
            found = constants[key]
            return (tensor, found) if is_left else (found, tensor)
        checked = check(self, lhs, rhs, *flags, **named)
        if checked[not is_left] is tensor and number == number:
            if len(constants) == MAX_CONSTANTS:
                constants.clear()
            constant = checked[is_left]
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return checked

    TritonSemantic.binary_op_type_checking_impl = check_unknown


@cache
def quicken() -> None:
    """Changes Triton once, in this process."""
    patch_language_once()
    share_shapes()
    know_dtypes()
    know_operands()
    look_for_overflow_if_told()


def pytest_configure() -> None:
    quicken()
