"""What a server offers beside devices: leases, direct copies over TLS, weights of its own, IPv6, what `opweave doctor`
says of it, and the example files."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import opweave as ow
import opweave_remote
from opweave.contract import Usage
from opweave_remote.device import RemoteDevice
from opweave_remote.doctor import diagnose
from opweave_remote.heartbeat import QUESTION, Life, answer, keep_asking, question, receive_exactly
from opweave_remote.link import Fate
from tests.support.processes import ROOT
from tests.support.proxy import Proxy
from tests.support.remote import serve_process

F32 = np.float32
SERVING = ROOT / "examples/serving"


def figures(server):
    text = urllib.request.urlopen(server.metrics, timeout=10).read().decode()
    return dict(line.split() for line in text.splitlines() if not line.startswith("#"))


def wait_until(done, seconds=20):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_client_that_is_silent_for_longer_than_its_lease_is_dropped(token):
    with serve_process("--token-file", str(token), "--metrics", "127.0.0.1:0", "--lease", "1.5") as server:
        client = f"""if True:
            import sys, opweave_remote
            made = opweave_remote.connect({server.address!r}, token_file={str(token)!r}, deadline=1)
            kept = made.devices[0].alloc(1 << 20)
            print("there", flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-c", client]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            time.sleep(2)  # its heartbeat keeps the lease
            assert figures(server)["opweave_remote_clients"] == "1"
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: figures(server)["opweave_remote_clients"] == "0")
            told = figures(server)
            assert told["opweave_remote_expired_total"] == "1"
            assert told["opweave_remote_buffer_bytes"] == "0"
            process.kill()


def test_the_first_question_of_a_patient_client_comes_at_once(monkeypatch):
    """A server ends new connections that say nothing for ten seconds, and clients that are silent for its lease."""
    key, session, fate = b"k" * 32, b"s" * 16, Fate("patient")
    monkeypatch.setattr("opweave_remote.heartbeat._MOST_PAUSE", 0.2)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(20)
        keep_asking(ours, fate, session, key, 3600)
        for number in (1, 2):
            assert receive_exactly(theirs, QUESTION.size) == question(session, key, number)
            theirs.sendall(answer(key, number, Life.RUNNING))
        fate.lose("enough", wanted=True)


@pytest.mark.parametrize("trusts", [True, False])
def test_servers_that_trust_each_other_copy_directly_over_tls(token, files, trusts, monkeypatch):
    options = ["--token-file", str(token), "--tls-cert", files("server.pem"), "--tls-key", files("server.key")]
    peers = ["--peer-ca", files("ca.pem")] if trusts else []
    with serve_process(*options) as first, serve_process(*options, *peers) as second:
        one, two = (
            opweave_remote.connect(server.address, token_file=token, ca=files("ca.pem")).devices[0]
            for server in (first, second)
        )
        values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
        read = []
        right = RemoteDevice.fetch

        def download(*args):
            read.append(args)
            right(*args)

        monkeypatch.setattr(RemoteDevice, "fetch", download)
        with one.alloc(1 << 20) as source, two.alloc(1 << 20) as target, two.open() as stream:
            source.upload(0, values)
            assert stream.copy_from(target, 0, source, 0, 1 << 20)
            stream.synchronize()
            assert bool(read) is not trusts
            np.testing.assert_array_equal(target.read(), values)


