# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Translates CUDA sources to C++, where headers alone cannot.

It replaces inline assembly and variables in shared memory. Lines keep their numbers.
"""

import re
from pathlib import Path

# Templates of inline assembly, with a space for any run of blanks, and their functions
# in emulator/instructions.h.
INSTRUCTIONS = {
    "cp.async.cg.shared.global [%0], [%1], 16;": "copy_async_16",
    "{ .reg .pred is_copied; setp.ne.s32 is_copied, %2, 0; "
    "@is_copied cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16; }": (
        "copy_async_16_if"
    ),
    "prefetch.global.L2 [%0];": "nothing",
    "cp.async.commit_group;": "commit_group",
    "cp.async.wait_group %0;": "wait_group",
    "griddepcontrol.launch_dependents;": "launch_dependents",
    "griddepcontrol.wait;": "wait",
    "bar.sync %0, %1;": "bar_sync",
    "lop3.b32 %0, %1, %2, %3, 0xEA;": "and_or",
    "lop3.b32 %0, %1, %2, %3, 0xCA;": "select",
    "mad.lo.u32 %0, %1, %2, %3;": "mad_lo",
    "prmt.b32 %0, %1, %2, %3;": "permute",
    "ex2.approx.ftz.f32 %0, %1;": "exp2_approx",
    "rcp.approx.ftz.f32 %0, %1;": "reciprocal_approx",
    "mul.rn.sat.f32 %0, %1, %1;": "saturated_square",
    "fma.rn.sat.f32 %0, %1, %2, %3;": "saturated_multiply_add",
    "ld.shared.f32 %0, [%1];": "load_shared_1",
    "ld.shared.v2.f32 {%0, %1}, [%2];": "load_shared_2",
    "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];": "load_shared_4",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};": "mma_s8",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};": "mma_s8_from",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};": "mma_f16",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};": "mma_bf16",
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": "movmatrix",
    "{ .reg .pred is_greater; setp.gt.f32 is_greater, %1, %2; "
    "@is_greater add.s32 %0, %0, 1; }": "add_one_if_greater",
    "{ .reg .pred is_greater; setp.gt.f32 is_greater, %1, %2; "
    "@is_greater add.u32 %0, %0, %3; }": "add_if_greater",
    "{ .reg .pred is_greater; setp.gt.f32 is_greater, %1, %2; "
    "@is_greater sub.s32 %0, %0, %3; }": "subtract_if_greater",
    "{ .reg .pred is_loaded; setp.ne.s32 is_loaded, %4, 0; "
    "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
    "@is_loaded ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%5]; }": "load_4_if",
}

INSTRUCTIONS |= {
    "": "nothing",
    "mbarrier.init.shared::cta.b64 [%0], %1;": "mbarrier_init",
    "fence.mbarrier_init.release.cluster;": "nothing",
    "fence.proxy.async.shared::cta;": "nothing",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "mbarrier_expect",
    "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }": (
        "mbarrier_arrive"
    ),
    "{ .reg .pred is_done; again: "
    "mbarrier.test_wait.parity.shared::cta.b64 is_done, [%0], %1; "
    "@!is_done bra again; }": "mbarrier_wait",
    "{ .reg .pred is_done; again: "
    "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1; "
    "@!is_done bra again; }": "mbarrier_wait",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%0], [%1], %2, [%3];": "bulk_copy",
    "cp.async.bulk.prefetch.L2.global [%0], %1;": "bulk_prefetch",
    "bar.arrive %0, %1;": "bar_arrive",
    "{ .reg .pred is_any, is_own; setp.ne.s32 is_own, %3, 0; "
    "bar.red.or.pred is_any, %1, %2, is_own; selp.s32 %0, 1, 0, is_any; }": "bar_or",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};": "stmatrix",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "nothing",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "nothing",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": "ldmatrix",
    "wgmma.fence.sync.aligned;": "nothing",
    "wgmma.commit_group.sync.aligned;": "wgmma_commit",
    "wgmma.wait_group.sync.aligned %0;": "wgmma_wait",
    "{ .reg .pred p; setp.eq.u32 p, %1, 0x7F800001; "
    "@p st.shared.u32 [%1], %1; wgmma.wait_group.sync.aligned %0; }": (
        "wgmma_wait_after"
    ),
}


def _of_columns(columns: int) -> dict[str, str]:
    """Products of a warpgroup with so many columns: see common/wgmma.cuh."""
    n = columns // 2
    d = ", ".join(f"%{i}" for i in range(n))
    a = ", ".join(f"%{n + i}" for i in range(4))
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{d}}}"
    return {
        f"{{ .reg .pred p; setp.ne.b32 p, %{n + 5}, 0; "
        f"{product}, {{{a}}}, %{n + 4}, p, 1, 1, %{n + 6}; }}": f"wgmma_registers<{n}>",
        f"{{ .reg .pred p; setp.ne.b32 p, %{n + 2}, 0; "
        f"{product}, %{n}, %{n + 1}, p, 1, 1, %{n + 3}, %{n + 4}; }}": (
            f"wgmma_deep<{n}>"
        ),
    }


for _columns in (*range(8, 72, 8), 128, 256):
    INSTRUCTIONS |= _of_columns(_columns)

_ASSEMBLY = re.compile(r"\basm\s+(?:volatile\s*)?\(|\basm\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\w+\)\s*)?(?P<type>\w+)\s+(?P<name>\w+)\[\]"
)
_STATIC = re.compile(
    r"__shared__\s+(?:__align__\(\w+\)\s*)?(?P<type>[\w:]+(?:<[^;]*>)?)\s+"
    r"(?P<name>\w+)(?P<sizes>(?:\[[^\];]*\])*);"
)


def _end_of(text: str, start: int) -> int:
    """The place where the parenthesis that opens before ``start`` closes."""
    depth, place = 1, start
    while depth:
        string = _STRING.match(text, place)
        if string:
            place = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        place += 1
    return place - 1


def _sections(text: str) -> list[str]:
    """The template and the operands of a statement, which colons separate."""
    sections, place, start, depth = [], 0, 0, 0
    while place < len(text):
        string = _STRING.match(text, place)
        if string:
            place = string.end()
            continue
        character = text[place]
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and not depth:
            sections.append(text[start:place])
            start = place + 1
        place += 1
    return [*sections, text[start:]]


def _operands(section: str) -> list[str]:
    """The expressions of operands, each in parentheses after its constraint."""
    operands, place = [], 0
    while string := _STRING.search(section, place):
        start = section.index("(", string.end()) + 1
        end = _end_of(section, start)
        operands.append(section[start:end])
        place = end + 1
    return operands


def _instruction(statement: str, where: str) -> str:
    template, *sections = _sections(statement)
    text = "".join(_STRING.findall(template)).replace("\\n", " ")
    name = INSTRUCTIONS.get(" ".join(text.split()))
    if name is None:
        raise ValueError(f"{where}: the emulator has no instruction {text!r}")
    operands = [x for section in sections[:2] for x in _operands(section)]
    arguments = ", ".join(["::emulator::Site::current()", *operands])
    return f"::emulator::ptx::{name}({arguments})"


def _with_lines_of(replacement: str, original: str) -> str:
    lacking = original.count("\n") - replacement.count("\n")
    return replacement + "\n" * lacking


def _static_variable(match: re.Match[str]) -> str:
    name = match["name"]
    variable = (
        f"static ::emulator::SharedVariable<{match['type']}{match['sizes']}> "
        f'{name}_slot{{{{"{name}"}}}}; auto& {name} = {name}_slot.get();'
    )
    return _with_lines_of(variable, match[0])


def translate(source: str, path: str | Path) -> str:
    """Return a CUDA source as C++ for the emulator's headers.

    Args:
        source: The text.
        path: The source's name in messages.

    Raises:
        ValueError: If there is inline assembly that the emulator does not know.

    """
    parts, place = [], 0
    while match := _ASSEMBLY.search(source, place):
        end = _end_of(source, match.end())
        where = f"{path}:{source.count(chr(10), 0, match.start()) + 1}"
        call = _instruction(source[match.end() : end], where)
        original = source[match.start() : end + 1]
        parts += [source[place : match.start()], _with_lines_of(call, original)]
        place = end + 1
    text = "".join([*parts, source[place:]])
    text = _DYNAMIC.sub(
        r"auto* const \g<name> = "
        r"reinterpret_cast<\g<type>*>(::emulator::dynamic_shared())",
        text,
    )
    text = _STATIC.sub(_static_variable, text)
    text = text.replace("__noinline__", "__attribute__((noinline))")
    return f'#line 1 "{path}"\n{text}'
