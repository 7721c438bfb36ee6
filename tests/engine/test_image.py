# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The image: its Dockerfile's commands, run in a copy of vLLM as wheels install it."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import image
import pytest
import regex as re
import tomllib
import yaml
from harness import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
# A stand-in for nvcc, which writes a file a library: their content is tested elsewhere.
COMPILER = """#!/bin/sh
[ "$1" != --version ] || { echo "Cuda compilation tools, release 13.0, V1"; exit; }
for argument; do
  case $argument in
    -o=*) echo "$*" >"${argument#-o=}" ;;
  esac
done
"""
# Prints the modules that layers ask for, and where each is found. FlashInfer's cache is
# empty.
FIND = """
import sys, torch
from vllm.v1.attention.ops.turbo.cuda.build import module_name
from vllm.v1.attention.ops.turbo.cuda.built import find_built
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES, Demand, modules_for
from vllm.v1.attention.ops.turbo.cuda.modules import FAMILIES
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import Variant
layout = TurboFormat.from_cache_dtype("turbo4", 128)
for capability in (80, 90):
    variant = Variant(key_offset=True, tail=True, query_direction=True)
    demand = Demand(4, 5, 48, capability, variant)
    for module in modules_for(FAMILIES, layout, demand, torch.device("cuda")):
        name = module_name(module.make(ARCHITECTURES[capability]), str(capability))
        print(module.name, find_built(name))
"""
# Prints settings that vLLM reads from the words after `vllm serve`. Some options'
# defaults ask for the device.
PARSE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", *sys.argv[1:]])
print(json.dumps([args.kv_cache_dtype, args.attention_config.turbo_kernel]))
"""


def run_lines() -> list[str]:
    """The Dockerfile's RUN instructions."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return re.findall(r"^RUN (?:--mount\S* )?(.*)$", text, re.MULTILINE)


def context(folder: Path) -> Path:
    """Copies the part of the project that a build gets, and returns its folder."""
    ignored = DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for name in ignored[2:]:
        source, target = ROOT / name[1:], folder / name[1:]
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(source, target)
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """VLLM as its wheel installs it, in a folder of its own."""
    site = Path(str(metadata.distribution("vllm").locate_file("")))
    info = next(site.glob("vllm-*.dist-info")).name
    target = tmp_path / "site-packages"
    target.mkdir()
    for name in ("vllm", info, ".turbo-series"):
        # Files are replaced, and never written to, when the series is applied.
        shutil.copytree(site / name, target / name, copy_function=os.link)
    revert = [ROOT / "scripts" / "revert.sh", target]
    subprocess.run(revert, check=True, capture_output=True)
    assert not (target / "vllm/v1/attention/ops/turbo").exists()
    return target


def test_the_image_finds_what_it_was_built_with(installed: Path, tmp_path: Path):
    """Its steps, without git's, leave the kernels of all layers where engines look."""
    apply, build = run_lines()
    apply = next(part for part in apply.split("&&") if "apply.sh" in part)
    apply = apply.replace("/turbo/", f"{context(tmp_path / 'turbo')}/")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvcc").write_text(COMPILER)
    (programs / "nvcc").chmod(0o755)
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(installed), "HOME": str(tmp_path)}
    tools = {**env, "PATH": f"{programs}:{env['PATH']}", "ARCHITECTURES": "8.0 9.0"}
    tools["KERNELS"] = "--kv-cache-dtype turbo4 --head-size 128"
    for command in (apply, build):
        done = subprocess.run(
            ["sh", "-c", command], env=tools, cwd=tmp_path, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    folder = installed / "vllm/v1/attention/ops/turbo/cuda/prebuilt"
    count = len(json.loads((folder / "manifest.json").read_text())["libraries"])
    assert count == len(list(folder.glob("*.so"))) > 30
    command = [sys.executable, "-c", FIND]
    bare = env | {"PATH": "", "CUDA_HOME": "/nowhere"}
    found = subprocess.check_output(command, env=bare, cwd=tmp_path, text=True)
    lines = found.splitlines()
    assert len(lines) == 9 + 11  # 8.0's modules, and 9.0's, which has other extends.
    assert all(str(folder) in line for line in lines)


def test_a_copy_has_an_archives_kernels(tmp_path: Path):
    """The engine of `ci/gpu.py image` starts from such a copy."""
    nvcc, archive, site = (tmp_path / name for name in ("nvcc", "k.tar.xz", "site"))
    nvcc.write_text(COMPILER)
    nvcc.chmod(0o755)
    options = ["--arch", "9.0", *image.KERNELS, "--output", str(tmp_path / "built")]
    subprocess.run(
        [sys.executable, "-m", image.BUILD, *options, "--archive", str(archive)],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    image.copy_vllm(site)
    image.add_kernels(archive, "9.0", str(site), site)
    bare = os.environ | {"PYTHONPATH": str(site), "PATH": "", "CUDA_HOME": "/nowhere"}
    command = [sys.executable, "-c", FIND]
    found = subprocess.check_output(command, env=bare, cwd=tmp_path, text=True)
    of_hopper = [line for line in found.splitlines() if "sm90" in line]
    folder = str(site / "vllm/v1/attention/ops/turbo/cuda/prebuilt")
    assert len(of_hopper) == 11 and all(folder in line for line in of_hopper)


def test_the_image_is_of_the_vllm_that_the_series_is_for():
    version = tomllib.loads((ROOT / "UPSTREAM.toml").read_text())["project"]["version"]
    (named,) = re.findall(r"^ARG VLLM_VERSION=(.*)$", DOCKERFILE.read_text(), re.M)
    assert named == version


def test_what_compose_builds_and_runs():
    """The Dockerfile has the build's arguments, and vLLM knows the command's."""
    path = DOCKERFILE.with_name("compose.yaml")
    service = yaml.safe_load(path.read_text())["services"]["vllm"]
    build = service["build"]
    assert (path.parent / build["context"] / build["dockerfile"]).resolve() == (
        DOCKERFILE
    )
    text = DOCKERFILE.read_text()
    assert all(f"\nARG {name}=" in text for name in build["args"])
    model, *words = service["command"]
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in words]
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE, model, *words],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(parsed.stdout.splitlines()[-1]) == ["turbo4", "cuda"]
