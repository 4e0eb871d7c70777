"""`plan_placement`: which layers, caches and experts of a model go to which device, by the memory that is free there.

Whole layers go to the devices in their order: each takes as many as its budget holds, the last one the rest. The
embedding goes to the first, the output to the last one that has layers. Nothing is allocated for a plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

import opweave as ow
from opweave.contract import BufferType, Device
from opweave.errors import AllocationError, BoundsError, SchedulerError, UnknownNameError
from opweave.graph.graph import Graph
from opweave.graph.leaf import Spec
from opweave.graph.precision import Precision, check_precision
from opweave.graph.tensor import Signature
from opweave.scheduler.place.capabilities import at_precision
from opweave.scheduler.place.precision import Allowed, allowed_for, checked_precision, stored_source
from opweave.scheduler.place.support import ask, unbound_step
from opweave.scheduler.place.target import repack_limit
from opweave.units import human_bytes
from opweave_models.config import Config
from opweave_models.decoder import Weights, decode, empty_cache
from opweave_models.encoder import TEXTS, TOKENS, batch_shape, encode
from opweave_models.files import ModelFile, Stacked, encoded_type, nbytes_of, stored_type

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


class Product(NamedTuple):
    """A product with a weight.

    Attributes:
        name: of the weight.
        signature: what devices are asked about.
        position: of the weight among the sources.
        whole: whether the source is the weight itself, and not cast from it.
    """

    name: str
    signature: Signature
    position: int
    whole: bool


class Copied(NamedTuple):
    """The copy of a weight that a device reads in a product.

    Attributes:
        kind: the memory to which a scheduler copies it, as far as ``repack=`` allows that; else ``None``.
        size: bytes there, or of what the device's library packs in any case.
        rounded: bytes of the copy in bf16 that a scheduler makes where ``kind`` is not there.
    """

    kind: BufferType | None
    size: int
    rounded: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one device gets: bytes of each kind.

    Attributes:
        device: its name.
        layers: the numbers of the layers that it computes.
        weights, cache, compute: bytes of weights; of keys and values; of temporary values.
        budget: bytes that it may take; ``None``: it does not know its memory.
        repack: bytes up to which copies of weights are made in forms with which the device's kernels are faster.
        copies: bytes of these, and of those that the device's library makes in any case.
        wanted: bytes of them without a limit.
        replaced: bytes of the weights that have such copies: they lie in mapped pages of the file, which are let go of.
        host: bytes of temporary values of steps that only the host computes, if they lie in the memory of this device;
            beside devices with memory of their own the host has a share itself.
    """

    device: str
    layers: tuple[int, ...]
    weights: int
    cache: int
    compute: int
    budget: int | None
    repack: float = 0
    copies: int = 0
    wanted: int = 0
    replaced: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute + self.host + self.copies - self.replaced


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
            sizes = (human_bytes(n) for n in (s.weights, s.copies, s.cache, s.compute + s.host, s.total))
            rows.append((s.device, _ranges(s.layers), *sizes, budget))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        several = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        rest = f"keys and values in {self.kv}, and {human_bytes(self.tokenizer)} for the tokenizer"
        told = [
            f"{s.device} makes {human_bytes(s.copies)} of the {human_bytes(s.wanted)} of copies with which its kernels "
            f"are faster; repack={f'{-(-s.wanted // 2**20)}MiB'!r} makes all"
            for s in self.shares
            if s.copies < s.wanted
        ]
        told += [self.advice] if self.advice else []
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
        memory: device -> its budget, such as ``{"torch:cuda:0": "20GiB"}``; else nine tenths of what is free. One of
            ``host`` counts where it has a share.
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
    context = _checked_context(config, context, sequences, chunk)
    new_cache = partial(empty_cache, sequences=sequences, context=context, kv=kv)
    states = new_cache(config) if config.causal else None  # refuses dtypes, without memory
    if quantize is not None:
        encoded_type(quantize)
        file = replace(file, tensors={
            name: value if (kind := loaded_type(name, value, quantize)) is None else ow.input(name, value.shape, kind)
            for name, value in file.tensors.items()
        })  # fmt: skip
    names = _devices(devices)
    sizes = {name: nbytes_of(file.tensors[name]) for name in file.tensors}
    forced = _forced(sizes, _mapping("patterns", patterns), experts)
    named = list(dict.fromkeys([*names, *forced.values()]))
    given = {_name(device): parse_bytes(value) for device, value in _mapping("memory", memory).items()}
    budgets = {name: given[name] if name in given else _budget(name) for name in dict.fromkeys([*named, "host"])}
    caches = [0] * config.layers if states is None else [
        k.nbytes + v.nbytes for k, v in zip(states.keys, states.values, strict=True)
    ]  # fmt: skip
    rough = "exact" if isinstance(precision, Mapping) else check_precision(precision)
    allowed = checked_precision(precision)
    copied = cache(_copied)
    tokens = 1 << (min(chunk, context) - 1).bit_length()  # as steps are padded
    shapes = {(1, tokens), *([(sequences, 1)] if sequences > 1 else [])} if config.causal else {
        batch_shape(TEXTS, longest, context) for longest in (context, 1 << (context.bit_length() - 1), TOKENS // TEXTS)
    }  # fmt: skip
    products = _products(file, allowed, states, context, [(1, tokens), (1, 1)] if config.causal else sorted(shapes))
    attention = [
        next((forced[name] for name in (f"blk.{i}.attn_k.weight", f"blk.{i}.attn_qkv.weight") if name in forced), "")
        for i in range(config.layers)
    ]  # the devices to which callers move it, with its keys and values
    limit = None if repack is None else parse_bytes(repack)

    def places(homes: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """The devices of the weights, and of each layer's keys and values, where the rest of layers is at ``homes``."""
        placed = {name: _home(name, homes, "output.weight" in sizes) for name in sizes} | forced
        return placed, tuple(moved or home for moved, home in zip(attention, homes, strict=True))

    @cache
    def compute(homes: tuple[str, ...], repack: bool) -> dict[str, int]:
        return temporaries(file, *places(homes), new_cache, context, shapes, rough, repack)

    def shares_of(homes: tuple[str, ...], wanted: Collection[str] = named) -> Iterator[Share]:
        """What each of these devices gets, with layers at ``homes``."""
        placed, layers = places(homes)
        used = [name for name in named if name in placed.values()]
        beside = 0 if "host" in used else max(compute(homes, repack)["host"] for repack in (False, True))
        near = next((name for name in used if ow.device(name).default_buffer_type.is_host), "host")
        for name in used:
            if name in wanted:
                share = Share(
                    name, tuple(i for i, device in enumerate(layers) if device == name),
                    sum(n for tensor, n in sizes.items() if placed[tensor] == name),
                    sum(n for n, device in zip(caches, layers, strict=True) if device == name), 0, budgets[name],
                    host=beside if name == near else 0,
                )  # fmt: skip
                device = ow.device(name)
                steps = [(p.name, copied(device, *p[1:])) for p in products if placed[p.name] == name]
                yield with_copies(file, share, steps, limit, partial(compute, homes))
        if beside and near == "host":
            yield Share("host", (), 0, 0, beside, budgets["host"])

    def fits(homes: tuple[str, ...], name: str) -> bool:
        return all(share.budget is None or share.total <= share.budget for share in shares_of(homes, [name]))

    homes = _by_memory(names, config.layers, fits) if split is None else _by_proportion(names, split, config.layers)
    placed, layers = places(homes)
    shares = tuple(shares_of(homes))
    _check_budgets(shares, named, given)
    return Plan(shares, placed if len({*placed.values()}) > 1 else {}, layers, context, sequences, kv,
                TOKENIZER * config.vocabulary)  # fmt: skip


def _check_budgets(shares: Sequence[Share], named: Sequence[str], given: Collection[str]) -> None:
    for name in given:
        if name not in [*named, *[share.device for share in shares]]:
            raise UnknownNameError("device", name, named, "It has a budget, and the model does not use it.")
    for share in shares:
        if share.budget is not None and share.total > share.budget:
            why = "that was given" if share.device in given else "of nine tenths of what is free; memory= gives another"
            raise AllocationError(
                share.device, share.total, share.budget,
                f"by the budget {why}; a smaller context, a smaller type of keys and values (kv=), more devices, or a "
                "file of smaller blocks take less",
            )  # fmt: skip


def _checked_context(config: Config, context: Any, sequences: Any, chunk: Any) -> int:
    """The context, 4,096 by default; or `BoundsError` for a number that is none."""
    context = min(config.context, 4096) if context is None else context
    if not isinstance(context, int) or not 1 <= context <= config.context:
        raise BoundsError(f"context is a number of tokens from 1 to {config.context:,}, for which this model was made, "
                          f"not {context!r:.60}")  # fmt: skip
    if not isinstance(chunk, int) or chunk < 1:
        raise BoundsError(f"chunk is a number of tokens from 1 on, not {chunk!r:.60}")
    if not isinstance(sequences, int) or not 1 <= sequences <= 1024:
        raise BoundsError(f"sequences is a number from 1 to 1,024, not {sequences!r:.60}")
    return context


def step_graph(
    config: Config, w: Weights, cache: ow.KVCache | None, context: int, rows: int, tokens: int, reach: int
) -> ow.Tensor:
    """The graph of a step of ``rows`` sequences with ``tokens`` new tokens each, whose attention reads ``reach``; of an
    encoder of as many texts."""
    if cache is None:
        shape = (rows, tokens)
        pooling = "mean" if config.pooling == "none" else config.pooling
        return encode(config, w, ow.input("tokens", shape, "i64"), ow.input("mask", shape, "bool"), pooling)
    each, _, _, table, ends, _ = (getattr(spec, "shape", ()) for spec in cache.specs(rows, tokens, reach))
    ids, positions, slots = (ow.input(name, each, "i64") for name in ("tokens", "positions", "slots"))
    blocks, last = ow.input("blocks", table, "i64"), ow.input("last", ends, "i64")
    return decode(config, w, cache, context, ids, positions, slots, blocks, last, reach)


def temporaries(
    file: ModelFile, placed: Mapping[str, str], layers: Sequence[str], new_cache: Callable[..., ow.KVCache],
    context: int, shapes: Iterable[tuple[int, int]], precision: Precision, repack: bool,
) -> dict[str, int]:  # fmt: skip
    """Bytes of temporary values by device, in steps of ``shapes`` (sequences, tokens): what the scheduler plans for the
    first three layers of each kind and the last one, with copies of all weights that its devices want (``repack``) or
    of none."""
    kinds: dict[Any, list[int]] = {}
    of_layer = [{name.split(".", 2)[2]: name for name in file.tensors if name.startswith(f"blk.{i}.")}
                for i in range(file.config.layers)]  # fmt: skip
    for i, names in enumerate(of_layer):
        alike = {part: (file.tensors[name].dtype, placed[name]) for part, name in names.items()}
        kinds.setdefault((file.config.windowed[i], layers[i], tuple(sorted(alike.items()))), []).append(i)
    kept = sorted(i for alike in kinds.values() for i in {*alike[:3], alike[-1]})
    config = replace(file.config, layers=len(kept), windowed=tuple(file.config.windowed[i] for i in kept))
    named = {name: name for name in file.tensors if not name.startswith("blk.")}
    named |= {f"blk.{j}.{part}": name for j, i in enumerate(kept) for part, name in of_layer[i].items()}
    stored = {name: file.tensors[old] for name, old in named.items()}
    weights = ow.weights({name: Spec(value.shape, value.dtype) for name, value in stored.items()})
    homes = {weights[name].root: placed[old] for name, old in named.items()}
    cache = new_cache(config, layers=layers) if config.causal else None
    if cache is not None:
        homes |= {each: layers[i] for i, *states in zip(kept, cache.keys, cache.values, strict=True) for each in states}
    most: Counter[str] = Counter()
    several = len({*homes.values()}) > 1
    devices = [ow.device(name) for name in dict.fromkeys([*placed.values(), *layers, "host"])]
    with ow.Scheduler(devices, precision=precision, repack=repack) as scheduler:
        for rows, tokens in shapes:
            reach = cache.reaches[-1] if cache is not None else tokens
            output = step_graph(config, weights, cache, context, rows, tokens, reach)
            near = {node: homes[source.root] for node in Graph(output).nodes for source in node.srcs
                    if several and source.root in homes and _computes(homes[source.root], node)}  # fmt: skip
            for name, use in scheduler.partition(output, near).memory.items():
                most[name] = max(most[name], use.temporaries)
    return most


def _computes(device: str, node: ow.Tensor) -> bool:
    return node.signature is not None and ask(ow.device(device), node.signature).reason is None


def with_copies(
    file: ModelFile, share: Share, steps: Sequence[tuple[str, Copied]], limit: float | None,
    compute: Callable[[bool], Mapping[str, int]],
) -> Share:  # fmt: skip
    """A share with the copies of weights that products of programs (``steps``) read, within ``limit`` and the budget,
    and the temporary values, with all copies or with none; ``None``: the limit that keeps a decoder within `BOUND`,
    where no environment variable gives another one; of an encoder all."""
    device = ow.device(share.device)
    usual = repack_limit(None, device)
    if limit is None and (usual < inf or not file.config.causal):
        limit = usual
    most = inf if share.budget is None else share.budget
    if limit is None:
        beside = TOKENIZER * file.config.vocabulary if device.default_buffer_type.is_host else 0
        most = min(most, BOUND * share.weights - beside)
    packed = sum({name: copy.size for name, copy in steps if copy.kind is None}.values())
    # The library's own copies: twice, for prompts and for single tokens, where the limit has room for that.
    twice = packed * (1 + file.config.causal)
    mapped = {name for name, value in file.tensors.items() if not isinstance(value, ow.Tensor | Stacked)}
    wanted = twice + sum({(name, copy.kind): copy.size for name, copy in steps if copy.kind is not None}.values())

    def within(limit: float) -> Share:
        made: dict[tuple[str, BufferType | None], int] = {}
        left = limit
        for name, (kind, size, _) in steps:
            if kind is None and size:
                made[name, kind] = size * (twice // packed if twice <= limit else 1)
            elif kind is not None and (name, kind) not in made and size <= left:
                made[name, kind], left = size, left - size
        for name, copy in steps:
            if copy.rounded and (name, copy.kind) not in made:
                made[name, None] = copy.rounded
        replaced = {name for name, _ in made}
        copied = {name for name, (_, *sizes) in steps if any(sizes)}
        wholes = {bool(made), copied <= replaced} if not packed else {twice <= limit}
        needed = max(compute(whole)[share.device] for whole in wholes)
        # A library compares the limit with the weights of one split, where two copies may fit although not of all.
        once = wanted == twice > limit
        return replace(share, compute=needed, repack=0 if once else limit, copies=sum(made.values()), wanted=wanted,
                       replaced=sum(nbytes_of(file.tensors[name]) for name in replaced & mapped))  # fmt: skip

    limit = wanted if limit is None else limit
    if (found := within(limit)).total <= most:
        return found
    low, high = 0, 1 + int(min(limit, wanted))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle).total <= most else (low, middle)
    return within(low)


def _products(
    file: ModelFile, allowed: Allowed, cache: ow.KVCache | None, context: int, shapes: Iterable[tuple[int, int]]
) -> list[Product]:
    """The products with weights in steps of ``shapes`` (sequences, tokens), as programs compute them."""
    weights = ow.weights({name: Spec(value.shape, value.dtype) for name, value in file.tensors.items()})
    names = {weight.root: name for name, weight in weights.items()}
    found = []
    for rows, tokens in shapes:
        reach = tokens if cache is None else cache.reaches[-1]
        for node in Graph(step_graph(file.config, weights, cache, context, rows, tokens, reach)).nodes:
            if node.op is None or not node.op.product or node.signature is None:
                continue
            signature = at_precision(node, node.signature, allowed_for(node, allowed))
            for i, source in enumerate(node.srcs):
                if (weight := stored_source(source)) in names:
                    found.append(Product(names[weight], signature, i, source.leaf is not None))
    return found


def _copied(device: Device, signature: Signature, i: int, whole: bool) -> Copied:
    """The copy of a weight that a device wants for a product or makes in any case, by what schedulers ask it."""
    dtype, shape, _ = signature.srcs[i]
    weight, precision, constant = ow.state("w", shape, dtype), signature.precision, signature.constant
    rounded = weight.size * 2 if i in ask(device, signature).rounded else 0
    if whole and ((precision != "exact" and constant) or device.keeps_repacked([weight])):
        kind = ask(device, signature.at(precision, constant, frozenset([i]), frozenset([device]))).repacked.get(i)
        if kind is not None:
            return Copied(kind, kind.alloc_size(weight), rounded)
    return Copied(None, device.packed_bytes(unbound_step(signature, device), i), rounded)


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
        names = [_name(device) for device in given]
        if not names:
            raise SchedulerError("a model needs at least one device")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise SchedulerError(f"each device is named once, and {', '.join(twice)} more often: {given!r:.200}")
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


def _is_output(name: str, tied: bool) -> bool:
    """A table that embeds tokens and also makes logits counts as the output, where more of its bytes are read."""
    return name.startswith("output") or (tied and name == "token_embd.weight")


def _home(name: str, layers: Sequence[str], has_output: bool) -> str:
    if name.startswith("blk."):
        return layers[int(name.split(".")[1])]
    return layers[-1] if _is_output(name, not has_output) else layers[0]


def _by_proportion(names: Sequence[str], given: Any, layers: int) -> tuple[str, ...]:
    split = list(given) if isinstance(given, Iterable) else []
    numbers = all(isinstance(n, int | float | np.integer | np.floating) and 0 <= n <= 1e30 for n in split)
    if len(split) != len(names) or not numbers or not sum(split) > 0:
        raise BoundsError(f"split has a number from 0 to 1e30 for each of {len(names)} devices, one of them above 0, "
                          f"not {given!r:.60}")  # fmt: skip
    ends = [round(layers * sum(split[: i + 1]) / sum(split)) for i in range(len(split))]
    return tuple(names[next(j for j, end in enumerate(ends) if i < end)] for i in range(layers))


def _by_memory(names: Sequence[str], layers: int, fits: Callable[[tuple[str, ...], str], bool]) -> tuple[str, ...]:
    """Each device in turn takes as many layers as fit, the last one that is needed the rest, with the output."""
    found: tuple[str, ...] = ()
    for name, after in zip(names, [*names[1:], None], strict=True):
        rest = layers - len(found)
        if after is None or fits((*found, *[name] * rest), name):
            return *found, *[name] * rest
        low, high = 0, rest
        while high - low > 1:
            middle = (low + high) // 2
            fit = fits((*found, *[name] * middle, *[after] * (rest - middle)), name)
            low, high = (middle, high) if fit else (low, middle)
        found += (name,) * low
    raise AssertionError("there is a last device")


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
