# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The effect of MLA's cache formats on a model's predictions, by the same arithmetic.

Writes latents.json and latents.md. The model has bf16's weights, and runs in fp32 on
whole texts. Every token's latent and rotary key are rounded to bf16, as a model in bf16
hands them to a cache, and then to the format's numbers. All tokens are read so, a
token's own as well, as in decoding: formats differ in that rounding and in nothing
else. A sparse model's indexers list tokens from hidden states as that rounding leaves
them, and keep a cache of their own.

Predictions are compared with those on bf16: on held-out text, on the first digit of an
answer that weighs eight far codes, and by whether greedy decoding would answer
retrieval tasks (the cases that benchmarks/quality.py puts through the engine).
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from latent_formats import LatentVariant, latent_variants, rope_variants
from measure import Comparison
from report import kl_cell, setting, table, write_results

QUALITY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(QUALITY.parents[1] / "scripts"), str(QUALITY)]

from evaluate import answered_tokens, logits_of  # noqa: E402
from indexer import (  # noqa: E402
    DeepseekV32ForCausalLM,
    listed_attention,
    no_mask,
)
from tasks import RIVALS  # noqa: E402
from turbo_quality.cases import HELD_OUT, Cases, Plan, build_cases  # noqa: E402
from turbo_quality.metrics import score_tasks  # noqa: E402
from turbo_quality.report import ratio_bar, ratio_error  # noqa: E402

NAME = "latent_lab"
MODEL = QUALITY.parents[1] / "models" / "needle-deepseek-v3"
REFERENCE = "bf16"
OURS = "turbo4"
RIVAL_FORMATS = ("nvfp4_ds_mla", "nvfp4_ds_mla, rotated")
# The bound of turbo4's KL, as a share of the better of those.
KL_LIMIT = 0.65
KINDS = ("needle", "multi_needle", "key_value")
FULL = Plan(
    texts=30,
    context=8000,
    decode_steps=0,
    continuation_steps=0,
    lengths=(512, 1024, 2048, 4096, 8192),
    depths=(0.0, 0.25, 0.5, 0.75, 1.0),
    cases=20,
    rivals=20,
)
# The plan that two cores finish in a few minutes.
QUICK = Plan(
    texts=2,
    context=1024,
    decode_steps=0,
    continuation_steps=0,
    lengths=(512,),
    depths=(0.0, 0.5, 1.0),
    cases=1,
    rivals=4,
)
# The first of so many equal parts of a text is not counted: contexts there are short.
UNCOUNTED = 8


