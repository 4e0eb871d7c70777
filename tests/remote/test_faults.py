"""Servers behind a network that delays, reorders, cuts and parts: a run ends with its result or a named error."""

from __future__ import annotations

import os
import random
import threading
import time
import urllib.request
from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from examples import digits, text
from opweave.errors import DeviceLostError, ExecutionError
from tests.support import small_decoder as decoder
from tests.support.proxy import Proxy
from tests.support.remote import serve_process
from tests.support.small_training import DATA, trainer

F32 = np.float32
FAULTS = int(os.environ.get("OPWEAVE_TEST_FAULTS", "12"))
RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def servers(token):
    """Two servers."""
    with ExitStack() as stack:
        options = ["--token-file", str(token), "--metrics", "127.0.0.1:0"]
        yield [stack.enter_context(serve_process(*options)) for _ in range(2)]


@pytest.fixture
def far(servers, token):
    """A device of each server, behind a network that delays each piece by up to 0.3 ms, cut into pieces that do not
    end where messages do."""
    with ExitStack() as stack:
        made = []
        for seed, server in enumerate(servers):
            proxy = stack.enter_context(Proxy(server.address, latency=3e-4, piece=20_000, seed=seed))
            connection = opweave_remote.connect(proxy.address, token_file=token)
            stack.callback(connection.close)
            made.append(connection.devices[0])
        yield made


def with_names(devices):
    return ["cpu", *[device.name for device in devices]]


# --- split over local and remote devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
def test_digits_agree_with_a_local_run(far, parallel):
    shapes = [(64, 64), (48, 64), (10, 48)]
    arrays = {f"layer{i}.weight": RNG.standard_normal(s).astype(F32) / 8 for i, s in enumerate(shapes)}
    arrays |= {f"layer{i}.bias": RNG.standard_normal(s[0]).astype(F32) for i, s in enumerate(shapes)}
    images = RNG.standard_normal((256, 64)).astype(F32)
    x = ow.input("images", images.shape)
    with ow.Scheduler("cpu") as local:
        want = local.build(digits.logits(x, ow.weights(arrays), 3)).run(images=images)
    names = with_names(far)
    weights = ow.weights(arrays, {f"layer{i}.*": name for i, name in enumerate(names)})
    with ow.Scheduler([*names, "host"], parallel=parallel) as scheduler:
        program = scheduler.build(digits.logits(x, weights, 3))
        assert {s.target.name for s in program.splits} >= set(names)
        futures = [program.submit(images=images * k) for k in (1, 0, 1)]
        np.testing.assert_array_equal(futures[0].result(), want)
        np.testing.assert_array_equal(futures[2].result(), want)


def test_an_encoder_agrees_with_a_local_run(far):
    size = text.Size(layers=3, width=32, heads=4, context=16)
    arrays = text.parameters(20, size)
    ids = RNG.integers(0, 20, (2, 16)).astype(np.int32)
    x = ow.input("ids", ids.shape, "i32")
    with ow.Scheduler("cpu") as local:
        want = local.build(text.transformer(x, ow.weights(arrays), size)).run(ids=ids)
    names = with_names(far)
    weights = ow.weights(arrays, {f"{i}.*": name for i, name in enumerate(names)})
    with ow.Scheduler([*names, "host"]) as scheduler:
        program = scheduler.build(text.transformer(x, weights, size))
        assert {s.target.name for s in program.splits} >= set(names)
        for _ in range(3):
            np.testing.assert_allclose(program.run(ids=ids), want, rtol=1e-5, atol=1e-5)


def test_a_decoder_with_its_cache_writes_what_a_local_one_writes(far):
    arrays = {name: (RNG.standard_normal(s) / s[1] ** 0.5).astype(F32) for name, s in decoder.SHAPES.items()}
    written = []
    for devices in (["cpu"], with_names(far)):
        step, kv = decoder.decoder(arrays, devices, capacity=32)
        written.append(list(decoder.continued(["once ", "why?"], 12, step, kv)))
        step.close()
    assert written[0] == written[1]


