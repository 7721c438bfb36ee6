# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes a checkpoint of random weights for a configuration, in bf16.

    random_checkpoint.py benchmarks/configs/llama-8b FOLDER

Engines of vLLM's dummy weights measure no means of K, and read no files. The tokenizer
is a small one: texts have tokens, and these are a part of the model's.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = Path(__file__).resolve().parents[1] / "models/needle-llama"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="folder of a config.json")
    parser.add_argument("folder", type=Path, help="folder, made anew")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="folder")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    config = AutoConfig.from_pretrained(args.config)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.folder)


if __name__ == "__main__":
    main()
