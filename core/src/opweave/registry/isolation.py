"""Plugins that hang or crash: their code is called with a limit, and one that ended an earlier process is first tried
in a process of its own.

**Hanging.** The code of a plugin runs in a thread of its own, for which the caller waits (`call`). Python cannot end a
thread; one that goes on behind the limit is left alone, and what it still returns is dropped. While other modules are
being imported the code runs in the caller's thread, without a limit: an import that waits for one of the caller's would
never end.

**Crashing.** While a plugin is loaded, a small file in the user's cache folder says so (`Loading`). Of a process that
ended meanwhile the file is left: the next one loads the plugin in a child process before it does so itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextvars import copy_context
from threading import local
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from opweave.concurrency import Latch, Lock, start_thread
from opweave.errors import Broken

if TYPE_CHECKING:
    from pathlib import Path

    from opweave.registry.records import Plugin
    from opweave.runtime.host.cache import FileCache

__all__ = [
    "CHILD_SECONDS", "IMPORT_SECONDS", "Death", "Guard", "Loading", "TookTooLong", "call", "crash_of", "guarded",
    "how_it_ended", "lock_of", "run_child",
]  # fmt: skip

T = TypeVar("T")

TIMEOUT: Final = "OPWEAVE_PLUGIN_TIMEOUT"
"""The environment variable with the limit of a call into a plugin, in seconds; ``0``: none."""

IMPORT_SECONDS: Final = 60.0
DEVICES_SECONDS: Final = 150.0
"""How long importing a plugin may take by default, and each other call: looking for devices and trying one. A driver
may have to compile its first kernels for that (OpenCL gives it 120 s)."""

CHILD: Final = "OPWEAVE_PLUGIN_CHILD"
"""The environment variable that is set in processes whose purpose is to show which plugin ends them."""

CHILD_SECONDS: Final = 150.0
"""How long the child process may take that loads a suspicious plugin."""


# --- hanging ----------------------------------------------------------------------------------------------------------


class TookTooLong(Broken):
    """Code of a plugin that did not end in time."""


class Guard:
    """Whose code is run, in the thread that loads it.

    Args:
        name: of the plugin.
        owner: the registry's own lock, which this thread holds.
    """

    def __init__(self, name: str, owner: object) -> None:
        self.name: Final = name
        self.owner: Final = owner


class _ThreadState(local):
    """What a thread does for a registry.

    Attributes:
        guard: the plugin that this thread loads.
        stand_ins: registries' own locks -> the lock that this thread takes in place of each, because a thread that
            holds it waits for this one.
    """

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.stand_ins: dict[int, Lock] = {}


_THREAD: Final = _ThreadState()


def lock_of(own: Lock) -> Lock:
    """The lock that the calling thread takes for a registry, whose ``own`` one it is: another one, where the thread
    runs code of a plugin for which a thread that holds that lock waits."""
    return _THREAD.stand_ins.get(id(own), own)


def guarded(guard: Guard | None) -> Guard | None:
    """Set whose code the calling thread runs from here on; returns whose it was."""
    before, _THREAD.guard = _THREAD.guard, guard
    return before


def call(doing: str, work: Callable[[], T], seconds: float = DEVICES_SECONDS) -> T:
    """What ``work``, code of the plugin that is being loaded, returns or raises.

    Args:
        doing: what it does, for the message: ``"its import"``.
        seconds: the limit, unless the environment says otherwise.

    Raises:
        TookTooLong: it did not return in time.
    """
    guard, limit = _THREAD.guard, _limit(seconds)
    if guard is None or not limit or _being_imported() - _ABANDONED:
        return work()
    result: list[T] = []
    errors: list[BaseException] = []
    ended, waiting = Latch(), [True]
    stand_ins = {**_THREAD.stand_ins, id(guard.owner): Lock()}

    def run() -> None:
        _THREAD.stand_ins = _WhileWaiting(stand_ins, waiting)
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)
        ended.set()

    thread = start_thread(copy_context().run, run, name=f"opweave loads {guard.name}")
    try:
        in_time = ended.wait(limit)
    finally:
        waiting[0] = False
    if not in_time:
        _ABANDONED.update(_being_imported())
        why = f"{doing} did not end within {limit:g} s{_where(thread.ident)}"
        raise TookTooLong(why, remedy=f"update or uninstall it; OPWEAVE_DISABLE={guard.name} goes on without it, "
                                 f"{TIMEOUT}=SECONDS waits longer")  # fmt: skip
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return result[0]


class _WhileWaiting(dict[int, Lock]):
    """Locks that stand in for others as long as somebody waits for the thread that takes them."""

    def __init__(self, locks: Mapping[int, Lock], waiting: list[bool]) -> None:
        super().__init__(locks)
        self._waiting: Final = waiting

    def get(self, key: int, default: Any = None) -> Any:
        return super().get(key, default) if self._waiting[0] else default


def _limit(seconds: float) -> float:
    try:
        return max(0.0, float(os.environ.get(TIMEOUT, "")))
    except ValueError:
        return seconds


_ABANDONED: Final[set[str]] = set()
"""The modules whose import did not end within its limit."""


def _being_imported() -> set[str]:
    """The modules that are being imported."""
    modules = list(sys.modules.items())
    return {name for name, module in modules if getattr(getattr(module, "__spec__", None), "_initializing", False)}


def _where(thread: int | None) -> str:
    """Where a thread is, as text: ``" (acme.py, line 3)"``."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return ""
    return f"; it is in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


