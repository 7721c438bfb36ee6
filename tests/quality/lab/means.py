#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss that is left when the means of K and V are not stored, model by model.

Writes means.json, with all figures, and means.md. A model runs held-out text in fp32 on
K and V as the cache gives them back, and is compared with itself on exact K and V. The
mean of a layer's K is taken over positions before RoPE, without the first tokens, and
turned by RoPE to each position, or averaged over segments of positions. V's mean is one
vector. What is taken off before storing is added when it is read, so that any table is
exact but for the codes. K's bias is taken off in every arm, also where nothing else is.

    means.py --model models/needle-llama --output FOLDER
    means.py --model build/smollm2 --text manuals.txt --output FOLDER

texts.py writes texts of several kinds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from across import WEIGHTS, across, query_directions
from attention import Cache, LabModel, Reading
from key_offset_model import segment_means
from mean_arms import MAIN, SEGMENTS, Arm, arms, served
from measure import compare
from report import add_text_arguments, kl_cell, page, setting, write_results
from rotary import at_positions, rope, turn
from variants import RoundTrip, Variant, as_fp8, identity, preset
from window_rows import rotated
from windows import HELD_OUT, MODEL, SEPARATOR, Vocabulary, cut

PRESETS = ("turbo4", "k4v3", "turbo3")
# The newest tokens that are seen as they are: the newest alone, and a recent window.
WINDOWS = (1, 24)
# Tokens of random calibrations, and how many seeds each has.
RANDOM = (64, 512, 4096)
# Random tokens whose K and V at the start of a sequence are averaged.
FIRST_TOKENS = 64
SEEDS = 2


@dataclass(frozen=True)
class Means:
    """The means of all layers.

    Attributes:
        key: (H, D) a layer, of K before RoPE.
        turned: (H, D) a layer, of K after RoPE.
        value: (H, D) a layer.
        bias: (H, D) a layer, K's bias, which is a part of its mean, or zeros.
        first_key: (H, D) a layer, of K of a sequence's first token.
        first_value: (H, D) a layer, of V of a sequence's first token.
        query: (H, D) a layer, the direction of queries: see ``query_directions``.

    """

    key: list[torch.Tensor]
    turned: list[torch.Tensor]
    value: list[torch.Tensor]
    bias: list[torch.Tensor]
    first_key: list[torch.Tensor]
    first_value: list[torch.Tensor]
    query: list[torch.Tensor]


def means_of(lab: LabModel, texts: list[torch.Tensor], first: int = 16) -> Means:
    """Means over all tokens of texts, (1, T) each, but the first ones of each."""
    sums: list[list[torch.Tensor]] = []
    count = 0
    for tokens in texts:
        cache = Cache([None] * lab.num_layers, recorded=[])
        lab.log_probs(tokens, cache)
        assert cache.recorded is not None
        cos, sin = rope(lab, tokens.shape[1])
        own = [
            [
                x[0, :, first:].double().sum(1)
                for x in (turn(key, cos, -sin), key, value)
            ]
            for key, value in cache.recorded
        ]
        sums = (
            own
            if not sums
            else [[a + b for a, b in zip(*pair)] for pair in zip(sums, own)]
        )
        count += tokens.shape[1] - first
    if count <= 0:
        raise ValueError(f"texts have no tokens behind the first {first}")
    columns = zip(*[[(x / count).float() for x in layer] for layer in sums])
    key, turned, value = map(list, columns)
    biases = [layer.self_attn.k_proj.bias for layer in lab.model.model.layers]
    pairs = zip(key, biases)
    of_heads = [
        x * 0 if bias is None else bias.detach().view_as(x) for x, bias in pairs
    ]
    queries = query_directions(lab, texts[0], *rope(lab, texts[0].shape[1]))
    return Means(key, turned, value, of_heads, *first_means(lab), queries)


