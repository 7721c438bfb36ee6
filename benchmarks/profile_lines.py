# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shows what a kernel waits for, from Nsight Compute's counters of its instructions.

    ncu --section SourceCounters --section WarpStateStats --section SpeedOfLight \
        --launch-count 1 -o REPORT python ...
    ncu --import REPORT.ncu-rep --page raw --csv >RAW.csv
    ncu --import REPORT.ncu-rep --page source --csv >SOURCE.csv
    python benchmarks/profile_lines.py RAW.csv SOURCE.csv

The output has the use of units in percent of their peak, the reasons of samples of
warps, the most executed instructions, and those with the most samples, each behind the
instruction before it. A sample is of an instruction that has not been issued yet.
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from profile_table import read_rows

PEAK = ".avg.pct_of_peak_sustained_elapsed"
UNITS = {
    "issue slots": f"sm__issue_active{PEAK}",
    "shared memory and L1": f"l1tex__data_pipe_lsu_wavefronts{PEAK}",
    "tensor core": f"sm__pipe_tensor_cycles_active{PEAK}",
    "FMA pipe": f"sm__pipe_fma_cycles_active{PEAK}",
    "ALU pipe": f"sm__pipe_alu_cycles_active{PEAK}",
    "L2": f"lts__throughput{PEAK}",
    "DRAM": f"gpu__dram_throughput{PEAK}",
}
SAMPLES, EXECUTED = "# Samples", "Instructions Executed"
WAVEFRONTS = "L1 Wavefronts Shared"

Instruction = dict[str, str]


def read_instructions(path: Path) -> list[Instruction]:
    """The instructions of a kernel and their counters, in order.

    Raises:
        ValueError: If there is no table of ncu --csv --page source.

    """
    with path.open(newline="") as file:
        lines = [line for line in file if line.startswith('"')]
    first = next((i for i, line in enumerate(lines) if line.startswith('"Address"')), 0)
    found = list(csv.DictReader(lines[first:]))
    if not found or SAMPLES not in found[0]:
        raise ValueError(f"{path} has no table of ncu --csv --page source")
    return found


def count(instructions: Iterable[Instruction], name: str) -> float:
    """The sum of a counter over instructions."""
    return sum(float(x.get(name) or 0) for x in instructions)


def operation(instruction: Instruction) -> str:
    """The name of an instruction, such as HMUL2, without its predicate."""
    text = re.sub(r"^@!?U?P\w+\s+", "", instruction["Source"].strip())
    return re.split(r"[ .]", text)[0]


def by_operation(instructions: list[Instruction], name: str) -> str:
    """The operations with the most of a counter, in millions."""
    sums = Counter[str]()
    for x in instructions:
        sums[operation(x)] += count([x], name)
    return ", ".join(f"{key} {n / 1e6:.1f}" for key, n in sums.most_common(8))


def show_units(path: Path) -> None:
    names, _, values = read_rows(path)[:3]
    facts = dict(zip(names, values, strict=True))
    print(f"microseconds: {float(facts['gpu__time_duration.sum']):.1f}")
    for unit, name in UNITS.items():
        print(f"{unit}, %: {float(facts[name]):.1f}")


def show_instructions(instructions: list[Instruction], share: float) -> None:
    """Print counters of all instructions, and those with a share of the samples."""
    samples = count(instructions, SAMPLES)
    reasons = {
        name.removeprefix("stall_"): 100 * count(instructions, name) / samples
        for name in instructions[0]
        if name.startswith("stall_") and "(" not in name
    }
    largest = sorted(reasons.items(), key=lambda item: -item[1])
    print("reasons of samples, %:", ", ".join(f"{x} {n:.1f}" for x, n in largest[:8]))
    for name in (EXECUTED, WAVEFRONTS):
        total = count(instructions, name) / 1e6
        print(f"{name}, M: {total:.1f}; {by_operation(instructions, name)}")
    for before, x in zip(instructions, instructions[1:], strict=False):
        percent = 100 * count([x], SAMPLES) / samples
        if percent < share:
            continue
        reason = max(reasons, key=lambda key: count([x], f"stall_{key}"))
        line = f"{x['Source'].strip()}, after {before['Source'].strip()}"
        print(f"{percent:5.1f} % {reason:10} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=Path, help="table of --page raw")
    parser.add_argument("source", type=Path, help="table of --page source")
    parser.add_argument(
        "--share", type=float, default=1.0, help="percent of samples of a line"
    )
    args = parser.parse_args()
    show_units(args.raw)
    show_instructions(read_instructions(args.source), args.share)


if __name__ == "__main__":
    main()
