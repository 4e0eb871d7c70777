"""From a function in LLVM IR to machine code in the process, by way of a cache on disk.

A function is compiled once on a machine: later processes load the object file, without an optimizer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Hashable
from functools import cache, cached_property, partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet, finalize

from opweave.concurrency import Lock, Worker
from opweave.contract import Call
from opweave.futures import Task
from opweave.packages import pip_install
from opweave.runtime.host.cache import FileCache
from opweave_cpu.tunables import TUNABLES, TUNABLES_OF_COMPILED, limit

__all__ = [
    "CACHE", "ENTRY", "TOGETHER", "VARIABLE", "FirstRun", "MachineCode", "has_fma", "recall", "target", "why_not",
]  # fmt: skip

VARIABLE: Final = "OPWEAVE_CPU_JIT"
"""Environment variable: ``0`` leaves all work to NumPy."""

CACHE: Final = "OPWEAVE_CPU_JIT_CACHE"
"""Environment variable: the folder of compiled functions, or ``0`` for none."""

ENTRY: Final = "kernel"
"""The function that a module in LLVM IR defines. Its only argument is the address of an array of 64-bit words."""


SETS: Final = tuple(re.compile(name) for name in (
    "fma|f16c|avx", "avxvnni", "avx512|evex512|avx10", "avx512(vnni|bf16|fp16|ifma|vbmi)|gfni|vaes|vpclmul", "amx",
))  # fmt: skip
"""LLVM's names of features of x86, each of which needs those before it."""

INSTRUCTIONS: Final = limit("instruction_set", 6, 1, 6, bounds=(1, 6))
"""What compiled functions may use of an x86 processor: 1 what each of 64 bits has, which compiles nothing; 2 AVX2 and
FMA; 3 VNNI of 256 bits; 4 AVX-512; 5 with VNNI and bf16; 6 all that there is, such as AMX. Kernels choose by it."""

PASSES: Final = (
    "sroa", "simplify_cfg", "instruction_combine", "new_gvn", "loop_rotate", "loop_unroll", "instruction_combine",
    "simplify_cfg", "dead_code_elimination",
)  # fmt: skip
"""LLVM's optimizations. Kernels are written in vectors, so that these make them as fast as all of its second level;
llvmlite never frees a pass that has run, which for all of those takes 67 KiB a function and for these 8."""

TOGETHER: Final = 16
"""Functions whose memory is given back together. LLVM needs some 20 KiB, and two milliseconds, for each such set beside
the functions, of 10 KiB each."""

_THREAD: Final = "opweave compiler"

T = TypeVar("T")


@cache
def _is_installed() -> bool:
    return find_spec("llvmlite") is not None


def why_not() -> str | None:
    """Why nothing is compiled in this process, or ``None`` if it is. Imports nothing."""
    if os.environ.get(VARIABLE, "").strip() == "0":
        return f"{VARIABLE}=0 declines it"
    if not _is_installed():
        return f"llvmlite is not installed: {pip_install('opweave-cpu[jit]')}"
    return None