class LatentLab:
    """An MLA model in fp32 with a replaceable cache.

    Attributes:
        model: The model.
        variant: The format of the cache.
        sums: The sums of squared errors and of squares of all that was stored, (2,), by
            the name of a variant and "latent" or "rope".

    """

    def __init__(self, folder: Path, device: str) -> None:
        # Another lab has another cache.
        name = f"{NAME}_{id(self)}"
        transformers.AttentionInterface.register(name, self._attend)
        # No mask of (T, T) is ever built.
        transformers.AttentionMaskInterface.register(name, no_mask)
        config = transformers.AutoConfig.from_pretrained(folder)
        is_sparse = config.model_type == "deepseek_v32"
        kind = (
            DeepseekV32ForCausalLM if is_sparse else transformers.AutoModelForCausalLM
        )
        self.model = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
        self.model.to(device).eval()
        # transformers' DeepSeek V3.2 interleaves without saying so.
        self.interleaves = is_sparse or config.rope_interleave
        self.rank, self.rope = config.kv_lora_rank, config.qk_rope_head_dim
        for layer in self.model.model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(self._round_latent)
        self.variant = latent_variants(self.rank, self.rope)[REFERENCE]
        self.sums: dict[tuple[str, str], torch.Tensor] = {}

    def _store(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """Rounds latents or rotary keys, as `part` says."""
        exact = x.bfloat16().float()
        stored = getattr(self.variant, part)(exact)
        squares = [y.double().square().sum() for y in (stored - exact, exact)]
        key = self.variant.name, part
        self.sums[key] = self.sums.get(key, 0) + torch.stack(squares)
        return stored

    def _round_latent(
        self, module: torch.nn.Module, arguments: tuple, latent: torch.Tensor
    ) -> torch.Tensor:
        return self._store("latent", latent)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float,
        indices: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention of one layer; K's heads share their last coordinates."""
        nope, rope = key.split([key.shape[-1] - self.rope, self.rope], -1)
        # All heads have the first one's rotary keys.
        stored = self._round_rope(rope[:, :1])
        key = torch.cat([nope, stored.expand_as(rope)], -1)
        return listed_attention(
            module, query, key, value, attention_mask, scaling, indices
        )

    def _round_rope(self, rope: torch.Tensor) -> torch.Tensor:
        """Rounds rotary keys in the order of coordinates in which vLLM stores them.

        Where pairs are neighbours in the weights, transformers puts their first halves
        before their second ones.
        """
        if not self.interleaves:
            return self._store("rope", rope)
        return split_pairs(self._store("rope", join_pairs(rope)))

    @torch.inference_mode()
    def log_probs(self, tokens: torch.Tensor, variant: LatentVariant) -> torch.Tensor:
        """Log-probabilities of the next token, (batch, T, vocabulary) fp32."""
        self.variant = variant
        return torch.log_softmax(logits_of(self.model, tokens), -1)

    def errors(self, variant: LatentVariant) -> dict[str, float]:
        """Squared error over squared length of latents and of rotary keys, so far."""
        found = {}
        for part in ("latent", "rope"):
            error, size = self.sums[variant.name, part].tolist()
            found[part] = error / size
        return found

    def answers(self, tasks: Sequence[dict], variant: LatentVariant) -> list[list[int]]:
        """Each task's answer if greedy decoding would give it, else nothing."""
        self.variant = variant
        both = [(task["prompt"], task["answer"]) for task in tasks]
        right = answered_tokens(self.model, both)
        return [answer if yes else [] for (_, answer), yes in zip(both, right)]


def join_pairs(x: torch.Tensor) -> torch.Tensor:
    """(x0, x2, ..., x1, x3, ...) to (x0, x1, x2, x3, ...)."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


def split_pairs(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `join_pairs`."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def compare_all(
    lab: LatentLab,
    rows: Iterable[Sequence[int]],
    variants: Iterable[LatentVariant],
    positions: slice,
) -> dict[str, dict[str, Any]]:
    """Each variant's figures (`Comparison.figures`) and `kl_texts`, by its name."""
    reference = latent_variants(lab.rank, lab.rope)[REFERENCE]
    comparisons = {variant: Comparison() for variant in variants}
    for row in rows:
        tokens = torch.tensor([row], device=lab.model.device)
        exact = lab.log_probs(tokens, reference)[:, positions]
        for variant, comparison in comparisons.items():
            other = lab.log_probs(tokens, variant)[:, positions]
            comparison.add(exact, other, tokens[:, positions])
    return {
        variant.name: comparison.figures(slice(None))
        | {"kl_texts": torch.cat(comparison.divergences).mean(-1).tolist()}
        for variant, comparison in comparisons.items()
    }


def measure(
    lab: LatentLab, cases: Cases, variants: Sequence[LatentVariant]
) -> list[dict[str, Any]]:
    """All figures of each variant, the reference among them."""
    first = cases.plan.context // UNCOUNTED
    texts = compare_all(lab, cases.texts, variants, slice(first, None))
    # The last token is the answer's first digit: the prediction before it counts.
    prompts = [tokens[:-1] for tokens in cases.rivals]
    rivals = compare_all(lab, prompts, variants, slice(-1, None))
    rows = []
    for variant in variants:
        started = time.monotonic()
        answers = lab.answers(cases.tasks, variant)
        seconds = time.monotonic() - started
        print(f"{variant.name}: tasks in {seconds:.1f} s", file=sys.stderr, flush=True)
        rows.append(
            {
                "cache": variant.name,
                "bytes": variant.num_bytes,
                "errors": lab.errors(variant),
                "text": texts[variant.name],
                "rivals": rivals[variant.name],
                "tasks": score_tasks(cases.tasks, answers),
            }
        )
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`ratio_bar` of each bar whose formats were measured."""
    ran = {row["cache"]: row for row in rows}
    if not {REFERENCE, OURS, *RIVAL_FORMATS} <= ran.keys():
        return []
    found = []
    for part in ("text", "rivals"):
        own = ran[OURS][part]
        best = min(RIVAL_FORMATS, key=lambda name: ran[name][part]["kl"])
        other = ran[best][part]
        text = f"KL of {part}, {OURS} over {best}"
        stderr = ratio_error(own["kl_texts"], other["kl_texts"])
        found.append(ratio_bar(text, own["kl"], other["kl"], KL_LIMIT, stderr))
    score, ours = (ran[name]["tasks"]["needle"]["score"] for name in (REFERENCE, OURS))
    text = f"needles that {OURS} misses beyond {REFERENCE}"
    return [*found, ratio_bar(text, score - ours, score or 1.0, 0.0)]


def cells(row: dict[str, Any]) -> list[str]:
    text, rivals, tasks = row["text"], row["rivals"], row["tasks"]
    return [
        row["cache"],
        f"{row['bytes']:.4g}",
        *(f"{row['errors'][part]:.1e}" for part in ("latent", "rope")),
        kl_cell(text),
        f"{1e3 * text['kl_p99']:.3g}",
        f"{100 * text['perplexity']:+.3f} %",
        f"{100 * text['agreement']:.2f} %",
        kl_cell(rivals),
        f"{100 * rivals['agreement']:.0f} %",
        *(f"{100 * tasks[kind]['score']:.1f} %" for kind in KINDS),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    described, rows = results["setting"], results["rows"]
    plan = described["plan"]
    counted = plan["context"] - plan["context"] // UNCOUNTED
    tasks = {kind: rows[0]["tasks"][kind]["cases"] for kind in KINDS}
    head = ["cache", "bytes", "error of latents", "of rotary keys", "KL of text"]
    head += ["99 %", "perplexity", "same top token", "KL of rivals", "same digit"]
    head += ["needle", "multi", "key-value"]
    lines = [
        "# The effect of latents' formats on a model's predictions",
        "",
        f"{described['model']} in fp32 on {described['device']}, PyTorch "
        f"{described['torch']}. KL in millinats a token from the same model on a cache "
        "in bf16, with the standard error of the mean: of the last "
        f"{counted} positions of {plan['texts']} texts of {plan['context']} bytes, and "
        f"of the first digit of an answer that weighs {RIVALS} far codes, "
        f"{plan['rivals'] * len(plan['lengths'])} texts. "
        + ", ".join(f"{count} {kind}" for kind, count in tasks.items())
        + " tasks. Everything is read from the cache; bytes of a token and layer; "
        "squared errors over squared lengths of all that was stored. Written by "
        "`tests/quality/lab/latents.py`.",
        "",
        *table([head, *map(cells, rows)]),
    ]
    if results["bars"]:
        bar_rows = [["bar", "measured", "at most", "held"]]
        for bar in results["bars"]:
            spread = f" ± {bar['stderr']:.3f}" if bar["stderr"] else ""
            held = "yes" if bar["held"] else "**no**"
            ratio = f"{bar['ratio']:.3f}{spread}"
            bar_rows.append([bar["bar"], ratio, f"{bar['limit']:.2f}", held])
        lines += ["", *table(bar_rows)]
    return "\n".join(lines) + "\n"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="its folder")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="held-out text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="for a CPU: minutes")
    parser.add_argument("--texts", type=int, help="stretches of held-out text")
    parser.add_argument("--context", type=int, help="bytes of each")
    parser.add_argument("--cases", type=int, help="tasks a length and depth")
    parser.add_argument("--rivals", type=int, help="texts with eight codes a length")
    parser.add_argument("--caches", nargs="+", help="formats, or all; bf16 is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    given = {name: getattr(args, name) for name in ("texts", "cases", "rivals")}
    plan = (QUICK if args.quick else FULL).changed(**given, context=args.context)
    lab = LatentLab(args.model, args.device)
    formats = latent_variants(lab.rank, lab.rope) | rope_variants(lab.rank, lab.rope)
    wanted = {REFERENCE, *(args.caches or formats)}
    if unknown := wanted - formats.keys():
        parser.error(f"no formats {sorted(unknown)}; there are {list(formats)}")
    cases = build_cases(args.text, plan, args.seed, args.model)
    variants = [each for name, each in formats.items() if name in wanted]
    rows = measure(lab, cases, variants)
    more = {"transformers": transformers.__version__, "seed": args.seed}
    described = setting(args) | more | {"plan": plan.as_dict()}
    results = {"setting": described, "rows": rows, "bars": bars(rows)}
    write_results(args.output, "latents", results, markdown(results))


if __name__ == "__main__":
    main()
