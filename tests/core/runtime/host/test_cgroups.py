"""What control groups leave to this process, with files as Linux writes them."""

from __future__ import annotations

import pytest

from opweave.errors import AllocationError
from opweave.runtime.host import memory, reservations
from opweave.runtime.host.cgroups import memory_bounds
from opweave.runtime.host.device import HostDevice

MIB = 1 << 20


@pytest.fixture
def bounds(tmp_path):
    def bounds(membership, files):
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return memory_bounds(tmp_path / "cgroup", tmp_path / "sys")

    return bounds


def version_2(folder, limit, used, files=0):
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon {used - files}\ninactive_file {files}",
    }


def test_no_groups_no_bounds(bounds, tmp_path):
    assert memory_bounds(tmp_path / "nothing", tmp_path) is None
    assert bounds("0::/\n", version_2(".", "max", 5 * MIB)) is None


def test_version_2_the_tightest_group_counts_and_files_are_given_back(bounds):
    files = version_2("job", 512 * MIB, 100 * MIB, 40 * MIB) | version_2("job/step", 900 * MIB, 80 * MIB)
    assert bounds("0::/job/step\n", files) == (452 * MIB, 512 * MIB)


def test_version_1(bounds):
    files = {
        "memory/docker/memory.limit_in_bytes": 64 * MIB,
        "memory/docker/memory.usage_in_bytes": 70 * MIB,
        "memory/docker/memory.stat": f"inactive_file 1\ntotal_inactive_file {16 * MIB}",
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 70 * MIB,
        "memory/memory.stat": "total_inactive_file 0",
    }
    assert bounds("5:cpu:/docker\n4:memory:/docker\n", files) == (10 * MIB, 64 * MIB)


def test_a_container_has_the_memory_of_its_group(monkeypatch):
    monkeypatch.setattr(memory, "memory_bounds", lambda: (6 * MIB, 8 * MIB))
    monkeypatch.setattr(reservations, "memory_bounds", lambda: (6 * MIB, 8 * MIB))
    monkeypatch.setattr(reservations, "RESERVATIONS", reservations.Reservations())
    monkeypatch.setattr(memory, "RESERVATIONS", reservations.RESERVATIONS)
    known = reservations.meminfo()
    if "MemAvailable" not in known:
        pytest.skip("the system does not tell")
    monkeypatch.setattr(reservations, "meminfo", lambda: known | {"SwapFree": 0})
    device = HostDevice()
    assert device.mem_info() == (6 * MIB, 8 * MIB)
    with pytest.raises(AllocationError):
        device.alloc(7 * MIB)
    device.alloc(2 * MIB).free()
