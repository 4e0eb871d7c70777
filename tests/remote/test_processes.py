"""Real servers: found by the environment, killed, stopped, started again, ended in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave.errors import DeviceLostError, ExecutionError, Unavailable
from opweave.registry import Registry
from opweave_remote.command import check_way_in
from opweave_remote.wires import Address
from tests.support.remote import ServerProcess, serve_process, stop_process

F32 = np.float32
KILLS = int(os.environ.get("OPWEAVE_TEST_KILLS", "20"))


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__


def run_until_it_fails(program, values):
    for _ in range(1000):
        program.run(x=values)


def graph(n=64):
    rng = np.random.default_rng(0)
    x = ow.input("x", (4, n))
    for _ in range(6):
        x = ow.tanh(ow.linear(x, ow.constant(rng.standard_normal((n, n)).astype(F32) / 8)))
    return x


def connect_again(server, token):
    """A connection to a server whose computing process may have been killed just now."""
    until = time.monotonic() + 30
    while True:
        try:
            return opweave_remote.connect(server.address, token_file=token, deadline=5)
        except Unavailable:  # passed to the process that was killed
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.fixture(scope="module")
def counting(token):
    """A server that shows metrics."""
    with serve_process("--token-file", str(token), "--metrics", "127.0.0.1:0") as made:
        yield made


def until_it_shows(server, **expected):
    """Its metrics, once these have these values, or after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        text = urllib.request.urlopen(server.metrics, timeout=10).read().decode()
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        figures = {name.removeprefix("opweave_remote_"): float(value) for name, value in lines}
        if expected.items() <= figures.items() or time.monotonic() > deadline:
            return figures
        time.sleep(0.05)


def test_devices_are_found_by_the_environment(server, token, monkeypatch):
    monkeypatch.setenv("OPWEAVE_REMOTE", server.address)
    monkeypatch.setenv("OPWEAVE_REMOTE_TOKEN_FILE", str(token))
    registry = Registry(environ={})
    device = registry.device(f"remote:{server.address}/cpu")
    assert device.kind is ow.Kind.CPU
    assert device in registry.devices()
    assert registry.device("remote") is device
    with ow.Scheduler(device) as scheduler:
        np.testing.assert_array_equal(scheduler.build(ow.input("x", (3,)) + 1).run(x=np.zeros(3, F32)), np.ones(3, F32))


def test_a_server_that_is_not_there_is_unavailable_with_a_remedy(token, monkeypatch):
    monkeypatch.setenv("OPWEAVE_REMOTE", "127.0.0.1:9")
    monkeypatch.setenv("OPWEAVE_REMOTE_TOKEN_FILE", str(token))
    with pytest.raises(Unavailable, match=r"cannot be reached[\s\S]*serve-devices"):
        Registry(environ={}).device("remote")


