"""Programs: built once, and readable messages where they do not build."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pyopencl as cl
import pytest
from pyopencl import invoker

from opweave.contract import Arg, Step
from opweave.errors import ExecutionError
from opweave.graph.dtypes import as_dtype
from opweave_opencl import KernelBuildError, kernel_objects, program
from opweave_opencl.caching import BinaryCache

BROKEN = """__kernel void broken(__global float *out)
{
    const float half_ = 0.5f;
    out[0] = half_ * missing;
}
"""


def test_a_failing_build_shows_source_line_and_log(device):
    with pytest.raises(KernelBuildError) as caught:
        device.programs.build("broken.cl", BROKEN, {"UNUSED": "1"})
    message = str(caught.value)
    assert "4 |     out[0] = half_ * missing;" in message
    assert message.splitlines()[message.splitlines().index("    4 |     out[0] = half_ * missing;") + 1].endswith("^")
    assert "undeclared identifier 'missing'" in message
    assert caught.value.log in message
    assert caught.value.source == BROKEN
    assert device.name in message


def test_a_failing_build_is_an_execution_error_of_compiling(device, stream, monkeypatch):
    monkeypatch.setattr(device, "tuning", device.tuning._replace(vector=5))  # there are no vectors of five
    buffer = device.alloc(64)
    x = Arg(buffer, 0, as_dtype("f32"), (16,), (4,))
    with pytest.raises(KernelBuildError, match=r"cannot build .*(.|\n)*build log:") as caught:
        stream.compile([Step("neg", x, (x,), {})])
    assert isinstance(caught.value, ExecutionError)
    assert caught.value.device == device.name


FILES = {
    "outer.cl": """#include "inner.cl"
__kernel void outer(__global int *out) { out[0] = inner() + MORE; }
#include "inner2.cl"
int last(void);""",
    "inner.cl": "int inner(void);\nint inner(void) { return 2; }",
    "inner2.cl": "int other(void);",
}


@pytest.fixture
def _files(monkeypatch):
    monkeypatch.setattr(program, "source", FILES.__getitem__)


@pytest.mark.usefixtures("_files")
def test_programs_are_built_once(device):
    first = device.programs.get("outer", {"MORE": "1"})
    count = len(device.programs)
    assert device.programs.get("outer", {"MORE": "1"}) is first
    assert len(device.programs) == count
    assert device.programs.get("outer", {"MORE": "2"}) is not first


def test_a_device_keeps_the_latest_programs_and_kernels_keep_theirs(device):
    """As many as are asked for: with ever new sources the number of programs, and of their texts, has a bound."""
    text = "__kernel void f(__global int *out) {{ out[0] = {}; }}"
    kept = program.Programs(device.name, device.context, device.cl_device, kept=4)
    first = kept.generated(text.format(0), {})
    kernel = kernel_objects.new_kernel(first, "f")
    for i in range(1, 12):
        kept.generated(text.format(i), {})
        assert kept.generated(text.format(1), {"USED": "1"}) is kept.generated(text.format(1), {"USED": "1"})
        assert len(kept) <= 4
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    queue = cl.CommandQueue(device.context, device.cl_device)
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 4)
    kernel.set_arg(0, out)
    cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,))
    result = np.full(1, -1, np.int32)
    cl.enqueue_copy(queue, result, out)
    queue.finish()
    assert result[0] == 0
    assert program.code.cache_info().maxsize is not None


@pytest.mark.usefixtures("_files")
def test_included_files_are_put_in_with_their_line_numbers():
    assert program.expanded("outer.cl", FILES["outer.cl"]).splitlines() == [
        '#line 1 "outer.cl"',
        '#line 1 "inner.cl"',
        "int inner(void);",
        "int inner(void) { return 2; }",
        '#line 2 "outer.cl"',
        "__kernel void outer(__global int *out) { out[0] = inner() + MORE; }",
        '#line 1 "inner2.cl"',
        "int other(void);",
        '#line 4 "outer.cl"',
        "int last(void);",
    ]


@pytest.mark.usefixtures("_files")
def test_comments_indentation_and_blank_lines_are_not_compiled():
    text = """// What this is.
#include "inner.cl" // and where from

#define SUM(a, b) \\
    (a /* of
    two lines */ + b) // no // more \\
    of it
    #define EMPTY \\

int last(void);   /* the end */
constant char text[] = "// kept";
"""
    assert program.code(text).splitlines() == [
        "int inner(void);",
        "int inner(void) { return 2; }",
        "#define SUM(a, b) \\",
        "(a   + b)",
        "#define EMPTY \\",
        "",
        "int last(void);",
        'constant char text[] = "// kept";',
    ]


def test_programs_that_differ_in_comments_share_an_entry_of_the_cache(device, tmp_path):
    cache = BinaryCache(tmp_path)
    programs = program.Programs(device.name, device.context, device.cl_device, cache)
    for text in ("kernel void f(global int *x) { x[0] = 1; }", "\n  kernel void f(global int *x) { x[0] = 1; } // one"):
        programs.build("f.cl", text)
    assert len(cache.programs()) == 1


def test_build_options_are_given_to_the_compiler_and_kept_apart_in_the_cache(device, tmp_path, monkeypatch):
    text = "kernel void f(global int *x) { x[0] = NUMBER; }"
    cache = BinaryCache(tmp_path)

    def build():
        return program.Programs(device.name, device.context, device.cl_device, cache).build("f.cl", text)

    for number in ("1", "2"):
        monkeypatch.setenv(program.OPTIONS, f"-cl-opt-disable -DNUMBER={number}")
        build()
    assert len(cache.programs()) == 2
    monkeypatch.delenv(program.OPTIONS)
    with pytest.raises(KernelBuildError, match="undeclared identifier 'NUMBER'"):
        build()


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def generated(monkeypatch):
    """The names for which pyopencl generates functions, and nothing remembered of other tests."""
    names = []
    generate = invoker.generate_enqueue_and_set_args

    def noting(name, *args, **options):
        names.append(name)
        return generate(name, *args, **options)

    monkeypatch.setattr(invoker, "generate_enqueue_and_set_args", noting)
    kernel_objects._maker.cache_clear()
    yield names
    kernel_objects._maker.cache_clear()


def doubled(device):
    """What two kernel objects of one function compute, one after the other."""
    text = "kernel void doubled(global float *x, int count) { x[get_global_id(0)] *= 1 << count; }"
    built = device.programs.build("doubled.cl", text)
    buffer = device.alloc(64)
    buffer.upload(0, np.ones(16, np.float32))
    for count in (1, 2):
        kernel = kernel_objects.new_kernel(built, "doubled")
        kernel.set_arg(0, buffer.handle)
        kernel_objects.set_bytes(kernel, 1, np.int32(count).tobytes())
        cl.enqueue_nd_range_kernel(device.queue, kernel, (16,), None)
    device.queue.finish()
    return buffer.read().view(np.float32)


def test_functions_that_nobody_calls_are_generated_once(device, generated):
    assert kernel_objects.KNOWN[0] <= cl.VERSION[:2] <= kernel_objects.KNOWN[1], "try the new release, then raise KNOWN"
    assert (doubled(device) == 8).all()
    assert generated == ["doubled"]


def test_other_releases_of_pyopencl_make_kernels_in_their_own_way(device, generated, monkeypatch):
    monkeypatch.setattr(kernel_objects, "KNOWN", ((2025, 1), (2025, 1)))
    monkeypatch.setattr(cl, "VERSION", (2031, 1))
    assert (doubled(device) == 8).all()
    assert generated == ["doubled"] * 2
