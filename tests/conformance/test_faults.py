"""The proof of the suite: a device that is right passes all of it, and each single fault fails its own cases.

Every fault is one patch of the sound device. It is known by itself in which cases a fault does harm: where memory
ends up otherwise than without it. Exactly those cases have to fail, and no case of another operation or level.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from opweave.contract import Arg, Kind, Step
from opweave.errors import BoundsError, UnsupportedOpError
from opweave.graph.layout import dense_strides, is_dense, span
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor
from opweave.registry import Registry
from opweave_conformance import CASES, Case, run_case
from opweave_conformance.suite import Suite
from opweave_conformance.trial import overwritable, the_node
from tests.support.sound_device import Block, SoundBackend, SoundDevice, SoundStream

Array = np.ndarray[Any, Any]

# --- the cases that are tried ---------------------------------------------------------------------------------------


@cache
def node_of(case: Case) -> Tensor:
    return the_node(case.build(*case.tensors()))


def has_mixed_types(node: Tensor) -> bool:
    return len({s.dtype for s in node.srcs if s.dtype.is_float}) > 1 and "fn" not in node.attrs


def features(case: Case) -> set[str]:
    """The properties of a case for which it is chosen: one case for each property and operation."""
    node = node_of(case)
    found = {f"type {node.dtype}"}
    found |= {f"{o.layout} {o.values}" for o in case.operands if o.layout != "contiguous" or o.values == "special"}
    found |= {f"{o.values}" for o in case.operands}
    found |= {"mixed types"} if has_mixed_types(node) else set()
    found |= {"half and long"} if node.dtype.is_half and node.size >= 256 else set()
    found |= {"in place"} if next(overwritable(node), None) is not None else set()
    found |= {f"calls {node.attrs['fn'].__name__}"} if "fn" in node.attrs else set()
    return found


@cache
def sample(op: str) -> tuple[Case, ...]:
    """A few small cases of an operation that show all its features."""
    known: set[str] = set()
    chosen = []
    for case in CASES:
        if case.op == op and sum(s.size for s in node_of(case).srcs) <= 4096:
            new = features(case) - known
            if new:
                known |= new
                chosen.append(case)
    return tuple(chosen)


OPERATIONS = list(dict.fromkeys(case.op for case in CASES))
CONTROLS = tuple(sample(op)[0] for op in ("add", "softmax", "embedding", "assign"))
"""Cases of other operations, which a fault must leave alone."""


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_sound_device_passes(op: str) -> None:
    assert [(c.id, v.reason) for c in sample(op) if (v := run_case(SoundDevice(), c)).status != "passed"] == []


# --- faults of kernels ----------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A single fault of the kernel of an operation.

    Attributes:
        applies: whether the kernel of a node can have it.
        run: runs a step wrongly: ``run(device, step, right)``, where ``right(step)`` runs it rightly.
        always: every case to which it applies is harmed.
    """

    applies: Callable[[Tensor], bool]
    run: Callable[[SoundDevice, Step, Callable[..., None]], None]
    always: bool = True