def test_weights_that_a_server_has_in_a_file_are_not_sent(token, tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((500, 700)).astype(F32), "v": rng.standard_normal((9, 9)).astype(F32)}
    save_file(weights, tmp_path / "own.safetensors")
    options = ["--cache", str(tmp_path / "cache"), "--weights", str(tmp_path / "own.safetensors")]
    with serve_process("--token-file", str(token), "--metrics", "127.0.0.1:0", *options) as server:
        connection = opweave_remote.connect(server.address, token_file=token)
        raw = weights["w"].view(np.uint8).reshape(-1)

        def found():
            """Whether it came from the file, which the server reads beside; what is sent is other each time."""
            hits = float(figures(server)["opweave_remote_cache_hits_total"])
            sent = connection.control.wire.sent + sum(link.wire.sent for link in connection._bulk)
            with connection.devices[0].alloc(raw.size, Usage.WEIGHTS) as buffer:
                buffer.upload(0, raw)
                np.testing.assert_array_equal(buffer.read(), raw)
            now = connection.control.wire.sent + sum(link.wire.sent for link in connection._bulk)
            hit = float(figures(server)["opweave_remote_cache_hits_total"]) > hits
            assert hit is (now - sent < raw.size)
            return hit

        wait_until(found)
        kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert len(kept) <= 1  # sent before the file was read


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_server_is_reached_by_ipv6(token):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with serve_process("--token-file", str(token), "--metrics", "[::1]:0", host="::1") as server:
        assert server.address.startswith("[::1]:")
        assert figures(server)["opweave_remote_clients"] == "0"
        opweave_remote.connect(server.address, token_file=token)
        device = ow.device(f"remote:{server.address}/cpu")
        with ow.Scheduler([device, "host"]) as scheduler:
            x = ow.input("x", (5,))
            np.testing.assert_array_equal(scheduler.build(x * 2).run(x=np.ones(5, F32)), np.full(5, 2, F32))
        with device.alloc(1 << 19) as source, device.alloc(1 << 19) as target, device.open() as stream:
            source.fill(3)
            stream.copy_from(target, 0, source, 0, 1 << 19)
            stream.synchronize()
            assert (target.read() == 3).all()


def test_the_doctor_tells_which_servers_answer_and_how_far_away_they_are(server, token, monkeypatch):
    assert list(diagnose()) == []
    monkeypatch.setenv("OPWEAVE_REMOTE_TOKEN_FILE", str(token))
    monkeypatch.setenv("OPWEAVE_REMOTE", "127.0.0.1:9")
    (told,) = diagnose()
    assert told.status == "wrong"
    assert "127.0.0.1:9 cannot be reached" in told.message
    assert "serve-devices" in told.remedy
    with Proxy(server.address, latency=0.02) as far:
        monkeypatch.setenv("OPWEAVE_REMOTE", f"127.0.0.1:9,{server.address},{far.address}")
        found = {one.about: one for one in diagnose()}
        assert found["remote 127.0.0.1:9"].status == "wrong"
        assert "1 devices" in found[f"remote {server.address}"].message
        assert found[f"remote {far.address}"].status == "slow"
        assert "large parts" in found[f"remote {far.address}"].remedy


# --- examples ---------------------------------------------------------------------------------------------------------


def unit_command():
    text = (SERVING / "opweave-devices.service").read_text().replace("\\\n", " ")
    return shlex.split(next(line for line in text.splitlines() if line.startswith("ExecStart=")).partition("=")[2])


def container_command():
    text = (SERVING / "Containerfile").read_text().replace("\\\n", " ")
    return json.loads(next(line for line in text.splitlines() if line.startswith("ENTRYPOINT")).partition(" ")[2])


@pytest.mark.parametrize("command", [unit_command(), container_command()], ids=["systemd", "container"])
def test_the_commands_of_the_examples_start_a_server(command, token, files, tmp_path):
    assert Path(command[0]).name == "opweave"
    assert command[1] == "serve-devices"
    here = {
        "--listen": "127.0.0.1:0", "--token-file": str(token), "--tls-cert": files("server.pem"),
        "--tls-key": files("server.key"), "--cache": str(tmp_path), "--metrics": "127.0.0.1:0",
    }  # fmt: skip
    options = command[2:]
    for i, option in enumerate(options[:-1]):
        options[i + 1] = here.get(option, options[i + 1])
    with serve_process(*options) as server:
        connection = opweave_remote.connect(server.address, token_file=token, ca=files("ca.pem"))
        connection.devices[0].alloc(10).free()
        connection.close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_takes_the_unit(tmp_path):
    text = (SERVING / "opweave-devices.service").read_text()
    unit = tmp_path / "opweave-devices.service"
    unit.write_text(text.replace(unit_command()[0], shutil.which("true") or "").replace("User=opweave", "User=root"))
    ended = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert "opweave-devices" not in ended.stderr, ended.stderr
    assert ended.returncode == 0
