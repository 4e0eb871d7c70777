"""What a remote device costs: one split over loopback beside a bare round trip, large transfers beside a bare socket.

The server is a process of its own, and so is the bare one, which sends back 100 bytes, or takes and sends a block, by
blocking sockets with TCP_NODELAY. Limits: a split takes at most 1.3 bare round trips and 20 us; large transfers reach
0.8 of what the bare socket does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import opweave as ow
import opweave_remote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options

ECHO = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
view = memoryview(bytearray(int(sys.argv[1])))
while True:
    try:
        got = sock.recv_into(view[:100])
    except ConnectionResetError:
        break
    if not got:
        break
    if view[0] == 1:
        at = 0
        while at < len(view):
            at += sock.recv_into(view[at:])
    if view[0] == 2:
        sock.sendall(view)
    view[0] = 0
    sock.sendall(view[:100])
"""
"""Answers 100 bytes with 100 bytes; takes a block before that where they begin with 1, sends one where with 2."""


def server(folder: str) -> tuple[subprocess.Popen[str], str, str]:
    token = f"{folder}/token"
    command = [sys.executable, "-m", "opweave", "serve-devices"]
    subprocess.run([*command, "--make-token", token], check=True)
    own = ["--listen", "127.0.0.1:0", "--token-file", token, "--devices", "cpu", "--grace", "0"]
    process = subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[2].rstrip(":"), token


def main() -> None:
    given = options(__doc__ or "")
    report = Report("remote", given)
    samples, size = (20, 16 << 20) if given.quick else (150, 64 << 20)
    bare = subprocess.Popen([sys.executable, "-c", ECHO, str(size)], stdout=subprocess.PIPE, text=True)
    assert bare.stdout is not None
    with (
        socket.create_connection(("127.0.0.1", int(bare.stdout.readline()))) as sock,
        tempfile.TemporaryDirectory() as at,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        process, address, token = server(at)
        try:
            device = opweave_remote.connect(address, token_file=token).devices[0]
            _small(report, device, sock, samples)
            _large(report, device, sock, size, max(samples // 10, 5))
        finally:
            process.terminate()
            process.wait()
    bare.wait()
    report.finish("A remote device on loopback beside bare sockets")


def _small(report: Report, device: ow.Device, sock: socket.socket, samples: int) -> None:
    message, answer = bytes(100), bytearray(100)

    def round_trip() -> None:
        sock.sendall(message)
        sock.recv_into(answer)

    x, values = ow.input("x", (16,)), np.ones(16, np.float32)
    with ow.Scheduler(device) as there, ow.Scheduler("cpu") as here:
        remote, local = there.build(x + 1), here.build(x + 1)
        timed = interleaved(
            {"bare": round_trip, "remote": lambda: remote.run(x=values), "local": lambda: local.run(x=values)}, samples
        )
    best = {name: min(values) * 1e6 for name, values in timed.items()}
    report.row(what="one split of 16 numbers", us=best["remote"], bare_us=best["bare"], local_us=best["local"])
    report.target("split beyond the local run", best["remote"] - best["local"], 1.3 * best["bare"] + 20, "us")


def _large(report: Report, device: ow.Device, sock: socket.socket, size: int, samples: int) -> None:
    block, answer = np.ones(size, np.uint8), bytearray(100)
    view = block.data

    def up() -> None:
        sock.sendall(b"\1" + bytes(99))
        sock.sendall(view)
        sock.recv_into(answer)

    def down() -> None:
        sock.sendall(b"\2" + bytes(99))
        at = 0
        while at < size:
            at += sock.recv_into(view[at:])
        sock.recv_into(answer)

    with device.alloc(size) as buffer:
        timed = interleaved(
            {"up": lambda: buffer.upload(0, block), "bare up": up, "down": lambda: buffer.download(0, block),
             "bare down": down}, samples,
        )  # fmt: skip
    best = {name: min(values) for name, values in timed.items()}
    for way in ("up", "down"):
        ratio = best[way] / best[f"bare {way}"]
        report.row(
            what=f"{size >> 20} MiB {way}", gb_s=size / best[way] / 1e9, bare_gb_s=size / best[f"bare {way}"] / 1e9
        )
        report.target(f"{way} beside a bare socket", ratio, 1 / 0.8, "")


if __name__ == "__main__":
    main()