def scaled(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    device.view(step.out)[...] *= np.float32(1 + 1e-3)


def wrong_tail(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    out = device.view(step.out)
    last = tuple(n - 1 for n in out.shape)
    value = out[last]
    if out.dtype.kind == "b":
        out[last] = not value
    elif out.dtype.kind in "iu":
        out[last] ^= 1
    else:
        wide = np.float64(value)
        out[last] = 1 + wide + abs(wide) if np.isfinite(wide) else 0.25


def strides_ignored(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    srcs = tuple(as_if_dense(a) for a in step.srcs)
    right(step._replace(srcs=srcs))


def as_if_dense(a: Arg) -> Arg:
    strides = dense_strides(a.shape, a.dtype)
    # Bytes after the buffer cannot be read.
    fits = a.offset + span(a.shape, strides, a.dtype) <= a.mem.size
    return Arg(a.buffer, a.offset, a.dtype, a.shape, strides) if fits else a


def offset_ignored(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step._replace(srcs=tuple(Arg(a.buffer, 0, a.dtype, a.shape, a.strides) for a in step.srcs)))


def past_the_end(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    step.out.mem.data[step.out.offset + step.out.span] ^= 0xFF


def before_the_start(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    step.out.mem.data[step.out.offset - 1] ^= 0xFF


def source_spoiled(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    first = next(a for a in step.srcs if a.mem is not step.out.mem or a.offset != step.out.offset)
    first.mem.data[first.offset] ^= 0xFF


def overwritten_too_early(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    if not OPS[step.op].writes:
        device.view(step.out)[...] = device.view(step.out).dtype.type(0)
    right(step)


def truncated(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    sources = [np.array(device.view(a)) for a in step.srcs]
    with np.errstate(all="ignore"):
        exact = np.asarray(OPS[step.op].reference(*sources, **step.attrs), np.float32)
    out = device.view(step.out)
    if step.out.dtype.name == "bf16":
        out[...] = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(ml_dtypes.bfloat16)
    else:
        near = exact.astype(np.float16)
        beyond = np.abs(near.astype(np.float32)) > np.abs(exact)
        out[...] = np.where(beyond, np.nextafter(near, np.float16(0)), near)


def nan_swallowed(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    out = device.view(step.out)
    out[np.isnan(out.astype(np.float64))] = 0


def nan_sources_as_lowest(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    device.store(step, *[no_nan(np.array(device.view(a))) for a in step.srcs])


def no_nan(x: Array) -> Array:
    return np.where(np.isnan(x.astype(np.float64)), x.dtype.type(-np.inf), x) if x.dtype.kind in "fV" else x


def infinity_to_largest(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    out = device.view(step.out)
    out[np.isposinf(out.astype(np.float64))] = 6e4


def index_off_by_one(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    definition = OPS[step.op]
    skip = 1 if definition.writes else 0
    sources = [np.array(device.view(a)) for a in step.srcs]
    for i in definition.indices:
        sources[i - skip] = np.maximum(sources[i - skip] - 1, 0)
    device.store(step, *sources)


def result_off_by_one(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    right(step)
    device.view(step.out)[...] += 1


def ties_reversed(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    x, axis = np.array(device.view(step.srcs[0])), step.attrs["axis"]
    wide = x if x.dtype.kind in "iub" else x.astype(np.float64)
    device.view(step.out)[...] = x.shape[axis] - 1 - np.argmax(np.flip(wide, axis), axis)


def without_the_last_source(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    device.store(step, *[np.array(device.view(a)) for a in step.srcs[:-1]], np.zeros_like(device.view(step.srcs[-1])))


def sources_in_the_first_ones_type(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    dtype = step.srcs[0].dtype

    def reread(a: Arg) -> Arg:
        if not a.dtype.is_float:
            return a
        return Arg(a.buffer, a.offset, dtype, a.shape, dense_strides(a.shape, dtype), a.handle, a.value)

    device.store(step, *[np.array(device.view(reread(a))) for a in step.srcs])


def sources_handed_out(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    device.view(step.out)[...] = step.attrs["fn"](*[device.view(a) for a in step.srcs])


def sources_reversed(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    device.store(step, *[np.array(device.view(a)) for a in reversed(step.srcs)])


def result_not_converted(device: SoundDevice, step: Step, right: Callable[..., None]) -> None:
    result = np.ascontiguousarray(step.attrs["fn"](*[np.array(device.view(a)) for a in step.srcs]))
    out = device.view(step.out)
    out[...] = np.resize(result.reshape(-1).view(np.uint8), out.nbytes).view(out.dtype).reshape(out.shape)


def calls_a_function(node: Tensor) -> bool:
    return "fn" in node.attrs


def is_pure(node: Tensor) -> bool:
    assert node.op is not None
    return not node.op.writes


def has_sources(node: Tensor) -> bool:
    return len(read_by(node)) > 0


def read_by(node: Tensor) -> tuple[Tensor, ...]:
    assert node.op is not None
    return node.srcs[1:] if node.op.writes else node.srcs


def has_indices(node: Tensor) -> bool:
    assert node.op is not None
    return bool(node.op.indices)


def is_strided(node: Tensor) -> bool:
    return any(not is_dense(s.shape, s.strides, s.dtype) for s in read_by(node))


def takes_special(node: Tensor) -> bool:
    return node.dtype.is_float and is_pure(node)


KERNEL_FAULTS = {
    "every element times 1.001": Fault(lambda n: n.dtype.name == "f32", scaled, always=False),
    "last element wrong": Fault(lambda n: True, wrong_tail),
    "strides ignored": Fault(is_strided, strides_ignored, always=False),
    "offset ignored": Fault(lambda n: has_sources(n) and n.size >= 8, offset_ignored, always=False),
    "one byte past the end": Fault(lambda n: True, past_the_end),
    "one byte before the start": Fault(lambda n: True, before_the_start),
    "source changed": Fault(has_sources, source_spoiled),
    "written before it is read": Fault(
        lambda n: n.size >= 8 and next(overwritable(n), None) is not None, overwritten_too_early, always=False
    ),
    "truncated": Fault(lambda n: n.dtype.is_half and is_pure(n) and n.size >= 256, truncated, always=False),
    "NaN becomes 0": Fault(takes_special, nan_swallowed, always=False),
    "NaN counts as lowest": Fault(takes_special, nan_sources_as_lowest, always=False),
    "infinity becomes a number": Fault(takes_special, infinity_to_largest, always=False),
    "index off by one": Fault(has_indices, index_off_by_one, always=False),
    "index in the result off by one": Fault(lambda n: n.op is not None and n.op.index_out, result_off_by_one),
    "the last of equals": Fault(lambda n: n.op is not None and n.op.name == "argmax", ties_reversed, always=False),
    "last source taken for 0": Fault(
        lambda n: len(read_by(n)) > 1 and read_by(n)[-1].dtype.is_float, without_the_last_source, always=False
    ),
    "sources are read in the type of the first": Fault(has_mixed_types, sources_in_the_first_ones_type, always=False),
    "a function may write its sources": Fault(calls_a_function, sources_handed_out, always=False),
    "a function gets its sources in another order": Fault(
        lambda n: calls_a_function(n) and len({s.shape for s in n.srcs}) < len(n.srcs), sources_reversed
    ),
    "the bits of a function's result are stored": Fault(calls_a_function, result_not_converted, always=False),
}


class FaultyDevice(SoundDevice):
    """The sound device with one fault in the kernel of one operation.

    Attributes:
        harm: whether memory has ended up otherwise than it would have without the fault.
    """

    def __init__(self, op: str, fault: Fault) -> None:
        super().__init__()
        self.op, self.fault, self.harm = op, fault, False

    def run_step(self, step: Step) -> None:
        if step.op != self.op:
            super().run_step(step)
            return
        blocks: list[Block] = list({id(a.mem): a.mem for a in (step.out, *step.srcs)}.values())
        before = [b.data.copy() for b in blocks]
        super().run_step(step)
        self.unify(step.out)
        right = [b.data.copy() for b in blocks]
        for block, data in zip(blocks, before, strict=True):
            block.data[:] = data
        try:
            self.fault.run(self, step, super().run_step)
        except Exception:
            self.harm = True
            raise
        self.unify(step.out)
        self.harm = self.harm or any((b.data != r).any() for b, r in zip(blocks, right, strict=True))

    def unify(self, out: Arg) -> None:
        """Make one of what is equal: the many NaN, and the two zeros."""
        values = self.view(out)
        if out.dtype.is_float:
            wide = values.astype(np.float64)
            values[np.isnan(wide)] = np.nan
            values[wide == 0] = 0


def faults() -> list[tuple[str, str]]:
    return [
        (op, name)
        for op in OPERATIONS
        for name, fault in KERNEL_FAULTS.items()
        if any(fault.applies(node_of(case)) for case in sample(op))
    ]


@pytest.mark.parametrize(("op", "name"), faults())
def test_a_fault_in_a_kernel_fails_its_cases(op: str, name: str) -> None:
    fault = KERNEL_FAULTS[name]
    red, harmed = [], []
    for case in (*sample(op), *(c for c in CONTROLS if c.op != op)):
        device = FaultyDevice(op, fault)
        applies = case.op == op and fault.applies(node_of(case))
        if applies or case.op != op:
            red += [case.id] if run_case(device, case).status == "failed" else []
            harmed += [case.id] if device.harm else []
            assert device.harm or not (applies and fault.always), case.id
    assert red == harmed


def test_every_operation_is_tried_with_several_faults() -> None:
    tried = faults()
    assert min(sum(op == tried_op for tried_op, _ in tried) for op in OPERATIONS) >= 3
    assert {name for _, name in tried} == set(KERNEL_FAULTS)


# --- faults of what a device says and does with any kernel ----------------------------------------------------------


def values_read_when_compiled(self: SoundDevice, step: Step) -> Callable[[], None]:
    sources = [np.array(self.view(arg)) for arg in step.srcs]
    return lambda: self.store(step, *sources)


def counts_runs(self: SoundDevice, step: Step) -> Callable[[], None]:
    runs: list[Step] = []

    def call() -> None:
        self.run_step(step)
        if runs:
            wrong_tail(self, step, lambda step: None)
        runs.append(step)

    return call


def works_once(self: SoundDevice, step: Step) -> Callable[[], None]:
    left = [partial(self.run_step, step)]
    return lambda: left.pop()() if left else None


def not_there(self: SoundDevice, step: Step) -> Callable[[], None]:
    raise UnsupportedOpError(f"{step.op} is not written yet")


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (values_read_when_compiled, "in one buffer with its sources: "),
        (counts_runs, "run again: "),
        (works_once, "run again: "),
        (not_there, "UnsupportedOpError: "),
    ],
)
def test_a_fault_in_binding_is_found(monkeypatch: pytest.MonkeyPatch, patch: Any, reason: str) -> None:
    monkeypatch.setattr(SoundDevice, "bind_step", patch)
    for op in OPERATIONS:
        if OPS[op].writes and patch in (counts_runs, works_once):
            continue  # a writer is run once: what it writes may be what it reads
        for case in sample(op):
            if node_of(case).size >= 8 and (read_by(node_of(case)) or patch is not values_read_when_compiled):
                break
        else:
            continue
        verdict = run_case(SoundDevice(), case)
        assert verdict.status == "failed", case.id
        # Indices that are none are refused before anything is computed.
        assert verdict.reason.startswith(reason) or OPS[op].indices, verdict.reason


def test_claiming_less_than_the_table_lists_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoundDevice, "_why_not", lambda self, step: "too hard" if step.op == "tanh" else None)
    red = verdicts(["listed-*", "tanh-f32-1"])
    assert red == {"listed-tanh": "its kernel table lists tanh, but every case is refused: too hard"}


@pytest.mark.parametrize("answer", ["", "  "])
def test_refusing_without_a_reason_is_found(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(SoundDevice, "_why_not", lambda self, step: answer)
    assert run_case(SoundDevice(), CASES[0]).reason == "it is refused without a reason"


def test_a_refusal_that_compiles_to_another_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoundDevice, "_why_not", lambda self, step: "no room")
    assert run_case(SoundDevice(), CASES[0]).status == "refused"

    def compile(self: SoundStream, groups: Any) -> Any:
        raise KeyError("add")

    monkeypatch.setattr(SoundStream, "compile", compile)
    verdict = run_case(SoundDevice(), CASES[0])
    assert (verdict.status, verdict.reason) == (
        "failed", "it is refused (no room), but compiling it raises KeyError: 'add'",
    )  # fmt: skip
    monkeypatch.setattr(SoundStream, "compile", lambda self, groups: None)
    assert "raises no UnsupportedOpError" in run_case(SoundDevice(), CASES[0]).reason


# --- faults of hygiene and memory -----------------------------------------------------------------------------------


def suite(only: list[str] | None = None, backend: type[SoundBackend] = SoundBackend, **options: Any) -> Suite:
    registry = Registry(environ={}, search=[])
    registry.register(backend)
    return Suite("sound", only=only or (), using=registry, **options)


def verdicts(only: list[str] | None = None, **options: Any) -> dict[str, str]:
    """Ids and reasons of what fails."""
    found = suite(only, **options)
    return {o.id: o.reason for item in found.items if (o := found.perform(item)).status == "failed"}


def test_the_sound_device_passes_hygiene_and_memory() -> None:
    assert verdicts(levels=[0, 1]) == {}
    found = suite(levels=[0, 1])
    done = {found.perform(item).status for item in found.items}
    assert done == {"passed", "skipped"}


right_alloc, right_free = SoundDevice._alloc, SoundDevice._free
right_upload, right_download = SoundDevice._upload, SoundDevice._download
right_fill, right_copy = SoundDevice._fill, SoundDevice._copy


def alloc_odd_misaligned(self, size, usage):
    block = right_alloc(self, size, usage)
    return Block(block.address + 8, size) if size % 2 and size > 64 else block


def alloc_forgets_to_refuse(self, size, usage):
    return Block(self.end, 64) if size > (1 << 40) else right_alloc(self, size, usage)


def free_does_nothing(self, mem):
    pass


def freed_twice(self, mem):
    right_free(self, mem)
    if mem.size == 256:
        self.pool[mem.size].append(mem)


def upload_one_byte_later(self, mem, offset, data):
    right_upload(self, mem, min(offset + 1, mem.size - len(data)), data)


def upload_in_words(self, mem, offset, data):
    whole = len(data) // 4 * 4 or len(data)
    right_upload(self, mem, offset, data[:whole])


def download_from_the_start(self, mem, offset, out):
    right_download(self, mem, 0, out)


def fill_one_short(self, mem, offset, size, value):
    right_fill(self, mem, offset, size - 1, value)


def fill_one_too_many(self, mem, offset, size, value):
    mem.data[offset : offset + size + 1] = value


def fill_with_zero(self, mem, offset, size, value):
    right_fill(self, mem, offset, size, 0)


def copy_from_the_start(self, dst, dst_offset, src, src_offset, size):
    right_copy(self, dst, dst_offset, src, 0, size)


def copy_to_the_start(self, dst, dst_offset, src, src_offset, size):
    right_copy(self, dst, 0, src, src_offset, size)


def copy_forward_byte_by_byte(self, dst, dst_offset, src, src_offset, size):
    if dst is src and src_offset < dst_offset < src_offset + size:
        step = dst_offset - src_offset
        for at in range(0, size, step):
            part = min(step, size - at)
            right_copy(self, dst, dst_offset + at, src, src_offset + at, part)
    else:
        right_copy(self, dst, dst_offset, src, src_offset, size)


MEMORY_FAULTS: list[tuple[str, Any, str]] = [
    ("_alloc", alloc_odd_misaligned, "memory: alignment sizes chunks absurd-size"),
    ("_alloc", alloc_forgets_to_refuse, "memory: absurd-size"),
    ("_free", free_does_nothing, "memory: freeing"),
    ("_free", freed_twice, "memory: reuse"),
    ("_upload", upload_one_byte_later, "memory: upload big copy-host stream-transfers stream-keeps-arrays"),
    ("_upload", upload_in_words, "memory: upload big sizes copy-host"),
    ("_download", download_from_the_start, "memory: download copy-host"),
    ("_fill", fill_one_short, "memory: fill copy-host"),
    ("_fill", fill_one_too_many, "memory: fill"),
    ("_fill", fill_with_zero, "memory: fill"),
    ("_copy", copy_from_the_start, "memory: copy copy-within"),
    ("_copy", copy_to_the_start, "memory: copy copy-within"),
    ("_copy", copy_forward_byte_by_byte, "memory: copy-within"),
    ("mem_info", lambda self: (2, 1), "hygiene: mem-info"),
    ("mem_info", lambda self: (-1, 1), "hygiene: mem-info"),
    ("mem_info", lambda self: (0.5, 2.5), "hygiene: mem-info"),
    ("features", lambda self: ["fast"], "hygiene: features"),
    ("_open", lambda self, **params: SoundStream(self), "hygiene: stream-parameters"),
]
"""Method, what takes its place, and the checks that have to fail: level and names."""


@pytest.mark.parametrize(("method", "patch", "named"), MEMORY_FAULTS)
def test_a_fault_in_memory_or_hygiene_fails_its_checks(monkeypatch, method, patch, named) -> None:
    monkeypatch.setattr(SoundDevice, method, patch)
    level, names = named.split(": ")
    assert set(verdicts(levels=[0, 1])) == {f"{level}-{name}" for name in names.split()}


@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [
        ("alignment", 48, "hygiene-properties"),
        ("description", None, "hygiene-properties"),
        ("max_buffer_size", -1, "hygiene-properties"),
        ("hardware_id", " ", "hygiene-properties"),
        ("kind", Kind.HOST, "hygiene-properties"),
    ],
)
def test_a_property_that_makes_no_sense_is_found(monkeypatch, attribute, value, named) -> None:
    monkeypatch.setattr(SoundDevice, attribute, value)
    assert set(verdicts(levels=[0])) == {named}


def test_devices_that_change_are_found() -> None:
    class Changing(SoundBackend):
        count = 0

        def devices(self):
            self.count += 1
            return [SoundDevice() for _ in range(self.count)]

    assert set(verdicts(levels=[0], backend=Changing)) == {"hygiene-devices-repeatable"}


# --- indices --------------------------------------------------------------------------------------------------------

INDEXING = [name for name, op in OPS.items() if op.indices and op.family not in ("rope", "random")]


def test_the_sound_device_raises_wrong_indices() -> None:
    found = suite(["fault-index-*"])
    outcomes = {o.id: o.status for item in found.items for o in [found.perform(item)]}
    assert outcomes == {f"fault-index-{op}": "passed" for op in INDEXING}


@pytest.mark.parametrize("op", INDEXING)
def test_a_device_that_picks_by_a_wrong_index_in_silence_is_found(monkeypatch, op) -> None:
    def run_step(self: SoundDevice, step: Step) -> None:
        sources = [np.array(self.view(arg)) for arg in step.srcs]
        if step.op == op:
            skip = 1 if OPS[op].writes else 0
            ids = next(s for i, s in enumerate(sources) if i + skip in OPS[op].indices)
            ids[...] = np.maximum(np.minimum(ids, lengths(step) - 1), 0)
        self.store(step, *sources)

    monkeypatch.setattr(SoundDevice, "run_step", run_step)
    assert set(verdicts(["fault-index-*"])) == {f"fault-index-{op}"}


def lengths(step: Step) -> int:
    """Of what the step indexes."""
    if step.op == "index_add":
        return int(step.attrs["n"])
    table = {"index_copy": step.out, "expert_linear": step.srcs[1 % len(step.srcs)], "add_expert": step.srcs[1]}
    return table.get(step.op, step.srcs[0]).shape[step.attrs.get("axis", 0)]


def test_a_wrong_index_that_is_no_bounds_error_is_found(monkeypatch) -> None:
    right = SoundDevice.run_step
    monkeypatch.setattr(SoundDevice, "run_step", lambda self, step: without_cause(right, self, step))
    assert set(verdicts(["fault-index-*"])) == {f"fault-index-{op}" for op in INDEXING}


def without_cause(right: Callable[..., None], device: SoundDevice, step: Step) -> None:
    wrong = False
    try:
        right(device, step)
    except BoundsError:
        wrong = True
    if wrong:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_whose_driver_ends_its_use_is_not_asked(monkeypatch) -> None:
    monkeypatch.setattr(SoundDevice, "raises_index_errors", False)
    found = suite(["fault-index-*"])
    assert {found.perform(item).status for item in found.items} == {"skipped"}
