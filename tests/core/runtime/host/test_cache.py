"""Cache files: the contents of the folder, and its path on machines of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opweave.runtime.host import cache as module
from opweave.runtime.host.cache import FileCache, user_cache

VARIABLE = "OPWEAVE_CACHE_OF_A_TEST"
POSIX = pytest.mark.skipif(os.name != "posix", reason="named pipes and devices as files")


@pytest.fixture
def cache(tmp_path):
    return FileCache(VARIABLE, "test", tmp_path / "cache", largest=1000)


@pytest.fixture(autouse=True)
def forgetful():
    """A process that has not yet said where it keeps caches."""
    module._temporary.cache_clear()
    yield
    module._temporary.cache_clear()


def test_what_was_stored_is_loaded(cache):
    assert cache.load("key") is None
    assert cache.store("key", b"value")
    assert cache.load("key") == b"value"
    assert cache.names() == ["key"]
    cache.drop("key")
    assert cache.load("key") is None
    assert cache.names() == []


def test_a_checked_entry_that_was_damaged_is_dropped(tmp_path):
    cache = FileCache(VARIABLE, "test", tmp_path, checked=True)
    cache.store("key", b"value")
    stored = (tmp_path / "key").read_bytes()
    (tmp_path / "key").write_bytes(stored[:-1] + b"x")
    assert cache.load("key") is None
    assert not (tmp_path / "key").exists()


def test_what_is_larger_than_the_largest_is_neither_kept_nor_read(cache):
    assert not cache.store("key", bytes(1001))
    assert cache.store("key", bytes(1000))
    (cache.folder / "key").write_bytes(bytes(1001))
    assert cache.load("key") is None


@POSIX
@pytest.mark.timeout(20)
def test_only_regular_files_are_read(cache):
    cache.store("key", b"value")
    os.mkfifo(cache.folder / "pipe")  # reading one would wait for a writer
    (cache.folder / "endless").symlink_to("/dev/zero")
    (cache.folder / "folder").mkdir()
    assert [cache.load(key) for key in ("pipe", "endless", "folder")] == [None] * 3
    assert cache.store("pipe", b"value")
    assert cache.load("pipe") == b"value"


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch):
    cache.store("key", b"value")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not cache.store("key", b"another")
    assert os.listdir(cache.folder) == ["key"]
    assert cache.load("key") == b"value"


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = FileCache(VARIABLE, "test", tmp_path / "file" / "cache")
    assert not cache.store("key", b"value")
    assert cache.load("key") is None
    assert "file" in (cache.why_not_writable() or "")


def test_the_variable_names_the_folder_or_switches_it_off(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "chosen"))
    assert FileCache(VARIABLE, "test").folder == tmp_path / "chosen"
    assert FileCache(VARIABLE, "test").why_not_writable() is None
    monkeypatch.setenv(VARIABLE, "0")
    off = FileCache(VARIABLE, "test")
    assert off.folder is None
    assert not off.store("key", b"value")
    assert off.load("key") is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FileCache(VARIABLE, "test").folder == tmp_path / "opweave" / "test"


def nobody(monkeypatch, tmp_path):
    """No home, and a user number that no user has."""

    def unknown(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_without_a_home_a_private_temporary_folder_is_used_and_said_once(monkeypatch, tmp_path, recwarn):
    nobody(monkeypatch, tmp_path)
    with pytest.warns(RuntimeWarning, match=str(tmp_path)):
        folder = user_cache()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
    assert user_cache() == folder
    assert FileCache(VARIABLE, "test").store("key", b"value")
    assert not recwarn.list, "said once"
    module._temporary.cache_clear()
    with pytest.warns(RuntimeWarning):
        assert user_cache() == folder, "in the next process too"


@POSIX
def test_a_temporary_folder_of_somebody_else_is_not_used(monkeypatch, tmp_path):
    nobody(monkeypatch, tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"opweave-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning):
        folder = user_cache()
    assert not folder.is_symlink()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "getuid") or os.getuid() != 0, reason="becomes nobody")
def test_in_a_container_under_a_number_that_no_user_has(tmp_path):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    code = "from opweave.runtime.host.cache import FileCache; print(FileCache('V', 'x').folder)"
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    command = f"import opweave.runtime.host.cache; import os; os.setuid(54321); {code}"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=60,
        env={**environ, "TMPDIR": str(tmp_path)}, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == tmp_path / "opweave-54321" / "x"
    assert "RuntimeWarning" in done.stderr
