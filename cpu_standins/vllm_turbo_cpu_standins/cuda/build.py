# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds CUDA modules for the emulated GPU with the C++ compiler, and loads them.

The compiler inserts calls of the emulator before accesses to memory, as it does for a
sanitizer: see src/hooks.cc. Modules that were built stay in a cache.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
import tvm_ffi
from filelock import FileLock

from vllm_turbo_cpu_standins.cuda.translate import translate

_HERE = Path(__file__).parent
_INCLUDE_DIR, _RUNTIME_DIR = _HERE / "include", _HERE / "src"
_PREFIX = _INCLUDE_DIR / "emulator" / "prefix.h"
# Results are exact, so only explicit multiply-adds are fused. Sources cast pointers.
_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-g1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-fno-semantic-interposition",
    "-U_FORTIFY_SOURCE",
    "-w",
)
_MODULE_FLAGS = (
    "-O1",
    "-fsanitize=thread,alignment,bounds",
    "--param=tsan-instrument-func-entry-exit=0",
)
_LINKING = ("-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined")
_INCLUDE = re.compile(r'^ *#include "(.+)"', re.MULTILINE)
_PC = re.compile(r"\[pc (0x[0-9a-f]+)\]")
# The most frames of inlined functions in a message.
_MAX_FRAMES = 6


class CannotBuildError(RuntimeError):
    """A module does not compile for the emulated GPU."""


def cache_dir() -> Path:
    """The folder of modules that were built."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm-turbo-emulator"


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _needed_compiler() -> str:
    command = compiler()
    if command is None:
        raise CannotBuildError("there is no C++ compiler: install g++, or set CXX")
    return command


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _compile(
    arguments: Sequence[str | Path], target: Path, is_made: bool = True
) -> Path:
    """Run the compiler for a target, which appears whole or not at all.

    Args:
        arguments: For the compiler.
        target: The file to make.
        is_made: Whether the compiler makes it.

    """
    command = _needed_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        done = subprocess.run(
            [command, *map(str, arguments), "-o", str(made)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CannotBuildError(f"{target.name}:\n{done.stderr}")
        if is_made:
            made.replace(target)
    return target


def _include_flags(*folders: Path) -> list[str]:
    return [
        *(f"-I{folder}" for folder in folders),
        f"-I{_INCLUDE_DIR}",
        *(f"-isystem{path}" for path in tvm_ffi.libinfo.include_paths()),
    ]


@cache
def _own_text() -> str:
    """The texts of the emulator's own sources."""
    files = sorted([*_INCLUDE_DIR.rglob("*.h"), *_RUNTIME_DIR.iterdir()])
    return "\0".join(path.read_text() for path in files)


@cache
def runtime() -> Path:
    """The emulator's library, which modules share.

    It is apart from modules because their accesses to memory are checked. The runtime
    must not share functions of the standard library with them.
    """
    folder = cache_dir() / f"runtime-{_digest([*_FLAGS, _own_text()])}"
    library = folder / "libturbo_emulator.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not library.exists():
            sources = sorted(_RUNTIME_DIR.glob("*.cc"))
            flags = [*_FLAGS, "-O2", *_LINKING, *_include_flags(_RUNTIME_DIR)]
            _compile([*flags, *sources], library)
    return library


@cache
def _prefix() -> Path:
    """A copy of the header that modules begin with, beside its compiled form.

    A compiler that did not make the compiled form takes the header itself.
    """
    parts = [*_FLAGS, *_MODULE_FLAGS, tvm_ffi.__version__, _own_text()]
    folder = cache_dir() / f"prefix-{_digest(parts)}"
    header, compiled = folder / "prefix.h", folder / "prefix.h.gch"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not compiled.exists():
            shutil.copyfile(_PREFIX, header)
            flags = [*_FLAGS, *_MODULE_FLAGS, *_include_flags(), "-x", "c++-header"]
            _compile([*flags, header], compiled)
    return header


def _with_included(source: Path, source_dir: Path) -> list[Path]:
    """A source, and the files of a folder that it includes, also indirectly."""
    found, unread = {source}, [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop().read_text()):
            path = source_dir / name
            if path.is_file() and path not in found:
                found.add(path)
                unread.append(path)
    return sorted(found)


def _expanded(path: Path) -> str:
    """A source's text with its macros expanded, because they may hold inline assembly.

    Lines keep their numbers.
    """
    text = path.read_text()
    if "#define" not in text:
        return text
    done = subprocess.run(
        [_needed_compiler(), "-E", "-undef", "-x", "c++", "-"],
        # Other directives are kept, for files that include this one.
        input=re.sub("^#(?!define)", "@#", text, flags=re.MULTILINE),
        capture_output=True,
        text=True,
        check=True,
    )
    _, *parts = re.split(r'^# (\d+) ".*\n', done.stdout, flags=re.MULTILINE)
    expanded = ""
    for line, part in zip(parts[::2], parts[1::2]):
        expanded += "\n" * (int(line) - 1 - expanded.count("\n")) + part
    return expanded.replace("@#", "#")


