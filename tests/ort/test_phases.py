"""Where memory is limited, the products of a split have sessions of their own, which programs of all sizes share."""

from __future__ import annotations

import gc
from weakref import ref

import numpy as np
import pytest

import opweave as ow
from opweave_ort.sessions import SESSIONS

WIDTH = 64
PACKED = 5 * WIDTH * WIDTH * 4
"""Bytes of the weights of two layers in f32, as ONNX Runtime packs them."""


def model(w, n):
    """Two layers of attention with two heads, and of the last row a product; cast weights are weights, too."""
    x = ow.input("x", (1, n, WIDTH))
    for name in ("a", "b"):
        q = ow.linear(ow.rms_norm(x, w["norm"]), ow.cast(w[name], "f32"))
        heads = ow.reshape(q, (1, n, 2, WIDTH // 2)).transpose(0, 2, 1, 3)
        y = ow.attention(heads, heads, heads, causal=True)
        x = x + ow.linear(ow.reshape(y.transpose(0, 2, 1, 3), (1, n, WIDTH)), w[name + "o"])
    return ow.linear(x[:, n - 1], w["out"])


@pytest.fixture
def w():
    rng = np.random.default_rng(0)
    made = {k: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for k in ("a", "b", "ao", "bo", "out")}
    made |= {k: made[k].astype(np.float16) for k in ("a", "b")}
    return ow.weights(made | {"norm": np.ones(WIDTH, np.float32)})


@pytest.mark.parametrize(("repack", "copies"), [(2 * PACKED, 2), (2 * PACKED - 1, 1), (0, 1), (True, 2)])
def test_programs_of_prompts_and_of_tokens_hold_their_weights_twice_where_the_limit_has_room(device, w, repack, copies):
    x = np.random.default_rng(1).standard_normal((1, 5, WIDTH)).astype(np.float32)
    with ow.Scheduler(device, repack=repack) as scheduler, ow.Scheduler("host") as host:
        before = SESSIONS.packed
        programs = {n: scheduler.build(model(w, n)) for n in (5, 1)}
        for _ in range(2):
            for n, program in programs.items():
                want = host.build(model(w, n)).run(x=x[:, :n])
                np.testing.assert_allclose(program.run(x=x[:, :n]), want, rtol=1e-3, atol=1e-4)
        assert (SESSIONS.packed - before) // PACKED == copies  # those of norms are few


def test_a_session_that_others_have_widened_is_freed_before_its_program_runs_again(device, w):
    with ow.Scheduler(device) as scheduler:
        first = scheduler.build(ow.linear(ow.input("x", (2, WIDTH)), w["out"]))
        known = [ref(session.opened.native) for session in SESSIONS.alive()]
        second = scheduler.build(ow.linear(ow.input("x", (3, WIDTH)), w["out"]))
        gc.collect()
        assert sum(native() is None for native in known) == 1
        x = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
        for program, rows in ((first, 2), (second, 3), (first, 2)):
            want = x[:rows] @ ow.read(w["out"]).T
            np.testing.assert_allclose(program.run(x=x[:rows]), want, rtol=1e-3, atol=1e-4)


def test_a_run_gives_back_its_temporaries_where_memory_is_limited(device):
    x = ow.input("x", (1 << 10, 1 << 12))
    for repack, kept in ((0, False), (True, True), (0, False)):
        with ow.Scheduler(device, repack=repack) as scheduler:
            program = scheduler.build(ow.sum(ow.exp(ow.tanh(x).T) @ ow.exp(x[:, :2])))
            program.run(x=np.zeros(x.shape, np.float32))
            assert (program.memory[device.name].library > 1 << 22) is kept
