"""`Team`: the threads of a pool, among which compiled functions are shared without the interpreter.

Waking a thread takes tens of microseconds, on virtual machines above all, and passing the interpreter's lock on some
more: as long as many kernels. So a thread that has done its part waits for the next one in compiled code, for a
moment, as the threads of OpenMP do, and the parts of a kernel are handed to it in memory. A part that no thread has
begun when the caller is done with its own is done by the caller: no kernel waits for a thread to wake up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from time import perf_counter
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from llvmlite import ir

from opweave.concurrency import Lock
from opweave.lifecycle import notify_after_fork
from opweave.runtime.host.threads import ThreadPool
from opweave_cpu.jit.compiler import ENTRY, MachineCode, target
from opweave_cpu.jit.vectors import loop
from opweave_cpu.threads import THREADS
from opweave_cpu.tunables import COMPILED_WORK

__all__ = ["Parts", "Team", "index_check", "run_in_turn", "words_of"]

PATIENCE: Final = 6e-5
"""Seconds for which a thread waits for its next part before it leaves: about as long as waking it takes. While it
waits, threads of other libraries find the processor taken."""

YIELDS: Final = 1 << 10
"""Polls from one to the next at which the system may run another thread on the processor: it may be the one that is
waited for. More often would give the processor away to any process of the machine, for milliseconds."""

# The states of a slot, in which one thread is given its parts.
_AWAY: Final = 0  # no thread is there, nor will one come
_WAITING: Final = 1  # a thread waits for a part
_EXPECTED: Final = 2  # a thread will come
_CLAIMED: Final = 3  # a caller writes a part
_POSTED: Final = 4  # there is a part that no thread has begun
_RUNNING: Final = 5
_DONE: Final = 6  # until the caller has seen it

_WORDS: Final = 8
"""Words of a slot, which has a cache line of its own: its state, a function, and its argument."""

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_WORD: Final = _I64.as_pointer()
_KERNEL: Final = ir.FunctionType(ir.VoidType(), [_I64.as_pointer()])
_YIELD: Final = ir.FunctionType(_I32, [])


class Parts:
    """A compiled function and its arguments, one for each thread.

    Args:
        address: of the function.
        arguments: arrays of words; the first one is for the thread that calls.
        work: elementary operations. From `COMPILED_WORK` on threads that are away are called; else those that wait from
            an earlier kernel take part.

    Attributes:
        others: how many threads can take part beside the one that calls.
        called: how many of them are called.
    """

    def __init__(self, address: int, arguments: Sequence[bytes], work: int) -> None:
        self._arguments: Final = arguments
        self._address: Final = address
        _run(), _polls()  # compiled now, not when the first kernel runs
        self.work: Final = work
        self.others: Final = len(arguments) - 1
        self.called: Final = self.others if work >= COMPILED_WORK.value else 0
        self._team: Team | None = None
        self._words: Any = None

    def run(self) -> None:
        """Do all parts, with the threads of the pool of this run."""
        team = Team.current()
        if team is not self._team:
            self._words, self._team = self.words(team), team
        if self.called:
            team.gather(self.called)
        _run().releasing(self._words)

    def words(self, team: Team) -> Any:
        """What the function at `address` does all parts with, by the threads of a team."""
        kept = [ctypes.create_string_buffer(argument, len(argument)) for argument in self._arguments]
        given = (team.address, team.count, _yield_address(), self._address, len(kept))
        return words_of([*given, *map(ctypes.addressof, kept)], kept)

    @property
    def address(self) -> int:
        """Of the function that does all parts."""
        return _run().address


class Team:
    """The threads of a pool but for the one that runs a program.

    Attributes:
        count: how many there are, each with a slot.
        address: of the slots.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self.count: Final = pool.size - 1
        self._pool: Final = ref(pool)
        # Behind the slots a word that is changed to have threads leave.
        self._slots: Final = _slots(self.count + 1)
        self.address: Final = ctypes.addressof(self._slots)
        self._lock: Final = Lock()
        notify_after_fork(self)

    @classmethod
    def current(cls) -> Team:
        """That of the pool of this run."""
        pool = THREADS.pool()
        team = _TEAMS.get(pool)
        if team is None:
            team = _TEAMS[pool] = cls(pool)
        return team

    def gather(self, count: int) -> None:
        """Have threads come to the first slots in which there are none."""
        for slot in range(min(count, self.count)):
            if self._slots[slot * _WORDS] == _AWAY:
                self._call(slot)

    def _call(self, slot: int) -> None:
        pool = self._pool()
        with self._lock:
            if pool is None or self._slots[slot * _WORDS] != _AWAY:
                return
            self._slots[slot * _WORDS] = _EXPECTED
        calls = self.count * _WORDS
        place, word = (self.address + 8 * at for at in (slot * _WORDS, calls))
        words = (ctypes.c_int64 * 5)(place, _polls(), _yield_address(), word, self._slots[calls])
        pool.lend(partial(self._serve, words), self._dismiss)

    def _serve(self, words: Any) -> None:
        _serve().releasing(words)

    def _dismiss(self) -> None:
        """Have threads that wait leave."""
        self._slots[self.count * _WORDS] += 1

    def after_fork(self) -> None:
        for slot in range(self.count):
            self._slots[slot * _WORDS] = _AWAY


