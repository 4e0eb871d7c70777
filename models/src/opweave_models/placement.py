"""`plan_placement`: which layers, caches and experts of a model go to which device, by the memory that is free there.

Whole layers go to the devices in their order: each takes as many as its budget holds, the last one the rest. The
embedding goes to the first, the output to the last one that has layers. Nothing is allocated for a plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import inf
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.contract import BufferType, Device
from opweave.errors import AllocationError, BoundsError, SchedulerError, UnknownNameError
from opweave.graph.precision import Precision, check_precision
from opweave.scheduler.place.support import ask
from opweave.scheduler.place.target import repack_limit
from opweave.units import human_bytes
from opweave_models.files import ModelFile, nbytes_of, rounded, stored_type

__all__ = ["Plan", "Share", "parse_bytes", "plan_placement"]

RESERVE: Final = 0.1
"""This share of a device's free memory is left alone, unless a budget is given: libraries take some for themselves."""

BOUND: Final = 1.5
"""A decoder takes at most this many times the bytes of its weights, unless more copies are asked for (``repack=``)."""

TOKENIZER: Final = 320
"""Bytes that the library ``tokenizers`` takes for each token of a vocabulary: its text twice, in tables that are half
empty, and its merges."""

_UNITS: Final = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip

Needs = tuple[BufferType | None, int, int]
"""The kind of memory to which a scheduler copies a weight, bytes of the copy, and those of scratch without it."""


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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower(), re.ASCII)
    count = inf if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if count == inf:
        raise BoundsError(f"memory is a number of bytes, such as 20GiB or 500MB, not {text!r:.60}")
    return int(count)


def plan_placement(
    file: ModelFile,
    devices: Sequence[str] | str = "auto",
    *,
    context: int | None = None,
    sequences: int = 1,
    kv: str = "f16",
    chunk: int = 512,
    memory: Mapping[str, int | str] | None = None,
    split: Sequence[float] | None = None,
    experts: str | None = None,
    patterns: Mapping[str, str] | None = None,
    repack: int | str | None = None,
    precision: Any = "int8",
    quantize: str | None = None,
) -> Plan:
    """A plan for a model, before any of it is loaded.

    Args:
        file: the model.
        devices: names, the preferred one first; ``"auto"``: graphics cards that are found, then the CPU.
        context, sequences, kv: how large the caches are, as of `load`.
        chunk: tokens of a prompt that are computed at a time.
        memory: device -> its budget, such as ``{"torch:cuda:0": "20GiB"}``; else nine tenths of what is free.
        split: how many layers each device gets, as proportions, where budgets allow that.
        experts: the device for the weights of all experts.
        patterns: glob patterns of weights -> device, which count before everything else. Patterns that match nothing
            are no error.
        repack, precision, quantize: as of `load`.

    Raises:
        AllocationError: the devices together cannot hold the model, or one of them its part.
        UnknownNameError: a device, dtype or precision that does not exist, or a budget for a device that is not used.
        BoundsError, DTypeError, LayoutError, SchedulerError: numbers, dtypes or options that do not fit.
    """
    config = file.config
    context = min(config.context, 4096) if context is None else context
    if not isinstance(context, int) or not 1 <= context <= config.context:
        raise BoundsError(f"context is a number of tokens from 1 to {config.context:,}, for which this model was made, "
                          f"not {context!r:.60}")  # fmt: skip
    if not isinstance(sequences, int) or not 1 <= sequences <= 1024:
        raise BoundsError(f"sequences is a number from 1 to 1,024, not {sequences!r:.60}")
    if config.causal:
        ow.KVCache(1, 1, 1, config.groups, config.size, kv)  # refuses dtypes, without memory
    if quantize is not None:
        wanted = ow.as_dtype(quantize)
        rounded("", np.zeros((1, wanted.block), np.float32), wanted)
        kinds = {name: loaded_type(name, value, quantize) for name, value in file.tensors.items()}
        file = replace(file, tensors={
            name: value if kinds[name] is None else ow.input(name, value.shape, kinds[name])
            for name, value in file.tensors.items()
        })  # fmt: skip
    names = _devices(devices)
    sizes = {name: nbytes_of(file.tensors[name]) for name in file.tensors}
    forced = _forced(sizes, _mapping("patterns", patterns), experts)
    named = list(dict.fromkeys([*names, *forced.values()]))
    given = {_name(device): parse_bytes(value) for device, value in _mapping("memory", memory).items()}
    for name in given:
        if name not in named:
            raise UnknownNameError("device", name, named, "It has a budget, and the model does not use it.")
    budgets = {name: given[name] if name in given else _budget(name) for name in named}
    caches = [cache_bytes(file, i, context, sequences, kv) if config.causal else 0 for i in range(config.layers)]
    rough = "exact" if isinstance(precision, Mapping) else check_precision(precision)
    needs = cache(partial(_needs, rough, max(1, config.experts_used)))
    base = {name: compute_bytes(file, ow.device(name), context, chunk, sequences, kv, rough) for name in named}
    compute = {
        name: n + max(scratch, *(each for _, (_, _, each) in _products(file, name, sizes, chunk, needs)))
        for name, (n, scratch) in base.items()
    }
    own = [sum(n for name, n in sizes.items() if name.startswith(f"blk.{i}.") and name not in forced)
           for i in range(config.layers)]  # fmt: skip
    ends = {"first": _outside(sizes, forced, output=False), "last": _outside(sizes, forced, output=True)}
    taken = dict.fromkeys(named, 0)
    for name, device in forced.items():
        taken[device] += sizes[name]
    layers = (
        _by_proportion(names, split, config.layers) if split is not None
        else _by_memory(names, budgets, taken, [n + cache for n, cache in zip(own, caches, strict=True)], ends, compute)
    )  # fmt: skip
    placed = {name: _home(name, layers, "output.weight" in sizes) for name in sizes}
    placed |= forced
    used = [name for name in named if name in placed.values()]
    limit = None if repack is None else parse_bytes(repack)
    shares = tuple(
        with_copies(file, Share(
            name, tuple(i for i, device in enumerate(layers) if device == name),
            sum(n for tensor, n in sizes.items() if placed[tensor] == name),
            sum(n for n, device in zip(caches, layers, strict=True) if device == name), base[name][0], budgets[name],
        ), [tensor for tensor in sizes if placed[tensor] == name], limit, needs, chunk, base[name][1]) for name in used
    )  # fmt: skip
    for share in shares:
        least = share.weights + share.cache + share.compute
        if share.budget is not None and least > share.budget:
            why = "that was given" if share.device in given else "of nine tenths of what is free; memory= gives another"
            raise AllocationError(share.device, least, share.budget, f"by the budget {why}")
    return Plan(shares, placed if len(shares) > 1 else {}, tuple(layers), context, sequences, kv,
                TOKENIZER * config.vocabulary)  # fmt: skip


