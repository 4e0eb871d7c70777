"""Memory of NUMA nodes: which there are, by a folder as Linux writes it, and pages that the system has bound to one."""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Usage
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_cpu import CpuDevice, node_memory
from opweave_cpu.node_memory import NodeType, bind_to_node, free_bytes, memory_nodes

F = np.float32
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MEMINFO = "Node {0} MemTotal: 1000 kB\nNode {0} MemFree: {1} kB\nNode {0} Inactive(file): 8 kB\nNode {0} HugePages: 0\n"


def can_bind() -> bool:
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        bind_to_node(0, ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE)
    except OSError:
        return False
    return True


needs_mbind = pytest.mark.skipif(
    not can_bind() or platform.machine() not in GET_MEMPOLICY, reason="memory is not bound to nodes here"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes with processors, and one of memory only; node 3 has neither."""
    for node, processors, free in ((0, "0-3\n", 900), (1, "4-7\n", 100), (2, "\n", 4)):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(processors)
        (tmp_path / f"node{node}" / "meminfo").write_text(MEMINFO.format(node, free))
    (tmp_path / "has_memory").write_text("0-2\n")
    return tmp_path


def policy_at(address: int) -> tuple[int, int]:
    """What the system notes for the page: its policy, 2 being bound, and the nodes as bits."""
    mode, nodes = ctypes.c_int(), ctypes.c_ulong()
    libc = ctypes.CDLL(None)
    done = libc.syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.byref(mode), ctypes.byref(nodes), ctypes.c_ulong(65),
        ctypes.c_void_p(address), ctypes.c_ulong(2),
    )  # fmt: skip
    assert done == 0
    return mode.value, nodes.value


def test_each_node_has_a_kind_of_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_can_bind", lambda node: True)
    assert memory_nodes(root) == (0, 1, 2)
    device = CpuDevice()
    device.name = "cpu"
    kinds = [NodeType(device, node, root) for node in memory_nodes(root)]
    assert [kind.name for kind in kinds] == ["cpu.node0", "cpu.node1", "cpu.node2"]
    assert [sorted(kind.processors) for kind in kinds] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert all(kind.is_host and kind.is_raw and kind.holds(Usage.ANY) for kind in kinds)
    monkeypatch.setattr("opweave_cpu.device.memory_nodes", lambda: memory_nodes(root))
    monkeypatch.setattr("opweave_cpu.device.NodeType", partial(NodeType, root=root))
    assert [kind.name for kind in device.buffer_types if ".node" in kind.name] == [kind.name for kind in kinds]


def test_one_node_is_the_ordinary_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_can_bind", lambda node: node == 1)
    assert memory_nodes(root) == ()
    monkeypatch.setattr(node_memory, "_can_bind", lambda node: True)
    (root / "has_memory").write_text("0\n")
    assert memory_nodes(root) == ()
    assert memory_nodes(root / "nothing") == ()
    (root / "has_memory").write_text("what?\n")
    assert memory_nodes(root) == ()


def test_what_a_node_has_free_is_its_limit(root: Path) -> None:
    assert [free_bytes(node, root) for node in (0, 1, 2, 3)] == [908 << 10, 108 << 10, 12 << 10, None]
    device = CpuDevice()
    device.name = "cpu"
    before = RESERVATIONS.reserved
    with pytest.raises(ow.AllocationError, match=r"node 2 has 12,288 bytes free.*cpu.node2"):
        NodeType(device, 2, root).alloc(1 << 20)
    assert RESERVATIONS.reserved == before


@needs_mbind
def test_pages_are_bound_before_they_are_written() -> None:
    device = CpuDevice()
    device.name = "cpu"
    before = RESERVATIONS.reserved
    buffer = NodeType(device, 0).alloc(3 * mmap.PAGESIZE + 5)
    assert RESERVATIONS.reserved == before + 4 * mmap.PAGESIZE
    assert buffer.address is not None
    for at in (0, mmap.PAGESIZE, buffer.size - 1):
        assert policy_at(buffer.address + at) == (2, 1)
    assert policy_at(device.alloc(1 << 16).address or 0)[0] != 2
    data = np.random.default_rng(0).integers(0, 256, buffer.size).astype(np.uint8)
    buffer.upload(0, data)
    assert bytes(buffer.read()) == data.tobytes()
    buffer.free()
    del buffer
    assert RESERVATIONS.reserved == before


@needs_mbind
def test_a_node_that_is_not_there_is_an_error_and_leaves_nothing_allocated(root: Path) -> None:
    device = CpuDevice()
    device.name = "cpu"
    before = RESERVATIONS.reserved
    (root / "node64").mkdir()
    (root / "node64" / "cpulist").write_text("\n")
    with pytest.raises(ow.AllocationError, match="not bound to node 64"):
        NodeType(device, 64, root).alloc(100)
    assert RESERVATIONS.reserved == before
    with pytest.raises(ow.PluginError, match="no NUMA node 5"):
        NodeType(device, 5, root)


@needs_mbind
def test_weights_and_states_lie_on_a_node() -> None:
    device = CpuDevice()
    device.name = "cpu:bound"
    kind = NodeType(device, 0)
    device.__dict__["_nodes"] = (kind,)
    w = np.random.default_rng(1).standard_normal((64, 32)).astype(F)
    weight = ow.weights({"w": w}, buffer_type=kind)["w"]
    state = ow.state("bound-state", (4, 64), device=device, buffer_type="cpu:bound.node0")
    x = ow.input("bound-x", (4, 32))
    value = np.random.default_rng(2).standard_normal((4, 32)).astype(F)
    with ow.Scheduler([device], buffer_types={device: kind}) as scheduler:
        program = scheduler.build(ow.assign(state, ow.relu(ow.linear(x, weight)) + state))
        got = program.run({x: value})
        assert program.n_copies == 0
    np.testing.assert_allclose(got, np.maximum(value @ w.T, 0), rtol=1e-5, atol=1e-5)
    for leaf in (weight, state):
        assert leaf.placement is not None
        assert leaf.placement.buffer.type is kind
        assert policy_at(leaf.placement.buffer.address or 0) == (2, 1)
    np.testing.assert_array_equal(ow.read(weight), w)
