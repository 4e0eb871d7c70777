"""Built programs on disk: loaded instead of built, kept apart by what matters, rebuilt where damaged."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pyopencl as cl
import pytest

from opweave_opencl import caching
from opweave_opencl.caching import FOLDER, BinaryCache
from opweave_opencl.program import Programs
from tests.support.processes import run_script

SOURCE = "__kernel void set(__global int *out) { out[get_global_id(0)] = NUMBER; }"


@pytest.fixture
def cache(tmp_path):
    return BinaryCache(tmp_path / "cache")


def programs(device, cache):
    return Programs(device.name, device.context, device.cl_device, cache)


def value(device, program):
    """What the kernel ``set`` of a program writes."""
    out = np.zeros(4, np.int32)
    mem = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, out.nbytes)
    kernel = cl.Kernel(program, "set")
    kernel.set_arg(0, mem)
    cl.enqueue_nd_range_kernel(device.queue, kernel, (4,), (1,))
    cl.enqueue_copy(device.queue, out, mem)
    assert (out == out[0]).all()
    return out[0]


def from_source(monkeypatch):
    """Counts the programs that are built from a source from here on."""
    built: list[str] = []
    real = cl.Program

    def program(context, *rest):
        built.extend(rest[:1] if len(rest) == 1 else ())
        return real(context, *rest)

    monkeypatch.setattr(cl, "Program", program)
    return built


def test_a_program_is_built_once_for_all_processes(device, cache, monkeypatch):
    built = from_source(monkeypatch)
    assert value(device, programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7
    assert len(built) == 1
    assert value(device, programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7
    assert len(built) == 1
    assert value(device, programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "8"})) == 8
    assert len(built) == 2
    assert len(os.listdir(cache.folder)) == 2


def test_kernels_of_loaded_programs_are_made_without_looking_for_others(device, cache, monkeypatch):
    programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})
    loaded = programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})
    looked_for = []
    monkeypatch.setattr(cl.Program, "__getattr__", lambda program, name: looked_for.append(name))
    cl.Kernel(loaded, "set")
    assert looked_for == []


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b"", lambda b: b[:-1] + bytes((b[-1] ^ 1,))])
def test_damaged_entries_are_rebuilt(device, cache, monkeypatch, damage):
    programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})
    (path,) = cache.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    built = from_source(monkeypatch)
    assert value(device, programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7
    assert len(built) == 1
    assert programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})
    assert len(built) == 1


def test_binaries_that_the_driver_refuses_are_rebuilt(device, cache, monkeypatch):
    programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})
    built, real = from_source(monkeypatch), cl.Program

    def refusing(context, *rest):
        if len(rest) > 1:
            raise cl.RuntimeError("CL_INVALID_BINARY")
        return real(context, *rest)

    monkeypatch.setattr(cl, "Program", refusing)
    assert value(device, programs(device, cache).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7
    assert len(built) == 1


def test_keys_distinguish_what_is_built():
    keys = {BinaryCache.key(parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ())}
    assert len(keys) == 5
    assert BinaryCache.key(("ab", "c")) in keys


def test_devices_and_drivers_have_entries_of_their_own(device, cache):
    first, second = programs(device, cache), programs(device, cache)
    second._identity = (*second._identity[:-1], "another driver")
    first.build("set.cl", SOURCE, {"NUMBER": "7"})
    second.build("set.cl", SOURCE, {"NUMBER": "7"})
    assert len(os.listdir(cache.folder)) == 2


def test_a_folder_that_cannot_be_written(device, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    unwritable = BinaryCache(tmp_path / "file" / "cache")
    assert value(device, programs(device, unwritable).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7


def test_without_a_folder_nothing_is_kept(device, monkeypatch):
    monkeypatch.setenv(FOLDER, "0")
    none = BinaryCache()
    assert none.folder is None
    none.store("key", b"binary")
    assert none.load("key") is None
    assert value(device, programs(device, none).build("set.cl", SOURCE, {"NUMBER": "7"})) == 7


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert BinaryCache().folder == tmp_path
    monkeypatch.delenv(FOLDER)
    folder = BinaryCache().folder
    assert folder is not None
    assert folder.parts[-2:] == ("opweave", "opencl")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert BinaryCache().folder == tmp_path / "opweave" / "opencl"


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "LIMIT", 4096)
    old = BinaryCache(tmp_path)
    for age, key in enumerate("abcde"):
        old.store(key, bytes(1000))
        os.utime(tmp_path / key, (1_000_000 + age, 1_000_000 + age))
    assert old.load("a")  # used again
    fresh = BinaryCache(tmp_path)
    fresh.store("f", bytes(10))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "f"}


def test_another_process_loads_what_this_one_built(device, tmp_path):
    code = """if True:
        import sys, pyopencl as cl
        from opweave_opencl import OpenCLBackend
        device = next(d for d in OpenCLBackend().devices() if d.id == sys.argv[2])
        real, sources = cl.Program, []
        def program(context, *rest):
            sources.extend(rest[:1] if len(rest) == 1 else ())
            return real(context, *rest)
        cl.Program = program
        device.programs.build("set.cl", sys.argv[1], {"NUMBER": "7"})
        print(len(sources))
    """
    environment = {**os.environ, FOLDER: str(tmp_path)}
    for expected in ("1", "0"):
        command = [sys.executable, "-c", code, SOURCE, device.id]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected


def test_a_user_without_a_folder_for_caches_computes_on_every_device(tmp_path):
    code = """
        device = ow.device("opencl")
        with ow.Scheduler([device]) as scheduler:
            scheduler.build(ow.exp(x)).run(x=ONES)
        assert not os.environ["XDG_CACHE_HOME"], "as it was"
        print("computed")
    """
    unset = {"XDG_CACHE_HOME": "", "OPWEAVE_OPENCL_CACHE": "", "PYOPENCL_NO_CACHE": "false"}
    done = run_script(code, HOME=f"{os.devnull}/nobody", TMPDIR=str(tmp_path), **unset)
    assert done.stdout.strip() == "computed", done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [folder.name for folder in tmp_path.glob("opweave-*")], "kept among the temporary files"