def translated(source: Path, source_dir: Path) -> Path:
    """A CUDA source and its includes as C++, in a folder of the cache.

    Other files beside it may have instructions that the emulator does not know.
    """
    paths = _with_included(source, source_dir)
    texts = {path: translate(_expanded(path), path) for path in paths}
    target = cache_dir() / f"sources-{_digest(texts.values())}"
    if not target.exists():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            made = Path(scratch) / "sources"
            for path, text in texts.items():
                place = made / path.relative_to(source_dir)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            try:
                made.replace(target)
            except OSError:
                if not target.exists():
                    raise
    return target


def build(
    source: Path,
    source_dir: Path,
    name: str,
    headers: dict[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Build a module, if it is not in the cache.

    Args:
        source: The file that is compiled.
        source_dir: The folder of the source and of its includes.
        name: The module's name.
        headers: Texts of further headers that it includes, by name.
        flags: Macros. Other flags are nvcc's, and are left out.

    Returns:
        The shared library.

    Raises:
        CannotBuildError: With the compiler's messages.

    """
    sources = translated(source, source_dir)
    headers = headers or {}
    macros = [flag for flag in flags if flag.startswith("-D")]
    parts = [*_FLAGS, *_MODULE_FLAGS, *macros, tvm_ffi.__version__]
    parts += [_own_text(), str(sources), source.name]
    digest = _digest([*parts, *headers, *headers.values()])
    folder = cache_dir() / f"{name}-{digest}"
    library = folder / f"{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # A process that comes second finds the library.
    with FileLock(folder / "lock"):
        if library.exists():
            return library
        for header, text in headers.items():
            (folder / header).write_text(text)
        place = sources / source.relative_to(source_dir)
        flags = [*_FLAGS, *_MODULE_FLAGS, *macros, *_include_flags(sources, folder)]
        flags += ["-include", _prefix(), "-x", "c++", "-c", place]
        module = _compile(flags, folder / f"{name}.o")
        # The sanitizers' own libraries are left out.
        linking = [*_LINKING, f"-Wl,-rpath,{runtime().parent}"]
        ffi = tvm_ffi.libinfo.find_libtvm_ffi()
        return _compile([*linking, module, runtime(), ffi], library)


def check(
    source: Path,
    source_dir: Path,
    headers: dict[str, str] | None = None,
    flags: Sequence[str] = (),
) -> None:
    """Have the compiler read a module, with its templates and static assertions.

    It makes no library. A module that was read before is not read again.

    The arguments are those of ``build``.

    Raises:
        CannotBuildError: With the compiler's messages.

    """
    sources = translated(source, source_dir)
    headers = headers or {}
    macros = [flag for flag in flags if flag.startswith("-D")]
    parts = [*_FLAGS, *macros, tvm_ffi.__version__, _own_text(), str(sources)]
    folder = cache_dir() / "checked"
    stamp = folder / _digest([*parts, source.name, *headers, *headers.values()])
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{stamp}.lock"), tempfile.TemporaryDirectory() as scratch:
        if stamp.exists():
            return
        for header, text in headers.items():
            (Path(scratch) / header).write_text(text)
        place = sources / source.relative_to(source_dir)
        arguments = [*_FLAGS, *_MODULE_FLAGS, *macros]
        arguments += _include_flags(sources, Path(scratch))
        arguments += ["-include", _prefix(), "-x", "c++", "-fsyntax-only", place]
        _compile(arguments, stamp, is_made=False)
        stamp.touch()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's memory, and its bytes, gaps included."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    strides = zip(tensor.shape, tensor.stride())
    last = sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _with_lines(message: str, library: Path) -> str:
    """A message with source lines in place of addresses in the library."""

    def lines(match: re.Match[str]) -> str:
        # The address is the one after the call.
        address = hex(int(match[1], 16) - 1)
        command = ["addr2line", "-C", "-i", "-f", "-s", "-e", str(library), address]
        try:
            output = subprocess.run(command, capture_output=True, text=True).stdout
        except OSError:
            return match[0]
        words = output.splitlines()
        frames = [
            f"\n  in {function} ({place})"
            for function, place in zip(words[::2], words[1::2])
        ]
        return "".join(frames[:_MAX_FRAMES])

    return _PC.sub(lines, message)


def load(library: Path, function: str) -> Callable[..., None]:
    """A function of a library that was built.

    Its tensors are on the CPU, and kernels may touch no others. It raises the errors of
    the host code, and RuntimeError for a kernel that makes a mistake.
    """
    import ctypes

    module = tvm_ffi.load_module(str(library))
    entry = module.get_function(function)
    handle = ctypes.CDLL(str(runtime()))
    permit, forbid_all = handle.turbo_emulator_permit, handle.turbo_emulator_forbid_all
    permit.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def call(*arguments: object) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                permit(*_extent(argument))
        try:
            entry(*arguments)
        except RuntimeError as error:
            message = _with_lines(str(error), library)
            if message == str(error):
                raise
            raise RuntimeError(message) from error
        finally:
            forbid_all()

    return call
