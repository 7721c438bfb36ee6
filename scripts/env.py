# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the virtual environment that the quickstart and the tests run in.

Without a GPU it holds vLLM's published wheel, the pinned packages of
requirements/cpu.txt and our stand-ins for missing native ops (cpu_standins/).
With one it holds vLLM and its own dependencies. Each step leaves a stamp of what it
installed, so a second run does nothing.

Without a GPU the pins name every package, so nothing is resolved. Several pips install
at a time, and compile no byte code. All cores compile it afterwards. With --lazy it is
compiled at a module's first import: three modules of four are never imported.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from turbo_series.errors import SeriesError
from turbo_series.upstream import load_upstream

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STANDINS = ROOT / "cpu_standins"
STAMPS = ".turbo-env.json"
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
MAX_PIPS = 4
COMPILED = "compiled"
# A file that cannot be compiled, such as a template named .py, is no error.
COMPILE = """
import compileall, sys
compileall.compile_dir(sys.prefix, maxlevels=99, quiet=2, workers=0)
"""


class EnvError(Exception):
    """A step failed; the message says what to read."""


@dataclass(frozen=True)
class Step:
    """One part of the environment.

    Attributes:
        name: Key of its stamp.
        title: Text of its progress line.
        key: Hash of all that decides its result.
        run: Installs it.

    """

    name: str
    title: str
    key: str
    run: Callable[[], None]


def has_gpu() -> bool:
    """Whether an NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and listing.stdout.startswith("GPU ")


def digest(*parts: str | bytes | Path) -> str:
    """Returns a hash of strings and of files' contents."""
    state = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part
        state.update(data.encode() if isinstance(data, str) else data)
        state.update(b"\0")
    return state.hexdigest()


def interpreter_key() -> str:
    """Names the Python that makes the environment, also from within another one."""
    return f"{sys.base_prefix} {platform.python_version()}"


