# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The shapes of the recipes' models, from ``shapes.yaml``, which explains them."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

SHAPES = Path(__file__).with_name("shapes.yaml")
# Lists by layer are long: `(a b) x 2 + c x 1` is [a, b, a, b, c].
_PART = r"(?:\([\w. ]+\)|[\w.]+) x \d+"
_LIST = re.compile(rf"{_PART}(?: \+ {_PART})*")
_ALL_BUT = re.compile(r"all but every (\d+) of (\d+)")


@dataclass(frozen=True)
class Shape:
    """A model's configuration for vLLM, and the recipes that have it.

    Attributes:
        name: The shape's name.
        family: The common name of models like this.
        source: Where the numbers come from.
        config: The content of config.json.
        recipes: Hugging Face ids, as the recipes' files are named.
        args: Arguments of ``EngineArgs`` in the recipe's own command.
        files: Content of other JSON files of the checkpoint, by name.
        tokens: Special tokens that the model looks up while it is built.
        audio: Settings of sound in the checkpoint's tekken.json, if the model reads it.
        stand_in: Whether the checkpoint brings the class of its config.
        note: The parts that are not built as in the checkpoint.

    """

    name: str
    family: str
    source: str
    config: dict[str, Any]
    recipes: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    audio: dict[str, Any] = field(default_factory=dict)
    stand_in: bool = False
    note: str = ""

    @cached_property
    def architecture(self) -> str:
        """The model's class, by its name in checkpoints."""
        return self.config["architectures"][0]

    @cached_property
    def num_layers(self) -> int:
        """Layers of the language model; 0 if the config leaves them to its class."""
        text = self.config.get("text_config", self.config)
        return text.get("num_hidden_layers", 0)


def _word(text: str) -> Any:
    if text == "null":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def expand(value: Any) -> Any:
    """Returns the value, with lists in place of their short forms."""
    if isinstance(value, dict):
        return {name: expand(each) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if found := _ALL_BUT.fullmatch(value):
        step, count = map(int, found.groups())
        return [index for index in range(count) if (index + 1) % step]
    if not _LIST.fullmatch(value):
        return value
    items: list[Any] = []
    for part in value.split(" + "):
        words, times = part.rsplit(" x ", 1)
        items += [_word(word) for word in words.strip("()").split()] * int(times)
    return items


def merge(base: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with the values of ``own``, at any depth."""
    merged = dict(base)
    for name, value in own.items():
        before = merged.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        merged[name] = merge(before, value) if both else value
    return merged


def load_shapes(path: Path = SHAPES) -> list[Shape]:
    """Returns all shapes, in the file's order.

    Raises:
        ValueError: If a recipe has several shapes.

    """
    raw = yaml.safe_load(path.read_text())

    def resolve(name: str) -> dict[str, Any]:
        own = dict(raw[name])
        like = own.pop("like", None)
        if like is None:
            return own
        base = resolve(like)
        base.pop("note", None)
        return merge(base, own)

    shapes = []
    seen: dict[str, str] = {}
    for name in raw:
        fields = expand(resolve(name))
        fields["recipes"] = tuple(raw[name]["recipes"])
        fields["tokens"] = tuple(fields.get("tokens", ()))
        shapes.append(Shape(name=name, **fields))
        for recipe in fields["recipes"]:
            if recipe in seen:
                raise ValueError(f"{recipe} is of {seen[recipe]} and of {name}")
            seen[recipe] = name
    return shapes