def _host(level: int) -> tuple[Any, Callable[[], Any], str, str, frozenset[str]]:
    """llvmlite's ``binding``, what makes a ``machine``, then ``triple``, ``identity``, ``features`` as in `_Target`."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = binding.get_host_cpu_name(), binding.get_host_cpu_features()
    if platform.machine().lower() in ("x86_64", "amd64"):
        for beyond in SETS[level - 1 :]:
            features.update(dict.fromkeys(filter(beyond.match, features), False))
    identity = f"{version('llvmlite')} {binding.llvm_version_info} {name} {features.flatten()}"
    machine = partial(
        binding.Target.from_default_triple().create_target_machine,
        cpu=name, features=features.flatten(), opt=3, reloc="pic", codemodel="default",
    )  # fmt: skip
    return binding, machine, binding.get_default_triple(), identity, frozenset(k for k, has in features.items() if has)


class _Functions:
    """Loaded functions, whose memory is given back together when none of them is used.

    Args:
        engine: LLVM's, which has their memory.
        names: of the functions, as they are loaded.
    """

    def __init__(self, engine: Any) -> None:
        self.engine: Final = engine
        self.names: Final[list[str]] = []


class _Address(int):
    """The address of a loaded function. Whoever keeps it may call the function.

    Attributes:
        functions: has its memory.
    """

    functions: _Functions


class _Target:
    """The processor of this machine, or as much of it as `INSTRUCTIONS` allows, as LLVM sees it. Loads compiled
    functions.

    llvmlite guards its calls by one lock. A thread that Ctrl-C interrupts between taking and releasing it would keep it
    for ever, so all calls are made by a thread of this class, which interrupts never reach.

    Attributes:
        features: LLVM's names of what the processor has.
        machine: what generates code for it.
        triple: LLVM's name of the platform.
        identity: all that compiled code depends on beside its LLVM IR.
    """

    def __init__(self, level: int) -> None:
        self._thread = Worker(_THREAD)
        self._process = os.getpid()
        self._binding, self._new_machine, self.triple, self.identity, self.features = self._call(_host, level)
        self.machine: Final = self._call(self._new_machine)
        self._open: WeakSet[_Functions] = WeakSet()
        self._latest: _Functions | None = None
        self.cache: Final = FileCache(CACHE, "cpu-jit", largest=1 << 20, limit=64 << 20, checked=True)
        self.lock: Final = Lock()

    def compile(self, text: str) -> bytes:
        """The object file of a module in LLVM IR."""
        return self._call(self._compile, text)

    def load(self, name: str, data: bytes) -> _Address:
        """The address of the function ``name`` of an object file. The function stays as long as the address, and those
        that were loaded with it, are kept."""
        return self._call(self._load, name, data)

    @property
    def loaded(self) -> int:
        """How many functions are in memory now."""
        return sum([len(functions.names) for functions in list(self._open)])

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        """What a function returns, or raises, when the thread calls it."""
        if self._process != os.getpid():  # forked: the thread is in the other process
            self._thread, self._process = Worker(_THREAD), os.getpid()
        task = Task(function, *args)
        self._thread.put(task)
        return task.future.result()

    def _compile(self, text: str) -> bytes:
        binding = self._binding
        # LLVM keeps the types and constants of a context as long as that lives.
        module = binding.parse_assembly(text, binding.create_context())
        module.verify()
        passes = binding.create_new_module_pass_manager()
        for name in PASSES:
            getattr(passes, f"add_{name}_pass")()
        options = binding.create_pipeline_tuning_options(speed_level=2)
        passes.run(module, binding.create_pass_builder(self.machine, options))
        return bytes(self.machine.emit_object(module))

    def _load(self, name: str, data: bytes) -> _Address:
        binding, functions = self._binding, self._latest
        if functions is None or len(functions.names) >= TOGETHER:
            # An engine owns its machine. llvmlite's memory manager has the sections of an object side by side: code
            # addresses constants by 32 bits.
            engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._new_machine(), use_lmm=True)
            functions = self._latest = _Functions(engine)
            self._open.add(functions)
            finalize(functions, self._release, engine).atexit = False
        functions.engine.add_object_file(binding.ObjectFileRef.from_data(data))
        functions.engine.finalize_object()
        functions.names.append(name)
        address = _Address(functions.engine.get_function_address(name))
        address.functions = functions
        return address

    def _release(self, engine: Any) -> None:
        """Give back the memory of functions that nobody can call any more; a forked process shares it, and keeps it.
        Called while objects are collected: it takes no lock and waits for nothing."""
        if self._process == os.getpid():
            self._thread.put(Task(engine.close))


def target() -> _Target:
    """The `_Target` of this process."""
    return _target(INSTRUCTIONS.value)


@cache
def _target(level: int) -> _Target:
    return _Target(level)


def has_fma() -> bool:
    """Whether the processor has fused multiply-add (FMA): elsewhere LLVM calls a function for it."""
    return not target().features.isdisjoint({"fma", "neon", "fp-armv8"})


_RELEASING: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HOLDING: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class MachineCode:
    """A function, compiled when it is first asked for.

    Args:
        text: a module in LLVM IR, in which ``ENTRY`` stands for the name of the function.
        name: what the function is called, and found by on disk; default: made from the text. With a name the text may
            be given later, if there is no such function on disk.
    """

    def __init__(self, text: str = "", name: str = "") -> None:
        self.text = text
        self._target: Final = target()
        self._name: Final = name or _name_of(text)
        self._address: int = 0
        self._sought = False

    def load(self, *, compiling: bool) -> bool:
        """Whether the function is ready: compiled before, in this process or another one, or, if ``compiling``, now.
        The cache on disk is searched once, and again before compiling: a program may bind a function hundreds of
        times before it is first called."""
        if self._address:
            return True
        if self._sought and not compiling:
            return False
        here = self._target
        with here.lock:
            if self._address:
                return True
            data = here.cache.load(self._name)
            self._sought = True
            if data is None:
                if not compiling:
                    return False
                data = here.compile(self.text.replace(f'@"{ENTRY}"', f'@"{self._name}"'))
                here.cache.store(self._name, data)
            self._address = here.load(self._name, data)
        return True

    @property
    def address(self) -> int:
        """Where the function is, once it is ready; else 0. Who calls it keeps this very object, which keeps the
        function in memory."""
        return self._address

    @cached_property
    def releasing(self) -> Callable[[Any], None]:
        """The function; a call releases the interpreter's lock."""
        return self._callable(_RELEASING)

    @cached_property
    def holding(self) -> Callable[[Any], None]:
        """The function; a call keeps the interpreter's lock: for work that takes less time than passing the lock on."""
        return self._callable(_HOLDING)

    def _callable(self, kind: Callable[[int], Any]) -> Callable[[Any], None]:
        function: Any = kind(self._address)
        function.address = self._address  # stays in memory with it
        called: Callable[[Any], None] = function
        return called