class Environment:
    """A virtual environment, its stamps and its log."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.python = folder / "bin" / "python"
        self.log = folder / "log" / "env.log"

    def steps(self, tools: list[str]) -> list[Step]:
        """Returns the environment's steps, in order."""
        upstream = load_upstream(ROOT)
        version = upstream.version
        hashes = [wheel.sha256 for wheel in upstream.wheels.values()]
        interpreter = interpreter_key()
        steps = [Step("venv", "virtual environment", interpreter, self.make_venv)]
        if self.device == "cpu":
            steps.append(self.pinned("cpu", "vLLM's dependencies, without a GPU"))
        steps.append(
            Step(
                "vllm",
                f"vLLM {version}",
                digest(interpreter, version, *hashes, self.device),
                lambda: self.install_vllm(version, hashes),
            )
        )
        if self.device == "cpu":
            sources = sorted(STANDINS.rglob("*.py")) + [STANDINS / "pyproject.toml"]
            steps.append(
                Step(
                    "standins",
                    "stand-ins for native CPU ops",
                    digest(interpreter, *sources),
                    self.install_standins,
                )
            )
        titles = {"test": "test tools", "lint": "linters", "upstream": "vLLM's tests"}
        return steps + [self.pinned(name, titles[name]) for name in tools]

    def pinned(self, name: str, title: str) -> Step:
        """Returns the step that installs requirements/<name>.txt."""
        pins = REQUIREMENTS / f"{name}.txt"
        return Step(
            name,
            f"{title} ({pins.relative_to(ROOT)})",
            digest(interpreter_key(), pins),
            lambda: self.install_pins(pins),
        )

    def make_venv(self) -> None:
        self.call(sys.executable, "-m", "venv", str(self.folder))

    def install_pins(self, pins: Path) -> None:
        """Installs a requirements file; without a GPU in parts, side by side."""
        if self.device == "gpu":
            self.pip("install", "-r", str(pins))
            return
        lines = [x for x in pins.read_text().splitlines() if x and x[0] != "#"]
        count = min(os.cpu_count() or 1, MAX_PIPS, len(lines))
        with (
            tempfile.TemporaryDirectory() as scratch,
            ThreadPoolExecutor(count) as pool,
        ):
            parts = [Path(scratch) / f"{pins.stem}-{i}.txt" for i in range(count)]
            for i, part in enumerate(parts):
                part.write_text("".join(f"{line}\n" for line in lines[i::count]))
            # The list raises a part's error.
            list(pool.map(lambda part: self.install_apart("-r", str(part)), parts))

    def install_apart(self, *args: str) -> None:
        """Installs packages without their dependencies, and compiles nothing."""
        self.pip("install", "--no-deps", "--no-compile", *args)

    def compile(self) -> None:
        self.call(str(self.python), "-c", COMPILE)

    def leave(self) -> None:
        """Compiles nothing; the step's stamp keeps later runs from it."""

    def install_vllm(self, version: str, hashes: list[str]) -> None:
        """Installs the pinned wheel, and on a GPU machine its dependencies."""
        pin = f"vllm=={version}"
        with tempfile.TemporaryDirectory() as scratch:
            pins = Path(scratch) / "vllm.txt"
            line = " ".join([pin, *(f"--hash=sha256:{h}" for h in hashes)])
            pins.write_text(f"{line}\n")
            self.install_apart(
                "--only-binary=vllm", "--require-hashes", "-r", str(pins)
            )
        if self.device == "gpu":
            self.pip("install", pin)

    def install_standins(self) -> None:
        """Installs a copy, for the build writes beside the sources."""
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / STANDINS.name
            shutil.copytree(STANDINS, copy)
            self.install_apart("--no-build-isolation", "--force-reinstall", str(copy))

    def pip(self, *args: str) -> None:
        self.call(str(self.python), "-m", "pip", *args, *PIP_OPTIONS)

    def call(self, *command: str) -> None:
        """Runs a command with its output in the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            outcome = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if outcome.returncode:
            raise EnvError(f"{command[0]} failed; read {self.log}")

    def stamps(self) -> dict[str, str]:
        try:
            return json.loads((self.folder / STAMPS).read_text())
        except (OSError, ValueError):
            return {}

    def update(self, tools: list[str], is_lazy: bool = False) -> None:
        """Runs the steps whose stamp is missing or stale."""
        steps = self.steps(tools)
        count = len(steps) + (self.device == "cpu")
        for number, step in enumerate(steps, 1):
            self.run_step(f"env [{number}/{count}]", step)
        if self.device == "cpu":
            # The stamps of all that is installed, by this run or another.
            stamps = self.stamps()
            stamps.pop(COMPILED, None)
            key = digest(json.dumps(stamps, sort_keys=True))
            title = "byte code, at its first use" if is_lazy else "byte code"
            run = self.leave if is_lazy else self.compile
            self.run_step(f"env [{count}/{count}]", Step(COMPILED, title, key, run))

    def run_step(self, number: str, step: Step) -> None:
        line = f"{number} {step.title}"
        stamps = self.stamps()
        if stamps.get(step.name) == step.key:
            print(f"{line}: up to date", flush=True)
            return
        print(f"{line} ...", flush=True)
        start = time.monotonic()
        step.run()
        stamps[step.name] = step.key
        (self.folder / STAMPS).write_text(json.dumps(stamps, indent=1) + "\n")
        print(f"{line}: {time.monotonic() - start:.0f} s", flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--venv",
        type=Path,
        default=Path(os.environ.get("VENV", ROOT / ".venv")),
        help="folder of the environment (default: $VENV, else .venv)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="device that vLLM is installed for (default: gpu if nvidia-smi lists one)",
    )
    parser.add_argument(
        "--tools",
        nargs="*",
        choices=("test", "lint", "upstream"),
        default=[],
        help="pinned tools to add",
    )
    parser.add_argument(
        "--lazy", action="store_true", help="compile no byte code ahead of its use"
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    device = args.device
    if device == "auto":
        device = "gpu" if has_gpu() else "cpu"
    try:
        Environment(args.venv.absolute(), device).update(args.tools, args.lazy)
    except (EnvError, SeriesError) as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("env: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
