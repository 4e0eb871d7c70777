"""What a remote device costs: one split over loopback beside a bare round trip, large transfers beside a bare socket, a
transformer pipelined over two servers beside one; what TLS costs; what compressing gains on a slow network; where ggml
with its RPC server is to be had, a stack of products beside it; where Ray is installed, a split and a large upload
beside an actor's call and its object store.

The server is a process of its own, and so is the bare one, which sends back 100 bytes, or takes and sends a block, by
blocking sockets with TCP_NODELAY. Limits: a split takes at most 1.3 bare round trips and 20 us; large transfers reach
0.8 of what the bare socket does; two servers do at least 1.6 times the work of one, where there are processors for
both; a call of a Ray actor takes at least 5 times what a split takes; what-if predicts 0.75 to 1.25 of what runs take.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow
import opweave_cost
import opweave_remote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks import _ggml_rpc
from benchmarks._measure import Report, interleaved, options
from benchmarks.placement import least
from examples import text
from opweave_remote.packing import Packing
from tests.support.proxy import Proxy

ECHO = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
view, order = memoryview(bytearray(int(sys.argv[1]))), bytearray(100)
while True:
    try:
        got = sock.recv_into(order)
    except ConnectionResetError:
        break
    if not got:
        break
    if order[0] == 1:
        at = 0
        while at < len(view):
            at += sock.recv_into(view[at:])
    if order[0] == 2:
        sock.sendall(view)
    sock.sendall(bytes(100))
"""
"""Answers 100 bytes with 100 bytes; takes a block before that where they begin with 1, sends one where with 2."""


KERNELS = """
import sys
import numpy as np
import opweave as ow
from examples import text
layers, rows = int(sys.argv[1]), 64
size = text.Size(layers=layers, width=256, heads=8, context=rows)
ids, values = ow.input("ids", (4, rows), "i32"), np.random.default_rng(0).integers(0, 80, (4, rows)).astype(np.int32)
with ow.Scheduler(["cpu", "host"]) as scheduler:
    program = scheduler.build(text.transformer(ids, ow.weights(text.parameters(80, size)), size))
    program.run(ids=values)
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            program.run(ids=values)
        print("done", flush=True)
"""
"""Runs a transformer of some layers, as often as each line says, and answers; without any server."""


def _block(size: int) -> np.ndarray[Any, Any]:
    """Bytes that nobody can compress: the peers do not compress, and a connection that is measured to be slow does."""
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def server(folder: str, *options: str, devices: str = "cpu") -> tuple[subprocess.Popen[str], str, str]:
    token = f"{folder}/token"
    command = [sys.executable, "-m", "opweave", "serve-devices"]
    subprocess.run([*command, "--make-token", token], check=True)
    own = ["--listen", "127.0.0.1:0", "--token-file", token, "--devices", devices, "--grace", "0", *options]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True, env=one_thread)
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
            _small(report, device, sock, samples, "wherever the system puts them")
            _large(report, device, sock, size, 15)
            _beside_ggml(report, samples)
            _over_tls(report, device, samples, size)
            _what_if(report, 5 if given.quick else 30)
            _by_slow_network(report, address, token, device)
            _pipelined(report, 40)
            if importlib.util.find_spec("ray") is not None:
                _beside_ray(report, device, samples, size)
        finally:
            process.terminate()
            process.wait()
    bare.wait()
    _small_on_one_processor(report, samples)
    report.finish("A remote device on loopback beside bare sockets")


