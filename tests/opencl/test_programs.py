"""Programs: built once, and readable messages where they do not build."""

from __future__ import annotations

import pytest

from opweave.contract import Arg, Step
from opweave.dtypes import as_dtype
from opweave.errors import ExecutionError
from opweave_opencl import KernelBuildError, program
from opweave_opencl.kernels import pointwise

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
    monkeypatch.setattr(pointwise, "_LOADS", {0: "NO_SUCH_LOAD", 1: "NO_SUCH_LOAD"})
    buffer = device.alloc(64)
    x = Arg(buffer, 0, as_dtype("f32"), (16,), (4,))
    with pytest.raises(ExecutionError, match=r"cannot build pointwise\.cl"):
        stream.compile([Step("neg", x, (x,), {})])


def test_programs_are_built_once(device):
    macros = {"VEC": "1", "GROUP": "1", "MAXIMUM": "1"}
    first = device.programs.get("reduction", macros)
    count = len(device.programs)
    assert device.programs.get("reduction", dict(macros)) is first
    assert len(device.programs) == count


def test_included_files_are_put_in_with_their_line_numbers():
    text = program.expanded("argmax.cl", program.source("argmax.cl"))
    assert "#include" not in text
    assert '#line 1 "rows.cl"' in text
    before, _, after = text.rpartition("#line ")
    number, _, rest = after.partition(' "argmax.cl"\n')
    assert rest.splitlines()[0] == program.source("argmax.cl").splitlines()[int(number) - 1]
    assert before
