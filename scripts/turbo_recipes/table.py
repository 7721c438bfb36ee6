# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The verdicts as JSON, and as the tables of docs/recipes.md."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from turbo_recipes.shapes import Shape

# Architectures that an engine has run with a turbo dtype, and the evidence: a test on a
# CPU, or results of an H200.
RUNS: dict[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": (
        "tests/engine/test_engine.py",
        "benchmarks/results/h200/equality.jsonl",
    ),
    "LlamaForCausalLM": (
        "tests/engine/test_windows.py",
        "benchmarks/results/h200/engine.jsonl",
    ),
    "Qwen2ForCausalLM": (
        "tests/engine/test_key_bias.py",
        "benchmarks/results/h200/quality-qwen2/quality.md",
    ),
    "Qwen3MoeForCausalLM": ("benchmarks/results/h200/equality.jsonl",),
    "Lfm2ForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/families.jsonl",
    ),
    "NemotronHForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/models.jsonl",
    ),
    "Qwen3NextForCausalLM": ("tests/engine/test_families.py",),
    "Qwen3_5MoeForCausalLM": ("benchmarks/results/h200/models.jsonl",),
    "GptOssForCausalLM": ("benchmarks/results/h200/models.jsonl",),
    "Gemma3ForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/families.jsonl",
        "benchmarks/results/h200/models.jsonl",
    ),
    "Gemma4ForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/families.jsonl",
        "benchmarks/results/h200/models.jsonl",
    ),
    "Llama4ForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/families.jsonl",
        "benchmarks/results/h200/models.jsonl",
    ),
    "MiMoV2FlashForCausalLM": (
        "tests/engine/test_families.py",
        "benchmarks/results/h200/models.jsonl",
    ),
    "DeepseekV32ForCausalLM": (
        "tests/engine/test_sparse_mla.py",
        "benchmarks/results/h200/sparse_mla.jsonl",
    ),
    "GlmMoeDsaForCausalLM": ("tests/engine/test_sparse_mla.py",),
}
# Where the engine of a path of RUNS ran, by the start of the path.
PLACES = {"tests/": "CPU", "benchmarks/results/h200/": "H200"}
# Architectures whose text part has run as a model of its own.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# A refusal's cause, by a part of its reason; the first part that is found counts.
CAUSES = {
    "MultiHeadLatentAttention": "MLA that stores by itself",
    "sinks of MLA": "MLA with sinks",
    "indexer pools": "sparse MLA with pools of tokens",
    "sliding window of MLA": "MLA with sliding windows",
    "got turbo4": "MLA of its own kind",
    "main KV cache": "sparse attention of its own kind",
    "STEP5_DSA": "sparse attention of its own kind",
    "MINIMAX_M3_SPARSE": "sparse attention of its own kind",
    "InklingAttention": "attention of its own kind",
    "DIFFKV": "K and V of different sizes",
    "encoder-only": "encoder or cross attention",
    "cross": "encoder or cross attention",
    "non-causal": "non-causal attention",
    "KV sharing": "KV sharing between layers",
    "R-SWA": "R-SWA",
    "partial multimodal": "image tokens that see each other",
}
# Keys of a refused model's verdict beside its message.
WAYS_OUT = {"flags", "instead"}
# A sentence of the page for each number of `count`; one whose number is 0 is left out.
SENTENCES = {
    "served": "**{served} of {total} recipes are accepted**: every attention layer of "
    "the model stores `turbo4`'s bytes.",
    "flagged": "{flagged} more are accepted with flags that the refusal names, which "
    "leave layers or images out.",
    "refused": "{refused} are refused when the engine starts.",
    "defects": "{defects} do something else: they crash, or start with a layer that "
    "stores other bytes.",
    "misled": "{misled} crash with a flag that the refusal names.",
}
HEADER = """<!-- SPDX-License-Identifier: Apache-2.0 -->
# The models of vLLM's recipes

{summary}

vLLM {version} ships these recipes. `scripts/recipes.py` builds each model by vLLM's own
code, without weights and without a GPU. It passes `--kv-cache-dtype turbo4` and the
arguments of the recipe's command, and plans the cache of one H200.

Accepted does not mean run. {families} kinds of model, of {ran} recipes, have run in an
engine with a turbo dtype. {texts} of these recipes have run as text alone, without
images.

The shapes are written by hand.
[`shapes.yaml`](../scripts/turbo_recipes/shapes.yaml) says where each shape is from. The
shapes of {guessed} recipes are guesses in part.

`scripts/recipes.py` writes this page and [`recipes.json`](recipes.json) in three
minutes. `scripts/recipes.py --page` writes the page again from the JSON, and builds no
model.

"""
ACCEPTED = """## Accepted

"States" are those of Mamba, gated delta nets or short convolutions: those layers keep
their own cache. "Text alone" means that no image has run on a GPU.

"""
REFUSED = """## Refused

The last column is the dtype to use instead.

"""
RUN = """## Models that have run

"""
ALL = """## All recipes

A served recipe has the number of its layers, of KV heads x head size. A refused recipe
has the message of the refusal, without the bracket that says what is supported. "Guess"
marks a shape that is a guess in part.

"""


