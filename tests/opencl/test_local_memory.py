"""Kernels read no local memory that they did not write: what others left there may be NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

import opweave as ow

NAN_EVERYWHERE = """
__kernel void spoil(__global float *out)
{
    __local float all[SIZE];
    for (int i = 0; i < SIZE; i++) all[i] = NAN;
    barrier(CLK_LOCAL_MEM_FENCE);
    out[get_group_id(0)] = all[(int)get_group_id(0)];
}
"""


def spoil(device: Any) -> None:
    size = min(device.cl_device.local_mem_size // 8, 1 << 16)
    with cl.CommandQueue(device.context) as queue:
        program = cl.Program(device.context, NAN_EVERYWHERE).build([f"-DSIZE={size}"], [device.cl_device])
        out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 64)
        cl.Kernel(program, "spoil")(queue, (16,), (1,), out)
        queue.finish()


@pytest.mark.parametrize("size", [3, 8, 24, 40, 33])
def test_attention_reads_no_local_memory_that_it_did_not_write(device, size):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 2, 9, size), np.float32), rng.standard_normal((1, 2, 17, size), np.float32)
    out = ow.attention(ow.constant(q), ow.constant(k), ow.constant(k))
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(out)
        spoil(device)
        assert np.isfinite(program.run()).all()