def test_training_agrees_with_a_local_run(far):
    values = []
    for devices in (["cpu"], [far[0].name, "host"], [*with_names(far), "host"]):
        with trainer(devices=devices, seed=1) as made:
            made.run_epoch(DATA)
            values.append({name: ow.read(tensor) for name, tensor in made._states.items()})
    for other in values[1:]:
        for name, value in values[0].items():
            np.testing.assert_allclose(other[name], value, rtol=2e-5, atol=2e-6)


# --- what breaks ------------------------------------------------------------------------------------------------------


@cache
def graph():
    weights = np.random.default_rng(0).standard_normal((6, 128, 128)).astype(F32) / 11
    x = ow.input("faulty", (64, 128))
    y = x
    for w in weights:
        y = ow.tanh(ow.linear(y, ow.constant(w)))
    return y


def figures(server):
    text = urllib.request.urlopen(server.metrics, timeout=10).read().decode()
    return dict(line.split() for line in text.splitlines() if not line.startswith("#"))


def is_loss(error):
    while error is not None:
        if isinstance(error, DeviceLostError):
            return True
        error = error.__cause__
    return False


@pytest.mark.parametrize("fault", ["cut", "cut one", "halve", "halve one", "part"])
def test_whatever_breaks_a_run_ends_with_its_result_or_a_named_error(servers, token, fault):
    rng, y = random.Random(fault), graph()
    count = [1] if fault.endswith("one") else []
    values = np.ones((64, 128), F32)
    with ow.Scheduler("cpu") as local:
        want = local.build(y).run(faulty=values)
    for _ in range(max(FAULTS // 5, 1)):
        with Proxy(servers[0].address, piece=9000, seed=rng.randrange(1000)) as proxy:
            connection = opweave_remote.connect(proxy.address, token_file=token, deadline=1.5)
            timer = threading.Timer(rng.uniform(0.0, 0.3), getattr(proxy, fault.split()[0]), count)
            timer.start()
            start = time.monotonic()
            try:
                with ow.Scheduler([connection.devices[0], "cpu"], parallel=rng.random() < 0.5) as scheduler:
                    while connection.alive and time.monotonic() - start < 2.5:
                        program = scheduler.build(y)
                        for future in [program.submit(faulty=values) for _ in range(3)]:
                            np.testing.assert_array_equal(future.result(20), want)
            except (DeviceLostError, ExecutionError) as error:
                if not is_loss(error):
                    raise
            timer.join()
            assert time.monotonic() - start < 15
            if not fault.endswith("one"):  # which may be one that is not in use
                until = time.monotonic() + 10
                while connection.alive and time.monotonic() < until:
                    time.sleep(0.01)
                assert not connection.alive
            proxy.join()
            connection.close()
    until = time.monotonic() + 10
    while figures(servers[0])["opweave_remote_clients"] != "0" and time.monotonic() < until:
        time.sleep(0.02)
    left = figures(servers[0])
    assert left["opweave_remote_clients"] == left["opweave_remote_buffers"] == "0"
    connection = opweave_remote.connect(servers[0].address, token_file=token)
    with ow.Scheduler([connection.devices[0], "host"]) as scheduler:
        np.testing.assert_array_equal(scheduler.build(y).run(faulty=values), want)


def test_results_that_nobody_takes_yet_hold_up_nobody(servers, token):
    """Many runs whose results fill all buffers of the system, sent before the first result is taken."""
    with Proxy(servers[0].address) as proxy:
        device = opweave_remote.connect(proxy.address, token_file=token).devices[0]
        values = np.arange(1 << 19, dtype=F32)
        with device.alloc(values.nbytes) as buffer, device.open() as one, device.open() as two:
            buffer.upload(0, values)
            outs = [np.empty_like(values) for _ in range(16)]
            for out in outs:
                one.download(buffer, 0, out)
                one.upload(buffer, 0, values[:4000])
            two.wait(one.record())
            two.synchronize()
            one.synchronize()
            for out in outs:
                np.testing.assert_array_equal(out, values)


def test_a_server_that_was_started_again_does_not_know_the_client_any_more(servers, token):
    connection = opweave_remote.connect(servers[0].address, token_file=token)
    connection._session = bytes(16)
    with pytest.raises(DeviceLostError, match="started again"):
        connection.devices[0].open()
    assert not connection.alive
