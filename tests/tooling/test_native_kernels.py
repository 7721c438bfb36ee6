# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The record of the kernels whose tests have passed on a GPU."""

import native_kernels as native
import pytest

FOUND = {"cuda/store": "a", "cuda/merge": "b", "triton/merge": "c"}
RUN = {"gpu": "H100", "commit": "1234", "date": "2026-11-27"}


@pytest.mark.parametrize(
    "text, is_same",
    [
        ("int  x = 1;  // two\n", True),
        ("/* a\n b */ int x = 1;", True),
        ('#include "there/else.cuh"\nint x = 1;', True),
        ("// Why.\nint\n  x = 1;", True),
        ("int x = 2;", False),
        ("#include <cuda.h>\nint x = 1;", False),
    ],
)
def test_what_counts_in_cuda(text, is_same):
    before = '#include "here/own.cuh"\nint x = 1;'
    assert (native.normalised_cuda(text) == native.normalised_cuda(before)) == is_same


@pytest.mark.parametrize(
    "text, is_same",
    [
        ('"""Other words."""\nfrom b import c\ndef f():\n    return 1  # x\n', True),
        ('def f():\n    """Words."""\n    return 1\n', True),
        ("def f():\n    return 2\n", False),
        ("def f(x=1):\n    return 1\n", False),
    ],
)
def test_what_counts_in_python(text, is_same):
    before = '"""Words."""\nimport a\ndef f():\n    return 1\n'
    same = native.normalised_python(text) == native.normalised_python(before)
    assert same == is_same


def test_a_digest_is_the_same_of_every_python():
    """Each release of Python gives this text, whatever fields its syntax tree has."""
    text = "def f(x: int = 1, *, y=None):\n    return -x if y else [f'{x:2}', None]\n"
    assert native.normalised_python(text) == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='x',"
        "annotation=Name(id='int',ctx=Load()))],kwonlyargs=[arg(arg='y')],"
        "kw_defaults=[Constant()],defaults=[Constant(value=1)]),"
        "body=[Return(value=IfExp(test=Name(id='y',ctx=Load()),"
        "body=UnaryOp(op=USub(),operand=Name(id='x',ctx=Load())),"
        "orelse=List(elts=[JoinedStr(values=[FormattedValue("
        "value=Name(id='x',ctx=Load()),conversion=-1,"
        "format_spec=JoinedStr(values=[Constant(value='2')]))]),Constant()],"
        "ctx=Load())))])])"
    )


def test_what_a_source_includes(tmp_path):
    (tmp_path / "kernel").mkdir()
    for name, text in {
        "kernel/kernel.cu": '#include "kernel/kernel.cuh"\n#include "made.h"\n',
        "kernel/kernel.cuh": '#include "common.cuh"\n',
        "common.cuh": "",
        "other.cuh": "",
    }.items():
        (tmp_path / name).write_text(text)
    found = native.with_included(tmp_path / "kernel/kernel.cu", tmp_path)
    assert {x.name for x in found} == {"kernel.cu", "kernel.cuh", "common.cuh"}


def test_nothing_is_recorded_at_first(tmp_path):
    record = native.read_record(tmp_path / "none.json")
    assert native.changed(FOUND, record) == list(FOUND)


def test_a_whole_run():
    record = {"families": {"cuda/gone": {"digest": "z"}}}
    native.mark_passed(record, FOUND, list(FOUND), None, RUN)
    assert record["families"].keys() == FOUND.keys()
    assert record["families"]["cuda/merge"] == {"digest": "b", **RUN}
    assert native.changed(FOUND, record) == []
    assert native.changed(FOUND | {"cuda/merge": "d"}, record) == ["cuda/merge"]
    assert native.changed(FOUND | {"cuda/new": "e"}, record) == ["cuda/new"]


def test_some_families_alone():
    record = {"families": {"cuda/merge": {"digest": "b", **RUN}}}
    native.mark_passed(record, FOUND, ["cuda/store"], None, RUN)
    assert native.changed(FOUND, record) == ["triton/merge"]


def test_parts_count_together():
    record = {"families": {}}
    native.mark_passed(record, FOUND, list(FOUND), "1/2", RUN)
    assert native.changed(FOUND, record) == list(FOUND)
    native.mark_passed(record, FOUND, list(FOUND), "1/2", RUN)
    assert native.changed(FOUND, record) == list(FOUND)
    native.mark_passed(record, FOUND, list(FOUND), "2/2", RUN)
    assert native.changed(FOUND, record) == [] and "unfinished" not in record


@pytest.mark.parametrize("digests, shard", [({"cuda/merge": "d"}, "2/2"), ({}, "2/3")])
def test_parts_of_other_sources_or_sizes_do_not(digests, shard):
    record = {"families": {}}
    native.mark_passed(record, FOUND, list(FOUND), "1/2", RUN)
    found = FOUND | digests
    native.mark_passed(record, found, list(FOUND), shard, RUN)
    assert native.changed(found, record) == list(FOUND)


def test_tests_of_a_family():
    names = {path.name for path in native.tests_of(["cuda/merge"])}
    assert {"test_cuda_merge.py", "test_cuda_features.py"} <= names
    assert "test_cuda_architectures.py" in names
    assert "test_latent_format.py" not in names
    assert native.tests_of(["cuda/extend_outputs"]) == native.tests_of(
        ["cuda/extend_wgmma"]
    )