def cache_bytes(file: ModelFile, layer: int, context: int, sequences: int, kv: str) -> int:
    """Bytes of the keys and values of a layer; one with a window keeps no more than that."""
    dtype, config = ow.as_dtype(kv), file.config
    kept = min(context, config.window) if config.windowed[layer] else context
    elements = (sequences * kept + 1) * config.groups * config.size
    return 2 * (elements // dtype.block) * dtype.itemsize


def compute_bytes(
    file: ModelFile, device: Device, context: int, chunk: int, sequences: int, kv: str, precision: Precision
) -> tuple[int, int]:
    """Bytes of temporary values while ``chunk`` tokens of a prompt are computed: those of a layer that live at one
    time, the mask, and the logits; and of scratch memory of attention beside them."""
    config, tokens = file.config, min(chunk, context)
    used, hidden, width = max(1, config.experts_used), config.hidden, config.width
    dtype = ow.as_dtype(kv)
    q, k, mask = (
        ow.input("x", shape, dtype if dtype.is_float else "f32")
        for shape in ((1, config.heads, tokens, config.size), (1, config.groups, context, config.size),
                      (1, 1, tokens, context))
    )  # fmt: skip
    signature = ow.attention(q, k, k, mask).signature
    assert signature is not None
    decoded = context if dtype.is_quantized else 0  # keys and values in blocks are decoded for a product
    attention = 8 * (tokens * (config.heads + config.groups) + decoded * config.groups) * config.size
    network = 4 * tokens * used * max(3 * hidden, hidden + width, 2 * width)
    rest = 4 * tokens * (2 * width + context) + 8 * max(1, sequences) * config.vocabulary
    most = max(attention, network)
    return most + rest, max(0, attention + ask(device, signature.at(precision, frozenset())).workspace - most)


def with_copies(
    file: ModelFile,
    share: Share,
    names: Sequence[str],
    limit: float | None,
    needs: Callable[..., Needs],
    chunk: int,
    least: int,
) -> Share:
    """A share with the copies of its weights that the scheduler makes within ``limit``, and the scratch memory, at
    least so much, of products with the others; ``None``: the limit that keeps a decoder within `BOUND`, where no
    environment variable gives another one; of an encoder all."""
    device = ow.device(share.device)
    usual = repack_limit(None, device)
    if limit is None and (usual < inf or not file.config.causal):
        limit = usual
    most = min(BOUND * share.weights, inf if share.budget is None else share.budget)
    if device.default_buffer_type.is_host:
        most -= TOKENIZER * file.config.vocabulary
    steps = _products(file, share.device, names, chunk, needs)

    def within(limit: float) -> Share:
        made: dict[tuple[str, BufferType], int] = {}
        left, most_scratch = limit, least
        for name, (kind, size, scratch) in steps:
            if kind is None or ((name, kind) not in made and size > left):
                most_scratch = max(most_scratch, scratch)
            elif (name, kind) not in made:
                made[name, kind], left = size, left - size
        compute = share.compute + most_scratch
        replaced = sum(nbytes_of(file.tensors[name]) for name in {name for name, _ in made})
        return replace(share, compute=compute, repack=limit, copies=sum(made.values()), replaced=replaced)

    if limit is not None:
        return within(limit)
    low, high = 0, 1 + sum(size for _, (_, size, _) in steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle).total <= most else (low, middle)
    return within(low)


def _products(
    file: ModelFile, device: str, names: Iterable[str], chunk: int, needs: Callable[..., Needs]
) -> list[tuple[str, Needs]]:
    """The weights that a device multiplies with, in programs of prompts and of single tokens, with what that needs."""
    found, steps, tied = ow.device(device), [], "output.weight" not in file.tensors
    for tokens in (chunk, 1):
        for name in sorted(names, key=lambda name: _is_output(name, tied)):
            value = file.tensors[name]
            if len(value.shape) > 1 and (name != "token_embd.weight" or tied):
                rows = 1 if _is_output(name, tied) else tokens
                steps.append((name, needs(found, ow.as_dtype(value.dtype), value.shape, rows)))
    return steps


def _needs(
    precision: Precision, experts: int, device: Device, dtype: ow.DType, shape: tuple[int, ...], rows: int
) -> Needs:
    """What products of so many rows with a weight need on a device."""
    x, w = ow.input("x", (rows, shape[-1])), ow.state("w", shape, dtype)
    if len(shape) == 2:
        product = ow.linear(x, w)
    elif len(shape) == 3 and dtype.is_half:
        product = ow.expert_linear(x, w, ow.input("ids", (rows, experts), "i64"))
    else:
        return None, 0, 0
    if dtype.is_half:  # it is widened for the product, unless the device does both at once: only a plan tells
        with ow.Scheduler(list({device.name: 0, "host": 0}), precision=precision) as scheduler:
            use = scheduler.partition(product).memory.get(device.name)
        return None, 0, 0 if use is None else max(0, use.temporaries - product.nbytes - x.nbytes)
    signature = product.signature
    assert signature is not None
    constant = frozenset([1] if dtype is ow.as_dtype("f32") else [])
    copied = ask(device, signature.at(precision, constant, frozenset([1]), frozenset([device]))).repacked.get(1)
    scratch = ask(device, signature.at(precision, constant)).workspace
    return copied, 0 if copied is None else copied.alloc_size(w), scratch


def loaded_type(name: str, value: Any, quantize: str) -> ow.DType | None:
    """The type that a tensor is rounded to while it is loaded; ``None``: it stays, as those in blocks do."""
    return None if isinstance(value, ow.Blocks) else stored_type(name, value, ow.as_dtype(quantize))


def _mapping(what: str, given: Any) -> Mapping[str, Any]:
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        raise SchedulerError(f"{what} is a dictionary with names as keys, not {given!r:.60}")
    return given or {}


def _name(device: Any) -> str:
    return ow.device(str(device)).name


def _devices(devices: Sequence[str] | str) -> list[str]:
    if not isinstance(devices, Iterable):
        raise SchedulerError(f"devices are names, such as ['cpu'], not {devices!r:.60}")
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
    """Weights whose device was chosen by the caller. Devices of patterns that match nothing are looked up too."""
    every = {**patterns, **({} if experts is None else {"*_exps.weight": experts})}
    every = {pattern: _name(device) for pattern, device in every.items()}
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


def _by_proportion(names: Sequence[str], given: Any, layers: int) -> list[str]:
    split = list(given) if isinstance(given, Iterable) else []
    numbers = all(isinstance(n, int | float | np.integer | np.floating) and 0 <= n <= 1e30 for n in split)
    if len(split) != len(names) or not numbers or not sum(split) > 0:
        raise BoundsError(f"split has a number from 0 to 1e30 for each of {len(names)} devices, one of them above 0, "
                          f"not {given!r:.60}")  # fmt: skip
    ends = [round(layers * sum(split[: i + 1]) / sum(split)) for i in range(len(split))]
    return [names[next(j for j, end in enumerate(ends) if i < end)] for i in range(layers)]


def _by_memory(
    names: Sequence[str], budgets: Mapping[str, int | None], taken: Mapping[str, int], layers: Sequence[int],
    ends: Mapping[str, int], compute: Mapping[str, int],
) -> list[str]:  # fmt: skip
    """Each device in turn takes as many layers as fit; the last one that is needed also has room for the output."""
    result: list[str] = []
    for j, name in enumerate(names):
        budget, used = budgets[name], taken[name] + compute[name] + (ends["first"] if not result else 0)
        rest = sum(layers[len(result) :]) + ends["last"]
        if budget is None or used + rest <= budget:
            return [*result, *[name] * (len(layers) - len(result))]
        last = j == len(names) - 1
        while len(result) < len(layers) - 1 and not last and used + layers[len(result)] <= budget:
            used += layers[len(result)]
            result.append(name)
    name = names[-1]
    needed = taken[name] + compute[name] + sum(layers[len(result) :]) + ends["last"]
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
