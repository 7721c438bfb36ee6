# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks of `check_model.py` and `plan.py` before anything large is imported: there has
to be a vLLM with the series applied, and a model.
"""

import importlib.util
import sys
from pathlib import Path

TURBO = Path("v1", "attention", "ops", "turbo")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
)


def has_series() -> bool:
    """Whether this Python has PyTorch and a vLLM with the series applied."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or importlib.util.find_spec("torch") is None:
        return False
    # A search for the module itself would import vLLM.
    folders = vllm.submodule_search_locations or ()
    return any((Path(folder) / TURBO).is_dir() for folder in folders)


def require_series(script: str) -> None:
    """Ends the process with status 2 if this Python cannot run a script."""
    if not has_series():
        print(
            f"{script}: this Python has no vLLM with the series applied: run "
            "scripts/apply.sh, or activate the environment that has it "
            "(. .venv/bin/activate)",
            file=sys.stderr,
        )
        sys.exit(2)


def looks_like_a_folder(model: str) -> bool:
    return (
        model.startswith((".", "/", "~")) or model.count("/") > 1 or model[-1:] == "/"
    )


def check_folder(model: str) -> None:
    """Checks a model's folder. A name that the Hub may have is left to vLLM.

    Raises:
        ValueError: If the folder or its config.json is missing.

    """
    folder = Path(model)
    if not folder.is_dir() and not looks_like_a_folder(model):
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"no model in {model}: there is no config.json")


def check_tokenizer(model: str) -> None:
    """Checks that a model's folder has a tokenizer.

    Raises:
        ValueError: If no file of one is there.

    """
    folder = Path(model)
    # Mistral's tokenizer.model has a version at its end.
    if folder.is_dir() and not any(any(folder.glob(f"{name}*")) for name in TOKENIZERS):
        *names, last = TOKENIZERS
        raise ValueError(
            f"no tokenizer in {model}: there is no {', '.join(names)} or {last}"
        )