def first_means(lab: LabModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Means of K and V of a sequence's first token, over random tokens."""
    generator = torch.Generator().manual_seed(0)
    size = lab.model.config.vocab_size
    tokens = torch.randint(size, (FIRST_TOKENS, 1), generator=generator)
    cache = Cache([None] * lab.num_layers, recorded=[])
    lab.log_probs(tokens.to(lab.device), cache)
    assert cache.recorded is not None
    keys, values = zip(*cache.recorded)
    return [x.mean((0, 2)) for x in keys], [x.mean((0, 2)) for x in values]


def key_tables(
    arm: Arm, means: Means, cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    """The offset that is taken off each layer's K at each position, (H, T, D).

    The first tokens have K's bias alone taken off.

    Args:
        arm: The parts that are taken off.
        means: Their means.
        cos: (T, D), of all positions of each segment.
        sin: Likewise.

    """
    biases = segment_means(at_positions(means.bias, cos, sin))
    if arm.key == "none":
        return biases
    if arm.key == "constant":
        tables = [x[:, None].repeat(1, cos.shape[0], 1) for x in means.turned]
    else:
        tables = at_positions(means.key, cos, sin)
        if arm.key != "exact":
            tables = segment_means(tables, int(arm.key))
    for table, bias in zip(tables, biases):
        table.lerp_(bias, 1 - arm.share)
        table[:, : arm.first] = bias[:, : arm.first]
    if "K" in arm.own_first:
        for table, own in zip(tables, means.first_key):
            table[:, 0] = own
    return tables


def layer_cache(
    own: Variant, arm: Arm, value_mean: torch.Tensor, first_value: torch.Tensor
) -> Variant:
    """A layer's cache: what is taken off V, and the tokens that are not rounded.

    Args:
        own: The cache dtype, which takes a mean off K.
        arm: The parts that are taken off, and the tokens that are kept apart.
        value_mean: (H, D).
        first_value: (H, D), V's mean of the first token.

    """
    keep = identity if arm.kept_bits == 32 else rotated

    def behind_first(round_trip: RoundTrip, side: str) -> RoundTrip:
        def rounded(x: torch.Tensor) -> torch.Tensor:
            first, others = x.split([arm.kept, x.shape[-2] - arm.kept], -2)
            return torch.cat([keep(first), round_trip(others)], -2)

        return rounded if arm.kept and side in arm.kept_sides else round_trip

    behind = behind_first(own.value, "V")

    def without_mean(x: torch.Tensor) -> torch.Tensor:
        table = value_mean[:, None].repeat(1, x.shape[-2], 1)
        table[:, : arm.first_value if arm.value else None] = 0
        if "V" in arm.own_first:
            table[:, 0] = first_value
        return behind(x - table) + table

    return replace(
        own,
        key=behind_first(own.key, "K"),
        value=without_mean if arm.value or "V" in arm.own_first else behind,
        subtracts_mean=True,
    )


def directions_of(
    arm: Arm,
    means: Means,
    tables: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> list[dict[str, torch.Tensor]]:
    """The directions that errors of each layer's keys lie across: (H, T, D) by name."""
    queries = at_positions(means.query, cos, sin)
    if arm.across_segment:
        queries = segment_means(queries, arm.across_segment)
    return [
        {name: {"mean": mean, "queries": query}[name] for name in arm.across}
        for mean, query in zip(tables, queries)
    ]


def caches_of(
    lab: LabModel,
    own: Variant,
    chosen: list[Arm],
    means: Mapping[str, Means],
    length: int,
) -> dict[tuple[str, int], Cache]:
    """The caches by the arm's name and the newest tokens that are seen as they are."""
    # A served segment is averaged whole, however short a text is.
    longest = max(SEGMENTS)
    cos, sin = rope(lab, -(-length // longest) * longest)
    caches = {}
    for arm in chosen:
        own_means = means[arm.source]
        tables = [x[:, :length].clone() for x in key_tables(arm, own_means, cos, sin)]
        pairs = zip(own_means.value, own_means.first_value)
        layers = [layer_cache(own, arm, *pair) for pair in pairs]
        if arm.across:
            directions = directions_of(arm, own_means, tables, cos, sin)
            layers = [across(*pair) for pair in zip(layers, directions)]
        for window in WINDOWS:
            cache = Cache(layers, Reading(window=window), means=tables)
            caches[arm.name, window] = cache
    return caches


class Texts:
    """Texts of a model's tokens.

    Attributes:
        held_out: (1, T) each, which are measured.
        others: (1, T) each, of the same file, which the means are of.

    """

    def __init__(
        self, folder: Path, file: Path | None, count: int, others: int, length: int
    ) -> None:
        if file is None:
            documents = HELD_OUT.read_text(encoding="utf-8").split(SEPARATOR)
            tokens = Vocabulary(folder).documents(documents)
        else:
            tokens = encode(folder, file)
        # Held-out texts and the others do not lie in one stretch of a document.
        found = [torch.tensor([x]) for x in cut(tokens, count + others, length)]
        self.held_out, self.others = found[:count], found[count:]


def encode(folder: Path, file: Path) -> list[int]:
    """The tokens of a text file."""
    from tokenizers import Tokenizer

    text = file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def calibrations(
    lab: LabModel, texts: Texts, files: Mapping[str, Path], folder: Path, length: int
) -> dict[str, Means]:
    """The means by the name of the tokens that they are of."""
    found = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    # The first prompt that is served: a held-out text's own first tokens.
    prompt = texts.held_out[0][:, : length // 4].to(lab.device)
    found[f"a first prompt of {prompt.shape[1]}"] = means_of(lab, [prompt])
    for name, file in files.items():
        (tokens,) = cut(encode(folder, file), 1, length)
        found[name] = means_of(lab, [torch.tensor([tokens], device=lab.device)])
    size = lab.model.config.vocab_size
    for count, seed in product(RANDOM, range(SEEDS)):
        if count > length:
            continue
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(size, (1, count), generator=generator)
        name = f"{count} random tokens, seed {seed}"
        found[name] = means_of(lab, [tokens.to(lab.device)])
    return found


def until(texts: list[torch.Tensor], seconds: float) -> Iterator[torch.Tensor]:
    """Texts, of which none begins after ``seconds``; one is always measured."""
    begin = time.monotonic()
    for number, text in enumerate(texts):
        passed = time.monotonic() - begin
        if number and passed > seconds:
            print(f"stopped after {number} of {len(texts)} texts", flush=True)
            return
        print(f"text {number + 1} of {len(texts)}, {passed:.0f} s", flush=True)
        yield text


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, args.texts, args.others, args.length)
    files = dict(args.calibrate)
    means = calibrations(lab, texts, files, args.model, args.length)
    held_out = [x.to(lab.device) for x in texts.held_out]
    own = Variant("fp8", as_fp8, as_fp8, 2 * lab.head_size)
    exact = Cache([own] * lab.num_layers)
    caches: dict[tuple[str, str, int], Cache] = {
        ("fp8", Arm().name, w): replace(exact, reading=Reading(window=w))
        for w in WINDOWS
    }
    chosen = MAIN if args.main else list(arms(list(means)))
    if args.shares:
        chosen = [Arm(), *served(args.shares, args.across, args.segments)]
    for name in args.presets:
        own = preset(name, lab.head_size, subtracts_mean=True)
        found = caches_of(lab, own, chosen, means, args.length)
        caches |= {(name, *key): cache for key, cache in found.items()}
    positions = slice(args.first, args.length - 1)
    figures = compare(lab, until(held_out, args.seconds), caches, positions)
    return [
        {"cache": cache, "arm": arm} | {str(w): figures[cache, arm, w] for w in WINDOWS}
        for cache, arm in dict.fromkeys(key[:2] for key in caches)
    ]


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {rows[0][str(WINDOWS[0])]['texts']} texts of "
        f"{args.length} tokens of {args.text.name}, the first "
        f"{args.first} positions not counted; fp32 on {args.device}; KL in millinats a "
        "token with the standard error of the mean, by how many of the newest tokens "
        "are seen as they are. Means leave out the first 16 tokens of each text. "
        "Written by `tests/quality/lab/means.py`."
    )
    head = ["cache", "taken off", *WINDOWS]
    cells = [
        [row["cache"], row["arm"], *(kl_cell(row[str(w)]) for w in WINDOWS)]
        for row in rows
    ]
    return page("Loss without the means of K and V", about, [head, *cells])


def named_file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not (name and separator and Path(path).is_file()):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=FILE of a file")
    return name, Path(path)


def build_text_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of programmes that measure ``Texts``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder")
    parser.add_argument(
        "--text",
        type=Path,
        help="file; needed unless the model is one of the project's",
    )
    add_text_arguments(parser, first=256)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no text begins later"
    )
    return parser


def names_of_directions(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split("+"))) if text != "none" else ()
    if unknown := set(names) - WEIGHTS.keys():
        raise argparse.ArgumentTypeError(f"no direction {', '.join(sorted(unknown))}")
    return names


def add_across(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--across",
        nargs="+",
        type=names_of_directions,
        default=[()],
        help="with --shares, what errors lie across: none, mean, queries, queries+mean",
    )
    text = "tokens of a segment of the queries' direction; 0: exact"
    parser.add_argument("--segments", nargs="+", type=int, default=[0], help=text)


def build_parser() -> argparse.ArgumentParser:
    parser = build_text_parser(__doc__)
    parser.add_argument("--main", action="store_true", help="the arms that decide")
    parser.add_argument(
        "--shares", nargs="+", type=float, help="parts of K's mean, as served, alone"
    )
    add_across(parser)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["turbo4"])
    parser.add_argument(
        "--calibrate",
        nargs="+",
        type=named_file,
        default=[],
        metavar="NAME=FILE",
        help="other means",
    )
    return parser


def write(
    name: str,
    args: argparse.Namespace,
    rows: list[dict],
    table: Callable[[argparse.Namespace, list[dict]], str],
) -> None:
    """Write a programme's figures, with their setting, and its table."""
    args.text = args.text or HELD_OUT
    figures = {"setting": setting(args), "rows": rows}
    write_results(args.output, name, figures, table(args, rows))


def main() -> None:
    args = build_parser().parse_args()
    write("means", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