_TEAMS: Final[WeakKeyDictionary[ThreadPool, Team]] = WeakKeyDictionary()


def words_of(values: Sequence[int], kept: Sequence[Any] = ()) -> Any:
    """Words for a compiled function, which keep what they refer to."""
    words: Any = (ctypes.c_int64 * len(values))(*values)
    words.kept = kept
    return words


def _slots(count: int) -> Any:
    """The words of so many slots, zero, each slot in a cache line of its own."""
    line = _WORDS * 8
    memory = bytearray((count + 1) * line)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % line
    return (ctypes.c_int64 * (_WORDS * count)).from_buffer(memory, start)


@cache
def _yield_address() -> int:
    """The address of the function by which a thread lets others run, or 0."""
    with suppress(AttributeError, OSError, TypeError):
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    return 0


@cache
def _polls() -> int:
    """How often a thread looks for its next part in `PATIENCE`."""
    slots = _slots(2)
    start = ctypes.addressof(slots)
    count, times = 1 << 10, []
    for _ in range(5):
        words = (ctypes.c_int64 * 5)(start, count, 0, start + _WORDS * 8, 0)
        began = perf_counter()
        _serve().releasing(words)
        times.append(perf_counter() - began)
    return max(1, round(PATIENCE / min(times) * count))


# --- compiled -------------------------------------------------------------------------------------------------------