@contextmanager
def one_processor() -> Iterator[None]:
    """This process, and those that it starts within the block, on the last of its processors; where a system cannot do
    that, wherever it puts them."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _small_on_one_processor(report: Report, samples: int) -> None:
    """The same with all processes on one processor, so that nobody waits for an idle one to wake up: that takes more
    than all the rest, and the system decides for whom."""
    with one_processor():
        bare = subprocess.Popen([sys.executable, "-c", ECHO, "1"], stdout=subprocess.PIPE, text=True)
        assert bare.stdout is not None
        address = "127.0.0.1", int(bare.stdout.readline())
        with socket.create_connection(address) as sock, tempfile.TemporaryDirectory() as at:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            process, where, token = server(at)
            try:
                connection = opweave_remote.connect(where, token_file=token)
                _small(report, connection.devices[0], sock, samples, "on one processor")
                connection.close()
            finally:
                process.terminate()
                process.wait()
        bare.wait()


def _small(report: Report, device: ow.Device, sock: socket.socket, samples: int, where: str) -> None:
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
    report.row(
        what=f"one split of 16 numbers, {where}", us=best["remote"], bare_us=best["bare"], local_us=best["local"]
    )
    report.target(f"split beyond the local run, {where}", best["remote"] - best["local"], 1.3 * best["bare"] + 20, "us")


def _beside_ggml(report: Report, samples: int) -> None:
    """Eight products, one behind the other, on ggml's RPC server and on this one, both on the same one processor. This
    one shows the devices that compute in `f32` there, and `opweave_cost.tune` chooses among them, as a user would."""
    reason = _ggml_rpc.why_not()
    if reason:
        report.row(what=f"ggml's RPC server: {reason}")
        return
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((256, 256)) / 16).astype(np.float32) for _ in range(8)]
    shown = "cpu,ort:cpu" if importlib.util.find_spec("opweave_ort") is not None else "cpu"
    with ExitStack() as stack:
        with one_processor():
            process, where, token = server(stack.enter_context(tempfile.TemporaryDirectory()), devices=shown)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            theirs, address = _ggml_rpc.start_server(1)
            stack.callback(theirs.wait)
            stack.callback(theirs.kill)
        connection = opweave_remote.connect(where, token_file=token)
        stack.callback(connection.close)
        for rows in (1, 64):
            values = rng.standard_normal((rows, 256)).astype(np.float32)
            node = x = ow.input("x", values.shape)
            for w in weights:
                node = ow.linear(node, ow.constant(w))
            their_run = _ggml_rpc.stack(address, weights, values)
            with ow.Scheduler(connection.devices) as scheduler:
                program = scheduler.build(node, pins=opweave_cost.tune(scheduler, node, {x: values}).pins)
                np.testing.assert_allclose(their_run(), program.run({x: values}), atol=1e-4)
                timed = interleaved({"ours": partial(program.run, x=values), "ggml": their_run}, samples)
                chosen = program.splits[0].target.device.name.partition("/")[2]
            best = {name: min(seconds) for name, seconds in timed.items()}
            report.row(what=f"eight products of {rows} rows, by {chosen}", us=best["ours"] * 1e6)
            report.row(what=f"eight products of {rows} rows, ggml's RPC server", us=best["ggml"] * 1e6)
            report.target(f"{rows} rows beside ggml's RPC server", best["ours"] / best["ggml"], 1, "")


def _over_tls(report: Report, device: ow.Device, samples: int, size: int) -> None:
    """What TLS costs: a split and large transfers, beside the same without."""
    if importlib.util.find_spec("trustme") is None:
        report.row(what="TLS: trustme, which makes the certificate, is not installed")
        return
    block, x = _block(size), ow.input("x", (16,))
    with ExitStack() as stack:
        secure = _secure(stack)
        small: dict[str, Callable[[], object]] = {}
        large: dict[str, Callable[[], object]] = {}
        for name, used in (("TLS", secure), ("plain", device)):
            program = stack.enter_context(ow.Scheduler(used)).build(x + 1)
            buffer = stack.enter_context(used.alloc(size))
            small[name] = partial(program.run, x=np.ones(16, np.float32))
            large[f"{name} up"] = partial(buffer.upload, 0, block)
            large[f"{name} down"] = partial(buffer.download, 0, block)
        best = {name: min(seconds) for name, seconds in interleaved(small, samples).items()}
        best |= {name: min(seconds) for name, seconds in interleaved(large, max(samples // 10, 5)).items()}
    report.row(what="one split by TLS", us=best["TLS"] * 1e6)
    report.row(what="one split without, at the same time", us=best["plain"] * 1e6)
    for way in ("up", "down"):
        for name in ("TLS", "plain"):
            report.row(what=f"{size >> 20} MiB {way}, {name}", gb_s=size / best[f"{name} {way}"] / 1e9)


def _secure(stack: ExitStack) -> ow.Device:
    """A device of a server of its own, by TLS with a certificate made for it."""
    trustme: Any = importlib.import_module("trustme")
    ca = trustme.CA()
    at = stack.enter_context(tempfile.TemporaryDirectory())
    ca.cert_pem.write_to_path(f"{at}/ca.pem")
    made = ca.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(f"{at}/key.pem")
    made.cert_chain_pems[0].write_to_path(f"{at}/cert.pem")
    process, address, token = server(at, "--tls-cert", f"{at}/cert.pem", "--tls-key", f"{at}/key.pem")
    stack.callback(process.wait)
    stack.callback(process.terminate)
    connection = opweave_remote.connect(address, token_file=token, ca=f"{at}/ca.pem")
    stack.callback(connection.close)
    return connection.devices[0]


def _what_if(report: Report, samples: int) -> None:
    """Predicted over measured seconds, by TLS: six layers on a simulated device like the remote one, and the third and
    fourth of them on one like the CPU here. Profiles and steps are measured anew, with one thread on each side."""
    if importlib.util.find_spec("trustme") is None:
        report.row(what="what-if: trustme, which makes the certificate, is not installed")
        return
    rng = np.random.default_rng(0)
    y = x = ow.input("x", (64, 256))
    value = {x.name: rng.standard_normal(x.shape, np.float32)}
    layers = []
    for _ in range(6):
        product = ow.linear(y, ow.constant(rng.standard_normal((256, 256), np.float32) / np.float32(16)))
        y = ow.relu(product)
        layers.append((product, y))
    cpu: Any = ow.backend("cpu")
    cpu.set_threads(1)
    with ExitStack() as stack:
        stack.callback(cpu.set_threads, None)
        far, here = _secure(stack), ow.device("cpu")
        guesses: dict[str, float] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for device in (far, here):
            opweave_cost.profile(device, refresh=True)
            opweave_cost.measure_steps(y, device)
        like_far, like_here = opweave_cost.simulate("like far", like=far), opweave_cost.simulate("like here", like=here)
        for way, local in (("there", ()), ("there, back and there", layers[2:4])):
            place = {n: (like_here, here) if layer in local else (like_far, far) for layer in layers for n in layer}
            planned = ow.Scheduler([like_far, like_here]).partition(y, {n: like for n, (like, _) in place.items()})
            guesses[way] = planned.predicted.seconds
            scheduler = stack.enter_context(ow.Scheduler([far, here]))
            calls[way] = partial(scheduler.build(y, pins={n: real for n, (_, real) in place.items()}).run, value)
        timed = least(calls, samples)
    for way, seconds in timed.items():
        ratio = guesses[way] / seconds
        report.row(what=f"what-if, {way}", predicted_us=guesses[way] * 1e6, us=seconds * 1e6, ratio=ratio)
        report.target(f"what-if, {way}: predicted over measured", ratio, 1.25, "")
        report.target(f"what-if, {way}: measured over predicted", 1 / ratio, 1 / 0.75, "")


def _by_slow_network(report: Report, address: str, token: str, near: ow.Device) -> None:
    """Weights of bf16 over a connection of 20 MB/s: compressed by measurement, and as they are."""
    size = 8 << 20
    weights = (np.random.default_rng(0).standard_normal(size // 2).astype(np.float32).view(np.uint32) >> 16).astype(
        "u2"
    )
    with Proxy(address, rate=20e6) as proxy, ExitStack() as stack:
        far = opweave_remote.connect(proxy.address, token_file=token)
        stack.callback(far.close)
        plain = opweave_remote.connect(proxy.address.replace("127.0.0.1", "localhost"), token_file=token)
        stack.callback(plain.close)
        plain.packing = Packing(plain.bulk, [])  # a server that knows no codecs
        devices = {"compressed by measurement": far.devices[0], "as it is": plain.devices[0], "over loopback": near}
        buffers = {name: stack.enter_context(device.alloc(size)) for name, device in devices.items()}
        timed = interleaved({name: partial(b.upload, 0, weights) for name, b in buffers.items()}, 5)
        used = far.packing
    best = {name: min(seconds) for name, seconds in timed.items()}
    for name, seconds in best.items():
        report.row(what=f"8 MiB of bf16 up, {'20 MB/s, ' * (name != 'over loopback')}{name}", gb_s=size / seconds / 1e9)
    report.row(what=f"compressed by {used.codec} to {used.packed / max(used.raw, 1):.2f} of its size")
    report.target("compressed beside as it is, 20 MB/s", best["compressed by measurement"] / best["as it is"], 0.9, "")


def _beside_ray(report: Report, device: ow.Device, samples: int, size: int) -> None:
    """A split beside a call of a Ray actor that does the same. The last one: Ray's processes are never idle."""
    ray: Any = importlib.import_module("ray")
    x, values = ow.input("x", (16,)), np.ones(16, np.float32)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actor = ray.remote(Adder).remote()
        block = _block(size)
        with device.alloc(size) as buffer:
            large = interleaved(
                {"remote": lambda: buffer.upload(0, block), "ray": lambda: ray.get(actor.touch.remote(ray.put(block)))},
                max(samples // 10, 5),
            )
        measured = _by_ray() if importlib.util.find_spec("opweave_ray") is not None else {}
        with ow.Scheduler(device) as scheduler:
            program = scheduler.build(x + 1)
            timed = interleaved(
                {"remote": lambda: program.run(x=values), "ray": lambda: ray.get(actor.add.remote(values))}, samples
            )
    finally:
        ray.shutdown()
    for way, (store, sockets) in measured.items():
        report.row(what=f"a Ray cluster's node, {way}, by its object store", gb_s=store / 1e9)
        report.row(what=f"a Ray cluster's node, {way}, by sockets with TLS", gb_s=sockets / 1e9)
    for name, what in (("remote", "up beside Ray"), ("ray", "to an actor by Ray's object store")):
        report.row(what=f"{size >> 20} MiB {what}", gb_s=size / min(large[name]) / 1e9)
    best = {name: min(values) * 1e6 for name, values in timed.items()}
    report.row(what="a split beside Ray", us=best["remote"])
    report.row(what="a call of a Ray actor", us=best["ray"])
    report.target("split beside a call of a Ray actor", best["remote"] / best["ray"], 1 / 5, "")


def _by_ray() -> dict[str, tuple[float, float]]:
    """What the connection to a node measures at its first large transfer: bytes per second by Ray's object store, and
    by the connection's sockets; the faster one is used from then on."""
    opweave_ray: Any = importlib.import_module("opweave_ray")
    with opweave_ray.connect(devices=["cpu"], gpus=False) as cluster:
        connection = cluster.devices[0].connection
        with cluster.devices[0].alloc(connection.carrier.least) as buffer:
            buffer.upload(0, np.ones(buffer.size, np.uint8))
        rates: dict[str, tuple[float, float]] = connection.carrier.rates
        return rates


class Adder:
    """Adds 1, and takes arrays."""

    def add(self, x: Any) -> Any:
        return x + 1

    def touch(self, block: Any) -> int:
        """Copies an array to memory of its own, as an upload to a device does."""
        self.kept = np.array(block)
        return int(self.kept[-1])


def _pipelined(report: Report, runs: int) -> None:
    """A transformer with its layers on one server, and on two. The second server waits for the first run, and the first
    one at the end for the last: with 8 runs that alone would be 1/9 of the time."""
    size = text.Size(layers=4, width=256, heads=8, context=64)
    arrays, ids = text.parameters(80, size), ow.input("ids", (4, 64), "i32")
    values = np.random.default_rng(0).integers(0, 80, (4, 64)).astype(np.int32)
    with ExitStack() as stack:
        devices = []
        for _ in range(2):
            process, address, token = server(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.callback(process.wait)
            stack.callback(process.terminate)
            devices.append(opweave_remote.connect(address, token_file=token).devices[0])
        contestants = {}
        for name, used in (("one", devices[:1]), ("two", devices)):
            scheduler = stack.enter_context(ow.Scheduler([*used, "host"], parallel=True))
            weights = ow.weights(arrays, {f"{i}.*": used[i * len(used) // 4].name for i in range(4)})
            program = scheduler.build(text.transformer(ids, weights, size))

            def stream(program: ow.Program = program) -> None:
                for future in [program.submit(ids=values) for _ in range(runs)]:
                    future.result()

            contestants[name] = stream
        timed = interleaved(contestants, 3)
    best = {name: min(seconds) for name, seconds in timed.items()}
    report.row(what=f"{runs} runs of a transformer, two servers", us=best["two"] * 1e6)
    report.row(what=f"{runs} runs of a transformer, one server", us=best["one"] * 1e6)
    report.target("two servers beside one", best["two"] / best["one"], 1 / 1.6, "")
    _in_bare_processes(report, runs)


def _in_bare_processes(report: Report, runs: int) -> None:
    """What the machine makes of two processes that compute at once and exchange nothing: the bound for two servers."""
    root = str(Path(__file__).resolve().parents[1])
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, "-c", KERNELS, "2"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    with ExitStack() as stack:
        both: list[Any] = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for process in both:
            process.stdout.readline()

        def compute(used: list[Any], times: int) -> None:
            for process in used:
                print(times, file=process.stdin, flush=True)
            for process in used:
                process.stdout.readline()

        timed = interleaved({"one": lambda: compute(both[:1], 2 * runs), "two": lambda: compute(both, runs)}, 3)
    ratio = min(timed["two"]) / min(timed["one"])
    report.row(what=f"{2 * runs} runs of half a transformer, two bare processes", us=min(timed["two"]) * 1e6)
    report.row(what=f"{2 * runs} runs of half a transformer, one bare process", us=min(timed["one"]) * 1e6)
    report.row(what=f"two bare processes beside one: {ratio:.3f}")


def _large(report: Report, device: ow.Device, sock: socket.socket, size: int, samples: int) -> None:
    block, answer = _block(size), bytearray(100)
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
