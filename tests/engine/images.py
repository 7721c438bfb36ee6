# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small Gemma 3 that sees images, with seeded weights, and its right answers.

Tokens of an image see each other. vLLM's attention for a CPU has no such spans, so that
the right answers are those of transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from families import FAMILIES, common_config, seed_weights
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)
from turbo_seeded.model import SPECIAL_TOKENS, write_json, write_tokenizer

# Pixels of a side of an image.
SIZE = 32
TOKENS_PER_IMAGE = 16
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 4,
    "vision_use_head": False,
}
# Tokens behind the tokenizer's own, in this order. vLLM also looks for empty lines.
BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")


NUM_BYTES = 256 + len(SPECIAL_TOKENS)
ADDED = {text: NUM_BYTES + i for i, text in enumerate((BEGIN, IMAGE, END, *LINES))}
# The token of an image in a prompt, and the tokens that the model gets for it.
AN_IMAGE = ADDED[BEGIN]
LINE, TWO_LINES = ADDED["\n\n"], ADDED["\n\n\n\n"]
SEEN = [ADDED[IMAGE]] * TOKENS_PER_IMAGE
EXPANDED = [LINE, AN_IMAGE, *SEEN, ADDED[END], LINE]


def expand(prompt: list[int]) -> list[int]:
    """Returns a prompt as the model gets it. Line tokens that meet become one token."""
    tokens: list[int] = []
    for token in prompt:
        part = EXPANDED if token == AN_IMAGE else [token]
        if tokens and tokens[-1] == part[0] == LINE:
            tokens[-1] = TWO_LINES
            part = part[1:]
        tokens += part
    return tokens


def add_tokens(folder: Path) -> int:
    """Adds an image's tokens to a tokenizer, and returns its vocabulary's size."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    like = content["added_tokens"][0]
    content["added_tokens"] += [
        like | {"id": token, "content": text, "special": text not in LINES}
        for text, token in ADDED.items()
    ]
    write_json(path, content)
    return NUM_BYTES + len(ADDED)


def write_model(folder: Path, seed: int = 1) -> Path:
    """Writes the model and its processor into a folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    assert write_tokenizer(folder) == NUM_BYTES
    vocab_size = add_tokens(folder)
    family = FAMILIES["gemma3"]
    config = Gemma3Config(
        text_config=common_config(vocab_size) | family.changes,
        vision_config=TOWER,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=AN_IMAGE,
        eoi_token_index=ADDED[END],
        image_token_index=ADDED[IMAGE],
    )
    torch.manual_seed(seed)
    model = Gemma3ForConditionalGeneration(config)
    seed_weights(model, family, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    # Published checkpoints have these names of the tower's weights.
    tower, published = "vision_tower.", "vision_tower.vision_model."
    weights = {k.replace(tower, published): v for k, v in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    special = {"boi_token": BEGIN, "image_token": IMAGE, "eoi_token": END}
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=special)
    pixels = Gemma3ImageProcessor(size={"height": SIZE, "width": SIZE})
    processor = Gemma3Processor(pixels, tokenizer, image_seq_length=TOKENS_PER_IMAGE)
    processor.save_pretrained(folder)
    return folder


def write_image(path: Path, seed: int) -> str:
    """Writes an image of noise, and returns its path."""
    shape = (SIZE, SIZE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


class Reference:
    """transformers' model, in fp32 without a cache."""

    def __init__(self, folder: Path) -> None:
        self.pixels = Gemma3ImageProcessor.from_pretrained(folder)
        self.model = Gemma3ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def logprobs(
        self,
        prompt: list[int],
        images: Sequence[str],
        answer: list[int],
        causal: bool = False,
    ) -> list[list[float]]:
        """Returns the log-probabilities of all tokens at each token of an answer.

        Args:
            prompt: The prompt, with one token an image.
            images: The images' paths.
            answer: The tokens that came after the prompt.
            causal: Whether an image's tokens see only earlier tokens.

        """
        tokens = torch.tensor([expand(prompt) + answer[:-1]])
        inputs = {}
        if images:
            opened = [Image.open(image) for image in images]
            inputs = dict(self.pixels(opened, return_tensors="pt"))
            inputs.pop("num_crops")
            if not causal:
                inputs["token_type_ids"] = (tokens == ADDED[IMAGE]).long()
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, **inputs).logits[0, -len(answer) :]
        return logits.double().log_softmax(-1).tolist()