def test_a_token_file_that_others_may_read_is_refused(server, tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(Unavailable, match="chmod 600"):
        opweave_remote.connect(server.address, token_file=path)
    path.chmod(0o600)
    with pytest.raises(Unavailable, match="token is wrong"):
        opweave_remote.connect(server.address, token_file=path)


def test_killed_at_any_moment_a_run_ends_with_its_result_or_a_named_error(token):
    rng, y = random.Random(3), graph()
    values = np.ones((4, 64), F32)
    with ow.Scheduler("cpu") as local:
        want = local.build(y).run(x=values)
    for first in range(0, KILLS, 4):  # a server whose process ends more often within a minute gives up
        with serve_process("--token-file", str(token)) as server:
            for _ in range(first, min(first + 4, KILLS)):
                connection = connect_again(server, token)
                start = time.monotonic()
                worker = server.worker
                timer = threading.Timer(rng.uniform(0.0, 0.15), os.kill, (worker, signal.SIGKILL))
                timer.start()
                try:
                    with ow.Scheduler([connection.devices[0], "cpu"], parallel=rng.random() < 0.5) as scheduler:
                        for _ in range(2000):
                            program = scheduler.build(y)
                            assert np.array_equal(program.run(x=values), want)
                            if not connection.alive:
                                break
                except (DeviceLostError, ExecutionError) as error:
                    named = any(isinstance(e, DeviceLostError) for e in chain(error))
                    if not named:
                        raise
                timer.join()
                assert time.monotonic() - start < 30
                deadline = time.monotonic() + 10
                while connection.alive and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not connection.alive
                assert connection.devices[0] not in ow.devices()
                connection.close()


def test_a_lost_server_is_left_out_and_taken_back(token):
    values, y = np.ones((4, 64), F32), graph()
    server = ServerProcess("--token-file", str(token))
    port = int(server.address.rpartition(":")[2])
    try:
        opweave_remote.connect(server.address, token_file=token, deadline=3)
        device = ow.device(f"remote:{server.address}/cpu")
        scheduler = ow.Scheduler([device, "cpu"])
        want = scheduler.build(y).run(x=values)
        server.signal(signal.SIGKILL)
        with pytest.raises((DeviceLostError, ExecutionError)) as told:
            run_until_it_fails(scheduler.build(y), values)
        assert any(isinstance(e, DeviceLostError) for e in chain(told.value))
        scheduler = scheduler.without(device)
        np.testing.assert_allclose(scheduler.build(y).run(x=values), want, rtol=1e-6)
        assert device not in ow.devices()
        assert not device.alive
    finally:
        server.stop()
    assert ow.rescan() == ()
    with serve_process("--token-file", str(token), port=port) as again:
        (back,) = ow.rescan()
        assert back.name == device.name == f"remote:{again.address}/cpu"
        assert back in ow.devices()
        with scheduler.add(back, first=True) as scheduler:
            program = scheduler.build(y)
            np.testing.assert_array_equal(program.run(x=values), want)
            assert {s.target.device for s in program.splits} == {back}


@pytest.mark.parametrize("whole", [True, False])
def test_a_server_that_is_stopped_is_lost_within_the_deadline(server, token, whole):
    connection = opweave_remote.connect(server.address, token_file=token, deadline=2)
    device = connection.devices[0]
    assert device.mem_info()[1] > 0
    start = time.monotonic()
    try:
        stop_process(server.worker, *[server.process.pid] * whole)
        with pytest.raises(DeviceLostError, match="no sign of life" if whole else "stopped"):
            device.alloc(10)
        assert time.monotonic() - start < 4
    finally:
        server.signal(signal.SIGCONT)
    assert opweave_remote.connect(server.address, token_file=token).devices[0].mem_info()[1] > 0


@pytest.mark.parametrize("which", ["server", "client"])
def test_a_pause_that_is_shorter_than_the_deadline_loses_nothing(server, token, which):
    program = f"""if True:
        import os, subprocess, time
        import numpy as np, opweave as ow, opweave_remote

        connection = opweave_remote.connect({server.address!r}, token_file={str(token)!r}, deadline=8)
        with ow.Scheduler(connection.devices[0]) as scheduler:
            program = scheduler.build(ow.input("x", (8,)) * 2)
            numbers = {f"{server.worker} {server.process.pid}" if which == "server" else ""!r} or str(os.getpid())
            pause = subprocess.Popen(["sh", "-c", f"kill -STOP {{numbers}}; sleep 1; kill -CONT {{numbers}}"])
            paused = True
            while paused:  # the last run begins after the pause
                paused = pause.poll() is None
                values = np.random.default_rng().random(8, np.float32)
                assert np.array_equal(program.run(x=values), values * 2)
        print(connection.alive)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_long_kernel_is_no_lost_server(server, token):
    connection = opweave_remote.connect(server.address, token_file=token, deadline=0.4)
    x = ow.input("x", (1500, 1500))
    y = x
    for _ in range(6):
        y = ow.matmul(y, x)
    with ow.Scheduler(connection.devices[0]) as scheduler:
        program = scheduler.build(y)
        start = time.monotonic()
        while time.monotonic() - start < 1.2:
            program.run(x=np.eye(1500, dtype=F32))
    assert connection.alive


def test_sigterm_ends_a_server_in_order(token):
    server = ServerProcess("--token-file", str(token))
    connection = opweave_remote.connect(server.address, token_file=token)
    device = connection.devices[0]
    device.alloc(100)
    worker = server.worker
    assert server.stop() == 0
    assert not Path(f"/proc/{worker}").exists()
    with pytest.raises(DeviceLostError):
        device.alloc(100)


def test_a_server_that_is_starting_a_new_process_ends_at_once(token):
    server = ServerProcess("--token-file", str(token))
    os.kill(server.worker, signal.SIGKILL)
    assert server.process.stderr is not None
    assert "starting a new one" in server.process.stderr.readline()
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=30)
    assert (server.process.returncode, errors) == (0, "")
    assert time.monotonic() - start < 4


def test_metrics_are_shown_to_prometheus(counting, token):
    connection = opweave_remote.connect(counting.address, token_file=token)
    kept = connection.devices[0].alloc(12345)
    figures = until_it_shows(counting, clients=1, buffer_bytes=12345)
    assert figures["clients"] == 1
    assert figures["buffer_bytes"] == 12345
    kept.free()


def test_a_client_that_dies_leaves_nothing(counting, token):
    client = f"""if True:
        import os, signal, opweave_remote
        made = opweave_remote.connect({counting.address!r}, token_file={str(token)!r})
        made.devices[0].alloc(1 << 20).fill(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = until_it_shows(counting, clients=0)["clients_total"]
    ended = subprocess.run([sys.executable, "-c", client], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    figures = until_it_shows(counting, clients=0, buffer_bytes=0)
    assert figures["clients_total"] == before + 1
    assert figures["clients"] == figures["buffer_bytes"] == 0


CLIENT_MEMORY = 48 << 20

KILLED_CLIENTS = """
import os, random, signal, sys, time
import numpy as np
import opweave as ow
import opweave_remote

address, token, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
weights = [np.full((1024, 1024), 1 / 1024 + i * 1e-6, np.float32) for i in range(12)]
rng = random.Random(seed)
opweave_remote.connect(address, token_file=token).close()  # what is looked up once, its children find

def client(ready):
    x = ow.input("x", (64, 1024))
    y = x
    for w in weights:
        y = ow.tanh(ow.linear(y, ow.constant(w)))
    with ow.Scheduler(opweave_remote.connect(address, token_file=token).devices[0]) as scheduler:
        program = scheduler.build(y)
        program.run(x=np.ones((64, 1024), np.float32))
        os.write(ready, b"r")
        while True:
            program.run(x=np.ones((64, 1024), np.float32))

for _ in range(kills):
    seen, ready = os.pipe()
    child = os.fork()
    if not child:
        client(ready)
    os.close(ready)
    assert os.read(seen, 1) == b"r", "the client ended before it was killed"
    os.close(seen)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
"""


def resident(process):
    """Bytes of a process that are in memory, less what files have there."""
    fields = Path(f"/proc/{process}/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1]) << 10


def until_resident(process, limit):
    """`resident`, once it is below the limit, or after three seconds."""
    deadline = time.monotonic() + 3
    while (found := resident(process)) > limit and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_clients_that_are_killed_in_the_middle_of_a_run_leave_no_memory(counting, token):
    """`test_messages` has the same with more clients, which are no processes."""
    worker, limit = counting.worker, 0
    for seed in range(2):
        command = [sys.executable, "-c", KILLED_CLIENTS, counting.address, str(token)]
        subprocess.run([*command, str(KILLS // 5), str(seed)], timeout=300, check=True)
        figures = until_it_shows(counting, clients=0, connections=0, buffers=0, buffer_bytes=0)
        assert figures["clients"] == figures["connections"] == figures["buffers"] == figures["buffer_bytes"] == 0
        # Compiled kernels, and the memory of threads, stay from the first clients on.
        limit = limit or until_resident(worker, 0) + CLIENT_MEMORY // 2
        assert until_resident(worker, limit) <= limit, f"after {seed + 1} rounds of {KILLS // 5} clients"


def test_a_server_without_a_port_for_its_metrics_ends_with_its_process(counting, token):
    taken = counting.metrics.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(AssertionError, match="already in use"):
        ServerProcess("--token-file", str(token), "--metrics", taken)


def test_a_server_that_cannot_serve_says_why_and_ends(token):
    with pytest.raises(AssertionError, match="no device for others"):
        ServerProcess("--token-file", str(token), devices="host")


@pytest.mark.parametrize(
    ("where", "options", "words"),
    [
        ("127.0.0.1:0", {}, "neither a token nor a certificate"),
        ("0.0.0.0:0", {"token_file": "TOKEN"}, "TLS is needed"),
        ("127.0.0.1:0", {"token_file": "TOKEN", "cert": "x"}, "belong together"),
        ("127.0.0.1:0", {"client_ca": "x"}, "checked by TLS"),
        ("127.0.0.1:0", {"token_file": "/nowhere"}, "cannot be read"),
    ],
)
def test_a_server_that_would_let_in_anybody_does_not_start(token, where, options, words):
    given = dict.fromkeys(("token_file", "cert", "key", "client_ca"))
    given |= {k: str(token) if v == "TOKEN" else v for k, v in options.items()}
    with pytest.raises(Unavailable, match=words):
        check_way_in(Address.parse(where), **given)
