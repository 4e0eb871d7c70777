"""`plan_placement`: which layers, caches and experts of a model go to which device, by the memory that is free there.

Whole layers go to the devices in their order: each takes as many as its budget holds, the last one the rest. The
embedding goes to the first, the output to the last one that has layers. Nothing is allocated for a plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import inf
from typing import Any, Final

import opweave as ow
from opweave.contract import BufferType, Device
from opweave.errors import AllocationError, BoundsError, SchedulerError, UnknownNameError
from opweave.graph.precision import Precision, check_precision
from opweave.scheduler.place.support import ask
from opweave.scheduler.place.target import repack_limit
from opweave.units import human_bytes
from opweave_models.files import ModelFile, nbytes_of

__all__ = ["Plan", "Share", "parse_bytes", "plan_placement"]

RESERVE: Final = 0.1
"""This share of a device's free memory is left alone, unless a budget is given: libraries take some for themselves."""

BOUND: Final = 1.5
"""A decoder takes at most this many times the bytes of its weights, unless more copies are asked for (``repack=``)."""

TOKENIZER: Final = 320
"""Bytes that the library ``tokenizers`` takes for each token of a vocabulary: its text twice, in tables that are half
empty, and its merges."""

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True)
class Share:
    """What one device gets: bytes of each kind.

    Attributes:
        device: its name.
        layers: the numbers of the layers that it computes.
        weights, cache, compute: bytes of weights; of keys and values; of temporary values, an upper estimate.
        budget: bytes that it may take; ``None``: it does not know its memory.
        repack: bytes up to which copies of weights are made in forms with which the device's kernels are faster.
        copies: bytes of these.
        replaced: bytes of the weights that have such copies: they lie in mapped pages of the file, which are let go of.
    """

    device: str
    layers: tuple[int, ...]
    weights: int
    cache: int
    compute: int
    budget: int | None
    repack: float = 0
    copies: int = 0
    replaced: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute + self.copies - self.replaced


@dataclass(frozen=True)
class Plan:
    """Where everything goes; ``print(plan)`` shows it.

    Attributes:
        shares: by device, in the order of the layers.
        placed: name of a weight -> device; empty: one device has all.
        layers: the device of each layer, which also holds its keys and values.
        context, sequences, kv: the longest sequence, how many at a time, and the dtype of keys and values.
        tokenizer: bytes that the tokenizer takes in this process, an estimate.
        advice: which device would be faster alone, once that was measured; else "".
    """

    shares: tuple[Share, ...]
    placed: Mapping[str, str]
    layers: tuple[str, ...]
    context: int
    sequences: int
    kv: str
    tokenizer: int = 0
    advice: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(share.device for share in self.shares)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("device", "layers", "weights", "copies", "cache", "compute", "total", "budget")]
        for s in self.shares:
            budget = "unknown" if s.budget is None else human_bytes(s.budget)
            sizes = (human_bytes(n) for n in (s.weights, s.copies, s.cache, s.compute, s.total))
            rows.append((s.device, _ranges(s.layers), *sizes, budget))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        several = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        rest = f"keys and values in {self.kv}, and {human_bytes(self.tokenizer)} for the tokenizer"
        told = [self.advice] if self.advice else []
        return "\n".join([*lines, f"{several}{self.context:,} tokens, {rest}", *told])