class _Code:
    """A function of words, while it is written: loops and the states of slots."""

    def __init__(self, words: int) -> None:
        module = ir.Module()
        module.triple = target().triple
        self.function = ir.Function(module, _KERNEL, ENTRY)
        self.builder: Any = ir.IRBuilder(self.function.append_basic_block())
        self.words = [self.load(self.function.args[0], k) for k in range(words)]

    def compiled(self) -> MachineCode:
        self.builder.ret_void()
        code = MachineCode(str(self.function.module))
        code.load(compiling=True)
        return code

    def block(self) -> Any:
        return self.function.append_basic_block()

    def pointer(self, address: Any, at: Any) -> Any:
        return self.builder.gep(address, [at if isinstance(at, ir.Value) else _I64(at)])

    def load(self, address: Any, at: Any) -> Any:
        return self.builder.load(self.pointer(address, at))

    def at(self, address: Any) -> Any:
        return self.builder.inttoptr(address, _WORD)

    def state(self, slot: Any) -> Any:
        return self.builder.load_atomic(slot, "acquire", 8)

    def set_state(self, slot: Any, state: int) -> None:
        self.builder.store_atomic(_I64(state), slot, "release", 8)

    def change(self, slot: Any, before: Any, after: int) -> Any:
        """Whether the state was ``before`` and became ``after``."""
        before = _I64(before) if isinstance(before, int) else before
        found = self.builder.cmpxchg(slot, before, _I64(after), "acq_rel", "acquire")
        return self.builder.extract_value(found, 1)

    def call(self, address: Any, argument: Any) -> None:
        self.builder.call(self.builder.inttoptr(address, _KERNEL.as_pointer()), [self.at(argument)])

    def is_(self, value: Any, *any_of: int) -> Any:
        code = self.builder
        tests = [code.icmp_signed("==", value, _I64(one)) for one in any_of]
        whole = tests[0]
        for test in tests[1:]:
            whole = code.or_(whole, test)
        return whole

    def pause(self, count: Any, yields: Any) -> None:
        """Wait for some cycles; each `YIELDS` counts, let the system run another thread."""
        code = self.builder
        if "sse2" in target().features:
            name = "llvm.x86.sse2.pause"
            known = self.function.module.globals.get(name)
            code.call(known or ir.Function(self.function.module, ir.FunctionType(ir.VoidType(), []), name), [])
        due = self.is_(code.and_(count, _I64(YIELDS - 1)), 0)
        with code.if_then(code.and_(due, code.icmp_signed("!=", yields, _I64(0)))):
            code.call(code.inttoptr(yields, _YIELD.as_pointer()), [])


@cache
def _run() -> MachineCode:
    """The function that posts parts, does the first one, and waits for, or does, the others.

    Its words: the address of the slots, how many there are, `_yield_address`, the function, the number of parts, and
    the argument of each.
    """
    text = _Code(5)
    code, (slots, count, yields, function, parts) = text.builder, text.words
    arguments = text.pointer(text.function.args[0], 5)
    posted = code.alloca(_I64)
    code.store(_I64(0), posted)

    def slot_of(part: Any) -> Any:
        return text.pointer(text.at(slots), code.mul(code.sub(part, _I64(1)), _I64(_WORDS)))

    def bit_of(part: Any) -> Any:
        return code.shl(_I64(1), part)

    def is_posted(part: Any) -> Any:
        return code.icmp_signed("!=", code.and_(code.load(posted), bit_of(part)), _I64(0))

    with loop(code, _I64(1), parts) as part, code.if_then(code.icmp_signed("<=", part, count)):
        slot = slot_of(part)
        state = text.state(slot)
        with code.if_then(text.is_(state, _WAITING, _EXPECTED)), code.if_then(text.change(slot, state, _CLAIMED)):
            code.store(function, text.pointer(slot, 1))
            code.store(text.load(arguments, part), text.pointer(slot, 2))
            text.set_state(slot, _POSTED)
            code.store(code.or_(code.load(posted), bit_of(part)), posted)
    text.call(function, text.load(arguments, 0))
    with loop(code, _I64(1), parts) as part, code.if_then(code.not_(is_posted(part))):
        text.call(function, text.load(arguments, part))
    with loop(code, _I64(1), parts) as part, code.if_then(is_posted(part)):
        slot = slot_of(part)
        with code.if_else(text.change(slot, _POSTED, _EXPECTED)) as (not_begun, begun):
            with not_begun:
                text.call(function, text.load(arguments, part))
            with begun:
                before, head, inside, after = code.block, text.block(), text.block(), text.block()
                code.branch(head)
                code.position_at_end(head)
                polls = code.phi(_I64)
                polls.add_incoming(_I64(1), before)
                code.cbranch(text.is_(text.state(slot), _DONE), after, inside)
                code.position_at_end(inside)
                text.pause(polls, yields)
                polls.add_incoming(code.add(polls, _I64(1)), code.block)
                code.branch(head)
                code.position_at_end(after)
                text.set_state(slot, _WAITING)
    return text.compiled()