# --- crashing ---------------------------------------------------------------------------------------------------------


FOLDER: Final = "OPWEAVE_LOADING_CACHE"
"""The environment variable with the folder of the files of `Loading`; ``0``: there are none."""


class Death(NamedTuple):
    """How a process ended that returned nothing.

    Attributes:
        how: in words.
        began: whether it had begun to run the code that it was given.
    """

    how: str
    began: bool = True


_FILES: Final[dict[Path | None, FileCache]] = {}


class Loading:
    """The file that says that this process loads a plugin; see the module's docstring.

    Args:
        plugin: as it is installed now: of another version nothing is known.
    """

    def __init__(self, plugin: Plugin) -> None:
        from hashlib import sha256  # importing opweave must not pay for these

        from opweave.runtime.host.cache import FileCache, own_cache_folder

        source = [plugin.name, plugin.variant, plugin.distribution, plugin.version, plugin.origin, plugin.value]
        self._prefix: Final = sha256(repr(source).encode()).hexdigest()[:32]
        self._cache: FileCache | None = None
        if FOLDER in os.environ or own_cache_folder() is not None:
            made = FileCache(FOLDER, "loading", largest=1 << 12)
            self._cache = _FILES.setdefault(made.folder, made)  # it looks through the folder before it first writes

    def begin(self) -> None:
        """This process begins to load it."""
        if self._cache is not None:
            self._cache.store(f"{self._prefix}-{os.getpid()}", b"loading")

    def end(self) -> None:
        """This process has loaded it, or failed to."""
        if self._cache is not None:
            self._cache.drop(f"{self._prefix}-{os.getpid()}")

    def left(self) -> list[str]:
        """The files of processes that ended while they loaded it."""
        names = self._cache.names() if self._cache is not None else ()
        found = [name for name in names if name.startswith(f"{self._prefix}-")]
        return [name for name in found if not _is_alive(name.rpartition("-")[2])]

    def forget(self) -> None:
        """Delete the files of processes that ended."""
        for name in self.left():
            if self._cache is not None:
                self._cache.drop(name)


def _is_alive(pid: str) -> bool:
    """Whether there is a process of this number. Where that cannot be asked, there is none."""
    if os.name != "posix" or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def crash_of(plugin: Plugin, loading: Loading) -> Death | None:
    """How a child process ends that loads ``plugin``, where an earlier process ended while it did; ``None``: nothing is
    known against it, or this is such a child."""
    if os.environ.get(CHILD) or not loading.left():
        return None
    where = {"search": [plugin.origin], "what": plugin.name} if plugin.distribution else {"what": plugin.origin}
    code = "from opweave.registry.registry import load_alone; load_alone(asked)"
    told = run_child(code, {"variant": plugin.variant, **where}, CHILD_SECONDS, os.environ, quiet=True)
    if isinstance(told, Death) and told.began:
        return told
    loading.forget()
    return None


START: Final = (
    "import json, os, sys; out = os.dup(1); os.dup2(2, 1); asked = json.load(sys.stdin); sys.path[:] = asked['path']; "
    "os.write(out, b'begun\\n'); "
)
END: Final = "; sys.stderr.flush(); os.write(out, b'\\nended'); os._exit(0)"


def run_child(
    code: str, asked: Mapping[str, Any], seconds: float, environ: Mapping[str, str], *, quiet: bool = False
) -> bytes | Death:
    """Run Python code in a process of its own.

    Args:
        code: it is given ``asked``, and writes to the file descriptor ``out``; what it prints goes to standard error.
        seconds: how long it may take.
        environ: its environment, beside `CHILD`.
        quiet: nothing that it prints is shown.

    Returns:
        What it wrote; or how it ended, where it was killed, failed or took too long. When ``code`` has run it ends at
        once, whatever plugins would still do.
    """
    import json  # importing opweave must not pay for these
    import subprocess
    import tempfile

    given = json.dumps({**asked, "path": sys.path}).encode()
    # Not a pipe: what a plugin leaves running would keep it open.
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            [sys.executable, "-c", START + code + END], stdin=subprocess.PIPE, stdout=out,
            env={**environ, CHILD: "1"}, stderr=subprocess.DEVNULL if quiet else None,
        )  # fmt: skip
        how = ""
        try:
            child.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            how = f"it did not answer within {seconds:g} s"
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        out.seek(0)
        written = out.read()
    began = written.startswith(b"begun\n")
    if how or not (began and written.endswith(b"\nended")):
        return Death(how or how_it_ended(child.returncode), began)
    return written[len(b"begun\n") : -len(b"\nended")]


def how_it_ended(status: int) -> str:
    """What the exit status of a process says of its end, in words."""
    if status >= 0:
        return f"it ended the process with exit status {status}"
    from signal import Signals

    try:
        name = Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"it crashed with {name}"