def verdicts_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the verdict on each recipe, sorted by its name."""
    recipes = content["recipes"]
    return {name: content["shapes"][recipes[name]] for name in sorted(recipes)}


def make_content(
    shapes: Iterable[Shape], verdicts: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of the JSON."""
    entries: dict[str, dict[str, Any]] = {}
    recipes: dict[str, str] = {}
    for shape in shapes:
        entry = {
            "family": shape.family,
            "architecture": shape.architecture,
            "source": shape.source,
        }
        if shape.note:
            entry["note"] = shape.note
        entries[shape.name] = entry | verdicts[shape.name]
        recipes |= dict.fromkeys(shape.recipes, shape.name)
    return {
        "kv_cache_dtype": "turbo4",
        "shapes": entries,
        "recipes": dict(sorted(recipes.items())),
    }


def dump(content: dict[str, Any]) -> str:
    """Returns the JSON's text, with a line for each shape and for each recipe."""
    parts = []
    for name, value in content.items():
        if isinstance(value, dict):
            lines = (
                f"  {json.dumps(key)}: {json.dumps(each)}"
                for key, each in value.items()
            )
            text = "{\n" + ",\n".join(lines) + "\n }"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def flags_that_help(verdict: dict[str, Any]) -> list[str]:
    """Returns the flags with which a refused model is served, if there are any."""
    then = verdict.get("flags", {})
    return then["flags"] if then.get("outcome") == "served" else []


def find_cause(verdict: dict[str, Any]) -> str:
    """Returns the cause of a refusal, in words for a table."""
    return next(cause for part, cause in CAUSES.items() if part in verdict["reason"])


def find_way_out(verdict: dict[str, Any]) -> str:
    """Returns the flags and dtype to pass instead, as Markdown."""
    flags = flags_that_help(verdict)
    parts = ["`" + " ".join(flags) + "`"] if flags else []
    if verdict["instead"] is None:
        parts.append("`--kv-cache-dtype auto`, not tried")
    else:
        parts.append(f"`--kv-cache-dtype {verdict['instead']}`")
    return " or ".join(parts)


def runs_of(architecture: str) -> tuple[str, ...]:
    """Returns the runs of the architecture, or of its text part; () without a run."""
    return RUNS.get(TEXT_PARTS.get(architecture, architecture), ())