def recall(key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returns. If that is a function which a process has compiled by this code before, then without
    writing it in LLVM IR, which takes milliseconds: it is found on disk by its key.

    Args:
        key: all that the result depends on, beside the limits of this plugin.
    """
    described = repr(key)
    if " at 0x" in described:  # of something that has no value, so that the key means nothing elsewhere
        return make()
    declared = *TUNABLES, *TUNABLES_OF_COMPILED, *limit  # those of the modules that were imported
    limits = sorted([(one.name, one.value) for one in declared if one.value != one.default])
    name = _name_of(f"{_sources()} {_listed(target().features)} {limits} {described}")
    code: Any = MachineCode(name=name)
    if not code.load(compiling=False):
        made = make()
        if not isinstance(made, MachineCode):
            return made
        code.text = made.text
    found: T = code
    return found


@cache
def _listed(features: frozenset[str]) -> str:
    return " ".join(sorted(features))


@cache
def _sources() -> str:
    """A hash of all that writes functions: this package, and the core's operations."""
    found = map(find_spec, ("opweave_cpu", "opweave.ops", "opweave.graph"))
    folders = [Path(spec.origin).parent for spec in found if spec is not None and spec.origin is not None]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _name_of(what: str) -> str:
    return f"opweave_{sha256(f'{target().identity} {what}'.encode()).hexdigest()}"


class FirstRun:
    """A call whose function is compiled when it is first made, or by `compile`.

    Args:
        code: its function.
        bind: returns the call once the function is there.
    """

    __slots__ = ("_bind", "_code", "call")

    def __init__(self, code: MachineCode, bind: Callable[[], Call]) -> None:
        self._code, self._bind = code, bind
        self.call: Call = self._compile_and_call

    def __call__(self) -> None:
        self.call()

    def compile(self) -> None:
        """Have it ready for the first run."""
        self._code.load(compiling=True)
        self.call = self._bind()

    def _compile_and_call(self) -> None:
        self.compile()
        self.call()