@cache
def _serve() -> MachineCode:
    """The function in which a thread waits for parts and does them.

    Its words: the address of its slot, `_polls`, `_yield_address`, the address of a word that is changed to have it
    leave, and what that was.
    """
    text = _Code(5)
    code, (place, polls, yields, calls, before) = text.builder, text.words
    slot, word = text.at(place), text.at(calls)
    left = code.alloca(_I64)
    code.store(polls, left)
    head, after = text.block(), text.block()
    code.branch(head)
    code.position_at_end(head)
    state = text.state(slot)
    with code.if_then(text.is_(state, _AWAY, _EXPECTED)):
        text.change(slot, state, _WAITING)
    with code.if_then(text.is_(state, _POSTED)), code.if_then(text.change(slot, _POSTED, _RUNNING)):
        text.call(text.load(slot, 1), text.load(slot, 2))
        text.set_state(slot, _DONE)
        code.store(polls, left)
    with code.if_then(text.is_(state, _WAITING)):
        fewer = code.sub(code.load(left), _I64(1))
        code.store(fewer, left)
        dismissed = code.icmp_signed("!=", code.load_atomic(word, "monotonic", 8), before)
        leaves = code.or_(dismissed, code.icmp_signed("<=", fewer, _I64(0)))
        with code.if_then(leaves):
            code.cbranch(text.change(slot, _WAITING, _AWAY), after, head)
            code.position_at_end(text.block())
    text.pause(code.load(left), yields)
    code.branch(head)
    code.position_at_end(after)
    return text.compiled()


@cache
def run_in_turn() -> MachineCode:
    """The function that calls functions one after the other, until one needs a thread that is away, or fails.

    Its words: with which function to begin, which becomes the one before which it ended, or which failed, or their
    number; their number; the address of the slots; a word that a function changes which fails; and of each function its
    address, its argument, and how many threads it needs.
    """
    text = _Code(3)
    code, (first, count, slots), given = text.builder, text.words, text.function.args[0]
    with loop(code, first, count) as number:
        entry = text.pointer(given, code.add(code.mul(number, _I64(3)), _I64(4)))
        # The one to begin with is not asked: its threads were called.
        needed = code.select(code.icmp_signed("==", number, first), _I64(0), text.load(entry, 2))
        inside, (check, do, after, away) = code.block, [text.block() for _ in range(4)]
        code.branch(check)
        code.position_at_end(check)
        slot = code.phi(_I64)
        slot.add_incoming(_I64(0), inside)
        code.cbranch(code.icmp_signed("<", slot, needed), after, do)
        code.position_at_end(after)
        state = text.state(text.pointer(text.at(slots), code.mul(slot, _I64(_WORDS))))
        slot.add_incoming(code.add(slot, _I64(1)), after)
        code.cbranch(text.is_(state, _AWAY), away, check)
        code.position_at_end(away)
        code.ret_void()
        code.position_at_end(do)
        text.call(text.load(entry, 0), text.load(entry, 1))
        with code.if_then(code.not_(text.is_(text.load(given, 3), 0))):
            code.ret_void()
        code.store(code.add(number, _I64(1)), given)
    return text.compiled()


@cache
def index_check(bits: int) -> MachineCode:
    """The function that changes a word where one of the indices, of so many bits, is outside of a range.

    Its words: the address of that word, the length of the range, how many indices there are, and their address.
    """
    text = _Code(4)
    code, (failed, length, count, ids) = text.builder, text.words
    index = ir.IntType(bits)
    with loop(code, _I64(0), count) as i:
        one = code.load(code.gep(code.inttoptr(ids, index.as_pointer()), [i]))
        # A negative index is a huge one without its sign.
        one = one if bits == 64 else code.sext(one, _I64)
        with code.if_then(code.icmp_unsigned(">=", one, length)):
            code.store(_I64(1), text.at(failed))
            code.ret_void()
    return text.compiled()
