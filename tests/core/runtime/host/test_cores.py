"""Processors that a process may use: by affinity, and by the quota of its control group and those around it."""

from __future__ import annotations

import pytest

from opweave.runtime.host.cores import Cores, usable_cores


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"), [(8, None, 8), (8, 2.0, 2), (8, 1.5, 2), (8, 0.2, 1), (2, 6.0, 2)]
)
def test_what_is_usable(affinity, quota, usable):
    assert Cores(16, affinity, quota).usable == usable


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def member(tmp_path):
    def member(*lines):
        (tmp_path / "cgroup").write_text("\n".join(lines))
        return usable_cores(tmp_path / "cgroup", tmp_path / "sys").quota

    return member


def test_version_2_the_least_quota_on_the_way_up_counts(tmp_path, member):
    write(tmp_path / "sys", cpu__max="max 100000")
    write(tmp_path / "sys/slice", cpu__max="150000 100000")
    write(tmp_path / "sys/slice/unit", cpu__max="400000 100000")
    assert member("0::/slice/unit") == 1.5
    assert member("0::/") is None


def test_version_1(tmp_path, member):
    write(tmp_path / "sys/cpu,cpuacct/docker/1", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    write(tmp_path / "sys/cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert member("5:memory:/docker/1", "4:cpu,cpuacct:/docker/1", "0::/") == 3.0


def test_in_a_container_the_path_may_be_that_outside_of_it(tmp_path, member):
    write(tmp_path / "sys", cpu__max="50000 100000")
    assert member("0::/outside/of/it") == 0.5


@pytest.mark.parametrize("text", ["", "max", "nonsense 5", "5 0", "\x00"])
def test_what_cannot_be_read_is_no_quota(tmp_path, member, text):
    write(tmp_path / "sys", cpu__max=text)
    assert member("0::/") is None
    assert member("nonsense", "") is None
    assert usable_cores(tmp_path / "nowhere", tmp_path).quota is None


def test_this_machine():
    cores = usable_cores()
    assert 1 <= cores.usable <= cores.affinity <= cores.machine