def count(content: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of recipes that the page's texts name."""
    verdicts = verdicts_of(content).values()
    run = [each for each in verdicts if runs_of(each["architecture"])]
    refused = [each for each in verdicts if each["outcome"] == "refused"]
    flagged = [each for each in refused if flags_that_help(each)]
    return {
        "total": len(verdicts),
        "served": sum(each["outcome"] == "served" for each in verdicts),
        "defects": sum(each["outcome"] == "defect" for each in verdicts),
        "misled": sum(
            each.get("flags", {}).get("outcome") == "defect" for each in verdicts
        ),
        "hybrids": sum(each.get("kind") == "hybrid" for each in verdicts),
        "flagged": len(flagged),
        "refused": len(refused) - len(flagged),
        "families": len({each["architecture"] for each in run}),
        "ran": len(run),
        "texts": sum(each["architecture"] in TEXT_PARTS for each in run),
        "guessed": sum("guess" in each["source"] for each in verdicts),
    }


def _rows(rows: Iterable[Iterable[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _where(architecture: str) -> str:
    """Returns a cell: the places where engines have run the architecture."""
    paths = runs_of(architecture)
    found = [
        place
        for start, place in PLACES.items()
        if any(path.startswith(start) for path in paths)
    ]
    text = ", text alone" if architecture in TEXT_PARTS else ""
    return " and ".join(found) + text if found else "no"


def _mla(verdict: dict[str, Any]) -> str:
    """Returns the kind of an accepted model's MLA; empty if it has none."""
    if not verdict.get("mla"):
        return ""
    return "sparse MLA" if verdict.get("sparse") else "MLA"


def _layers(verdict: dict[str, Any]) -> str:
    """Returns a cell: the kinds of an accepted model's layers."""
    kind = _mla(verdict) or "attention"
    return f"{kind} and states" if verdict["kind"] == "hybrid" else kind


def accepted_table(content: dict[str, Any]) -> str:
    """Returns the accepted families: a row for each kind of layers and of runs."""
    groups = Counter(
        (verdict["family"], _layers(verdict), _where(verdict["architecture"]))
        for verdict in verdicts_of(content).values()
        if verdict["outcome"] == "served"
    )
    rows = [("family", "layers", "recipes", "has run on"), ("---",) * 4]
    for group in sorted(groups, key=lambda group: (group[0].lower(), *group)):
        family, layers, run = group
        rows.append((family, layers, str(groups[group]), run))
    return _rows(rows)


def refused_table(content: dict[str, Any]) -> str:
    """Returns the refused families, by the cause and by the flags to pass instead."""
    groups: dict[tuple[str, str], list[str]] = {}
    numbers: dict[tuple[str, str], int] = {}
    for verdict in verdicts_of(content).values():
        if verdict["outcome"] == "refused":
            cause = find_cause(verdict), find_way_out(verdict)
            families = groups.setdefault(cause, [])
            if verdict["family"] not in families:
                families.append(verdict["family"])
            numbers[cause] = numbers.get(cause, 0) + 1
    rows = [("refused for", "recipes", "families", "instead"), ("---",) * 4]
    for cause in sorted(groups, key=lambda cause: (-numbers[cause], cause)):
        names = ", ".join(sorted(groups[cause], key=str.lower))
        rows.append((cause[0], str(numbers[cause]), names, cause[1]))
    return _rows(rows)


def run_table() -> str:
    """Returns the architectures that an engine has run, with the tests and results."""
    rows = [("model class", *PLACES.values()), ("---",) * (1 + len(PLACES))]
    for architecture, paths in RUNS.items():
        links = (
            ", ".join(
                f"[{path.split('/')[-1]}](../{path})"
                for path in paths
                if path.startswith(start)
            )
            for start in PLACES
        )
        rows.append((f"`{architecture}`", *links))
    return _rows(rows)


def _what(verdict: dict[str, Any]) -> str:
    """Returns a cell: the packed layers, or the message."""
    if verdict["outcome"] == "served":
        layers = " + ".join(
            f"{number} layers of {heads} x {size}"
            for number, heads, size in verdict["layers"]
        )
        if mla := _mla(verdict):
            layers += f" ({mla})"
        if verdict["kind"] == "hybrid":
            layers += f", blocks of {verdict['block_size']}"
        return layers
    if verdict["outcome"] == "refused":
        then = verdict.get("flags", {})
        more = ""
        if then.get("outcome") == "refused":
            more = f"; with the flag, `{_short(then['reason'])}`"
        elif then and not flags_that_help(verdict):
            more = f"; with the flag, **{then['outcome']}**: `{then['message']}`"
        return f"`{_short(verdict['reason'])}`{more}"
    return f"**{verdict['outcome']}**: {verdict['message']}"


def _short(reason: str) -> str:
    """Returns a refusal's reason without its brackets that list supported values."""
    return re.sub(r" \(supported: [^()]*\)", "", reason)


def _accepted(verdict: dict[str, Any]) -> str:
    """Returns a cell: whether a recipe is accepted, or the flags to pass instead."""
    if verdict["outcome"] == "served":
        return "yes"
    if verdict["outcome"] != "refused":
        return "no"
    answer = "with flags" if flags_that_help(verdict) else "no"
    return f"{answer}: {find_way_out(verdict)}"


def _summary(content: dict[str, Any]) -> str:
    """Returns the numbers of recipes in sentences, without those whose number is 0."""
    numbers = count(content)
    sentences = (SENTENCES[key].format(**numbers) for key in SENTENCES if numbers[key])
    return textwrap.fill(
        " ".join(sentences), 88, break_on_hyphens=False, break_long_words=False
    )


def page(content: dict[str, Any], version: str) -> str:
    """Returns the content of ``docs/recipes.md``."""
    text = HEADER.format(version=version, summary=_summary(content), **count(content))
    text += ACCEPTED + accepted_table(content) + "\n"
    text += REFUSED + refused_table(content) + "\n"
    text += RUN + run_table() + "\n" + ALL
    rows = [("recipe", "model class", "accepted", "layers, or why not")]
    rows.append(("---",) * 4)
    for name, verdict in verdicts_of(content).items():
        guess = " (guess)" if "guess" in verdict["source"] else ""
        cells = (_accepted(verdict), _what(verdict) + guess)
        rows.append((name, f"`{verdict['architecture']}`", *cells))
    return text + _rows(rows)
