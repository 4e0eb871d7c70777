"""`NodeType`: memory of one NUMA node, where a machine has several; also of nodes without processors, such as
high-bandwidth memory beside the ordinary one.

Elsewhere the system takes pages from the node whose processor touches them first. Pages of a `NodeType` are bound to
their node (``mbind``) before that: whoever writes them, they lie there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import BufferType, Usage
from opweave.runtime.host.threads import NODES, node_processors, numbers_in
from opweave_cpu.pages import allocate_pages

if TYPE_CHECKING:
    import numpy as np

    from opweave.contract import Device

__all__ = ["NodeType", "bind_to_node", "memory_nodes"]

_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
"""The number of Linux's system call ``mbind``, by processor: the C library has no function for it."""

_MPOL_BIND: Final = 2
_WORD: Final = 64


class NodeType(BufferType):
    """Ordinary memory whose pages lie on one NUMA node: ``buffer_type="cpu.node1"``. Its buffers take whole pages.

    Args:
        device: whose memory it is.
        node: the system's number of the node.
        root: the folder in which Linux lists the nodes.

    Attributes:
        node: the number.
        processors: the numbers of its processors; none for memory of its own, such as high-bandwidth memory.
    """

    def __init__(self, device: Device, node: int, root: Path = NODES) -> None:
        super().__init__(device, f"{device.name}.node{node}")
        self.node: Final = node
        self.processors: Final = node_processors(node, root)
        self._root: Final = root

    def _alloc(self, size: int, usage: Usage) -> np.ndarray[Any, Any]:
        free = free_bytes(self.node, self._root)
        if free is not None and size > free:  # the system ends processes that write bound pages when a node is full
            raise MemoryError(f"node {self.node} has {free:,} bytes free")
        return allocate_pages(size, mmap.PAGESIZE, partial(_bind, self.node))


def _bind(node: int, pages: mmap.mmap, offset: int, size: int, address: int) -> None:
    bind_to_node(node, address, size)


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """The nodes with memory to which this process can bind pages, by their numbers; none where there is only one.

    Args:
        root: the folder in which Linux lists the nodes.
    """
    try:
        nodes = sorted(numbers_in((root / "has_memory").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return ()
    usable = tuple(node for node in nodes if _can_bind(node))
    return usable if len(usable) > 1 else ()


def free_bytes(node: int, root: Path = NODES) -> int | None:
    """The bytes that a node has free, or holds as a cache of files; ``None`` if the system does not tell."""
    try:
        lines = (root / f"node{node}" / "meminfo").read_text(encoding="ascii").splitlines()
        found = {words[2]: int(words[3]) << 10 for words in map(str.split, lines) if words[-1:] == ["kB"]}
        return found["MemFree:"] + found.get("Active(file):", 0) + found.get("Inactive(file):", 0)
    except (OSError, ValueError, IndexError, KeyError):
        return None


def bind_to_node(node: int, address: int, size: int) -> None:
    """Have pages that nothing has touched yet lie on a NUMA node.

    Raises:
        OSError: there is no such node, the process may not use it, or this system does not bind memory to nodes.
    """
    call = _MBIND.get(platform.machine()) if os.name == "posix" and platform.system() == "Linux" else None
    if call is None:
        raise OSError(errno.ENOSYS, "this system does not bind memory to nodes")
    words = (ctypes.c_ulong * (node // _WORD + 1))()
    words[node // _WORD] = 1 << node % _WORD
    # The kernel reads one bit less than it is told that there are.
    args = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_long(_MPOL_BIND), words,
            ctypes.c_ulong(len(words) * _WORD + 1), ctypes.c_uint(0))  # fmt: skip
    if _libc().syscall(ctypes.c_long(call), *args):
        number = ctypes.get_errno()
        raise OSError(number, f"memory is not bound to node {node}: {os.strerror(number)}")


def _can_bind(node: int) -> bool:
    """Whether `bind_to_node` works: containers often forbid the call, or allow some nodes only."""
    try:
        allocate_pages(1, mmap.PAGESIZE, partial(_bind, node))
    except MemoryError:
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