def parse_bytes(text: str | int) -> int:
    """Bytes from ``20GiB``, ``500 MB`` or a number. Raises `BoundsError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi)?b?", str(text).strip().lower())
    if match is None:
        raise BoundsError(f"memory is a number of bytes, such as 20GiB or 500MB, not {text!r:.60}")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def plan_placement(
    file: ModelFile,
    devices: Sequence[str] | str = "auto",
    *,
    context: int,
    sequences: int = 1,
    kv: str = "f16",
    chunk: int = 512,
    memory: Mapping[str, int | str] | None = None,
    split: Sequence[float] | None = None,
    experts: str | None = None,
    patterns: Mapping[str, str] | None = None,
    repack: int | str | None = None,
    precision: Any = "int8",
) -> Plan:
    """A plan for a model, before any of it is loaded.

    Args:
        file: the model.
        devices: names, the preferred one first; ``"auto"``: graphics cards that are found, then the CPU.
        context, sequences, kv: how large the caches are.
        chunk: tokens of a prompt that are computed at a time.
        memory: device -> its budget, such as ``{"torch:cuda:0": "20GiB"}``; else nine tenths of what is free.
        split: how many layers each device gets, as proportions; budgets are only checked then.
        experts: the device for the weights of all experts.
        patterns: glob patterns of weights -> device, which count before everything else. Patterns that match nothing
            are no error.
        repack, precision: as of `load`.

    Raises:
        AllocationError: the devices together cannot hold the model.
        UnknownNameError: a device or precision that does not exist, or a budget for one that is not used.
        BoundsError, SchedulerError: numbers or options that do not fit.
    """
    names = _devices(devices)
    config = file.config
    sizes = {name: nbytes_of(file.tensors[name]) for name in file.tensors}
    forced = _forced(sizes, patterns or {}, experts)
    named = list(dict.fromkeys([*names, *(_name(device) for device in forced.values())]))
    given = {_name(device): parse_bytes(value) for device, value in (memory or {}).items()}
    for name in given:
        if name not in named:
            raise UnknownNameError("device", name, named, "It has a budget, and the model does not use it.")
    budgets = {name: given[name] if name in given else _budget(name) for name in named}
    caches = [cache_bytes(file, i, context, sequences, kv) if config.causal else 0 for i in range(config.layers)]
    compute = compute_bytes(file, context, chunk, sequences)
    own = [sum(n for name, n in sizes.items() if name.startswith(f"blk.{i}.") and name not in forced)
           for i in range(config.layers)]  # fmt: skip
    ends = {"first": _outside(sizes, forced, output=False), "last": _outside(sizes, forced, output=True)}
    taken = dict.fromkeys(named, 0)
    for name, device in forced.items():
        taken[_name(device)] += sizes[name]
    layers = (
        _by_proportion(names, split, config.layers) if split is not None
        else _by_memory(names, budgets, taken, [n + cache for n, cache in zip(own, caches, strict=True)], ends, compute)
    )  # fmt: skip
    placed = {name: _home(name, layers, "output.weight" in sizes) for name in sizes}
    placed |= {name: _name(device) for name, device in forced.items()}
    used = [name for name in named if name in placed.values()]
    limit = None if repack is None else parse_bytes(repack)
    rough = "exact" if isinstance(precision, Mapping) else check_precision(precision)
    shares = tuple(
        with_copies(file, Share(
            name, tuple(i for i, device in enumerate(layers) if device == name),
            sum(n for tensor, n in sizes.items() if placed[tensor] == name),
            sum(n for n, device in zip(caches, layers, strict=True) if device == name), compute, budgets[name],
        ), [tensor for tensor in sizes if placed[tensor] == name], limit, rough, chunk) for name in used
    )  # fmt: skip
    for share in shares:
        least = share.weights + share.cache + compute
        if least > given.get(share.device, least):
            raise AllocationError(share.device, least, given[share.device], "by the budget that was given")
    return Plan(shares, placed if len(shares) > 1 else {}, tuple(layers), context, sequences, kv,
                TOKENIZER * config.vocabulary)  # fmt: skip


def cache_bytes(file: ModelFile, layer: int, context: int, sequences: int, kv: str) -> int:
    """Bytes of the keys and values of a layer; one with a window keeps no more than that."""
    dtype, config = ow.as_dtype(kv), file.config
    kept = min(context, config.window) if config.windowed[layer] else context
    elements = (sequences * kept + 1) * config.groups * config.size
    return 2 * (elements // dtype.block) * dtype.itemsize


def compute_bytes(file: ModelFile, context: int, chunk: int, sequences: int) -> int:
    """Bytes of temporary values while ``chunk`` tokens of a prompt are computed: those of a layer that live at one
    time, the mask, and the logits."""
    config, tokens = file.config, min(chunk, context)
    used = max(1, config.experts_used)
    rows = 4 * config.width + 2 * (config.heads + config.groups) * config.size + 3 * used * config.hidden
    return 4 * tokens * rows + tokens * context + 8 * max(1, sequences) * config.vocabulary


def with_copies(
    file: ModelFile,
    share: Share,
    names: Sequence[str],
    limit: float | None,
    precision: Precision,
    chunk: int,
) -> Share:
    """A share with the copies of its weights that the scheduler makes within ``limit``, and the scratch memory of
    products with the others; ``None``: the limit that keeps a decoder within `BOUND`, where no environment variable
    gives another one; of an encoder all."""
    device, tied = ow.device(share.device), "output.weight" not in file.tensors
    usual = repack_limit(None, device)
    if limit is None and (usual < inf or not file.config.causal):
        limit = usual
    most = min(BOUND * share.weights, inf if share.budget is None else share.budget)
    if device.default_buffer_type.is_host:
        most -= TOKENIZER * file.config.vocabulary
    ask_once = cache(partial(_copied, device, precision))
    steps: list[tuple[str, BufferType | None, int, int]] = []  # with bytes of the copy, and of scratch without it
    for tokens in (chunk, 1):  # programs of prompts, and of single tokens
        for name in sorted(names, key=lambda name: _is_output(name, tied)):
            value = file.tensors[name]
            if len(value.shape) == 2 and (name != "token_embd.weight" or tied):
                rows = 1 if _is_output(name, tied) else tokens
                steps.append((name, *ask_once(ow.as_dtype(value.dtype), value.shape, rows)))

    def within(limit: float) -> Share:
        made: dict[tuple[str, BufferType], int] = {}
        left, most_scratch = limit, 0
        for name, kind, size, scratch in steps:
            if kind is None or ((name, kind) not in made and size > left):
                most_scratch = max(most_scratch, scratch)
            elif (name, kind) not in made:
                made[name, kind], left = size, left - size
        compute = share.compute + most_scratch
        replaced = sum(nbytes_of(file.tensors[name]) for name in {name for name, _ in made})
        return replace(share, compute=compute, repack=limit, copies=sum(made.values()), replaced=replaced)

    if limit is not None:
        return within(limit)
    low, high = 0, 1 + sum(size for _, _, size, _ in steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle).total <= most else (low, middle)
    return within(low)


def _copied(
    device: Device, precision: Precision, dtype: ow.DType, shape: tuple[int, int], rows: int
) -> tuple[BufferType | None, int, int]:
    """The kind of memory to which a scheduler copies a weight for products with so many rows, bytes of the copy, and
    those of scratch memory without it."""
    w = ow.input("w", shape, dtype)
    signature = ow.linear(ow.input("x", (1, rows, shape[1])), w).signature
    assert signature is not None
    constant = frozenset([1] if dtype is ow.as_dtype("f32") else [])
    copied = ask(device, signature.at(precision, constant, frozenset([1]), frozenset([device]))).repacked.get(1)
    scratch = ask(device, signature.at(precision, constant)).workspace
    return copied, 0 if copied is None else copied.alloc_size(w), scratch


def _name(device: str) -> str:
    return ow.device(device).name


def _devices(devices: Sequence[str] | str) -> list[str]:
    if devices != "auto":
        given = devices.split(",") if isinstance(devices, str) else list(devices)
        names = list(dict.fromkeys(_name(device) for device in given))
        if not names:
            raise SchedulerError("a model needs at least one device")
        return names
    found = [device for device in ow.default_devices() if device.kind is not ow.Kind.HOST]
    cards = [device.name for device in found if device.kind in (ow.Kind.GPU, ow.Kind.IGPU)]
    processors = [device.name for device in found if device.name.partition(":")[0] == "cpu"]
    return (cards + processors) or [device.name for device in found] or ["host"]


def _budget(name: str) -> int | None:
    free, total = ow.device(name).mem_info()
    return int(free * (1 - RESERVE)) if total else None


def _forced(sizes: Mapping[str, int], patterns: Mapping[str, str], experts: str | None) -> dict[str, str]:
    """Weights whose device was chosen by the caller."""
    every = {**patterns, **({} if experts is None else {"*_exps.weight": experts})}
    found: dict[str, str] = {}
    for name in sizes:
        device = next((device for pattern, device in every.items() if fnmatchcase(name, pattern)), None)
        if device is not None:
            found[name] = device
    return found


def _outside(sizes: Mapping[str, int], forced: Mapping[str, str], *, output: bool) -> int:
    """Bytes of the weights outside of layers that lie at the beginning, or at the output."""
    tied = "output.weight" not in sizes
    return sum(n for name, n in sizes.items() if not name.startswith("blk.") and name not in forced
               and (_is_output(name, tied)) is output)  # fmt: skip


def _is_output(name: str, tied: bool) -> bool:
    """A table that embeds tokens and also makes logits counts as the output, where more of its bytes are read."""
    return name.startswith("output") or (tied and name == "token_embd.weight")


def _home(name: str, layers: Sequence[str], has_output: bool) -> str:
    if name.startswith("blk."):
        return layers[int(name.split(".")[1])]
    return layers[-1] if _is_output(name, not has_output) else layers[0]


def _by_proportion(names: Sequence[str], split: Sequence[float], layers: int) -> list[str]:
    if len(split) != len(names) or min(split) < 0 or not sum(split) > 0:
        raise BoundsError(f"split has a number from 0 on for each of {len(names)} devices, not {tuple(split)!r:.60}")
    ends = [round(layers * sum(split[: i + 1]) / sum(split)) for i in range(len(split))]
    return [names[next(j for j, end in enumerate(ends) if i < end)] for i in range(layers)]


def _by_memory(
    names: Sequence[str], budgets: Mapping[str, int | None], taken: Mapping[str, int], layers: Sequence[int],
    ends: Mapping[str, int], compute: int,
) -> list[str]:  # fmt: skip
    """Each device in turn takes as many layers as fit; the last one that is needed also has room for the output."""
    result: list[str] = []
    for j, name in enumerate(names):
        budget, used = budgets[name], taken[name] + compute + (ends["first"] if not result else 0)
        rest = sum(layers[len(result) :]) + ends["last"]
        if budget is None or used + rest <= budget:
            return [*result, *[name] * (len(layers) - len(result))]
        last = j == len(names) - 1
        while len(result) < len(layers) - 1 and not last and used + layers[len(result)] <= budget:
            used += layers[len(result)]
            result.append(name)
    name = names[-1]
    needed = taken[name] + compute + sum(layers[len(result) :]) + ends["last"]
    raise AllocationError(
        name, needed, budgets[name],
        f"{len(layers) - len(result)} layers are left for it; use a smaller context, a smaller type of keys and values "
        "(kv=), more devices, or a file of smaller blocks",
    )  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    if not numbers:
        return "-"
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def summary(file: ModelFile) -> dict[str, Any]:
    """What `opweave models info` prints of a model."""
    config = file.config
    return {
        "architecture": config.architecture, "name": config.name, "layers": config.layers, "width": config.width,
        "heads": config.heads, "groups": config.groups, "head size": config.size, "hidden": config.hidden,
        "experts": f"{config.experts_used} of {config.experts}" if config.experts else "none",
        "vocabulary": config.vocabulary, "context": config.context,
        "window": f"{config.window} in {sum(config.windowed)} layers" if config.window else "none",
        "weights": f"{human_bytes(file.nbytes)}: "
        + ", ".join(f"{kind} {human_bytes(n)}" for kind, n in file.kinds.items()),
        "chat template": "its own" if file.chat_template else "none",
    }  # fmt: skip
