"""Attention: torch's fused kernels where they express the case, else the scores in tiles of bounded size.

Fused: Dao et al., "FlashAttention", 2022. On the CPU their kernel also gives the logarithm of each sum, by which sinks
are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import inf, prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import bool_
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_torch.kernels.binding import in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import flash_attention_on_cpu, has_fused_attention
from opweave_torch.tunables import CALL_SCORES, limit

CPU_SCORES: Final = limit("attention_scores", 1 << 18, 1, 1 << 22)
"""Elements of a tile of scores on a CPU, where several passes find them in the second-level cache. Where one tile holds
all of an image, products and a softmax take less time than the fused kernel: of 12 heads of 128 tokens of 32 elements
on two cores of an AMD EPYC 320 us and 440."""

SCORES: Final = limit("attention_scores_of_cards", 1 << 22, 1, 1 << 26)
"""The same on other devices: so many that starting a kernel takes less time than running it."""

BIAS: Final = limit("attention_bias", 1 << 21, 1, 1 << 26)
"""Elements of what is added to the scores of a fused kernel at a time."""


class _Options(NamedTuple):
    """The attributes of a node, and its sources after q, k, v."""

    scale: float
    causal: bool
    max_bias: float
    soft_cap: float
    mask: Arg | None
    sinks: Arg | None


def _options(
    rest: Sequence[Arg], *, scale: float, causal: bool, max_bias: float, soft_cap: float, masked: bool, **others: Any
) -> _Options:
    return _Options(scale, causal, max_bias, soft_cap, *optional_operands(rest, masked))


def _arrays(step: Step) -> Arrays:
    """Flat arrays, of which each tile takes the beginning. The bias of a fused kernel shares the memory of the scores
    of the tiles: these are computed anew where the fused kernel fails."""
    q, k, v, *rest = step.srcs
    options = _options(rest, **step.attrs)
    dtype = widened(q.dtype)
    sizes = _Tiling(q, k, v, options, max(SCORES.value, CPU_SCORES.value)).sizes()
    if _is_biased(q, k, options):
        bias = _Bias(q, k, options)
        sizes["scores"] = max(sizes["scores"], bias.size)
        sizes["hidden"] = max(sizes["hidden"], bias.hidden_size)
    return {name: (bool_ if name == "hidden" else dtype, (size,)) for name, size in sizes.items()}


@KERNELS("attention", when=lambda step: of_other_type(step, 1, 2), workspace=_arrays)
def attention(stream: Stream, op: str, out: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any) -> Call:
    options, target = _options(rest, **given), tensor(out)
    arrays = {name: tensor(array) for name, array in given.items() if isinstance(array, Arg)}
    on_cpu = target.device.type == "cpu"
    tiling = _Tiling(q, k, v, options, CPU_SCORES.value if on_cpu else SCORES.value)
    bind_tiles = cache(lambda: tiling.bind(target, arrays))
    if options.soft_cap or q.shape[3] != v.shape[3]:
        return bind_tiles()
    is_large = len(target) == 1 or tiling.scores >= CALL_SCORES.value
    if on_cpu and len(tiling.tiles) == 1 and not q.dtype.is_half and is_large:
        return bind_tiles()
    if on_cpu:
        return _fused_on_cpu(target, q, k, v, options, arrays, bind_tiles) or bind_tiles()
    return _fused_elsewhere(target, q, k, v, options) or bind_tiles()


# --- fused ----------------------------------------------------------------------------------------------------------


def _is_causal(q: Arg, options: _Options) -> bool:
    """Whether some token sees fewer keys than another one."""
    return options.causal and q.shape[2] > 1


def _is_biased(q: Arg, k: Arg, options: _Options) -> bool:
    """Whether something is to be added to the scores that is not the mask alone. Fused kernels know causal attention
    as that in which the first token sees the first key."""
    not_plain = options.mask is not None or q.shape[2] < k.shape[2]
    return bool(options.max_bias) or (_is_causal(q, options) and not_plain)


class _Bias:
    """What is added to the scores, for some tokens at a time: the mask times ALiBi's slopes, -inf where a key is
    hidden. Axes that it does not vary along have length 1.

    Attributes:
        tokens: how many at a time.
        size, hidden_size: elements of the bias, and flags of hidden keys, of so many tokens.
    """

    def __init__(self, q: Arg, k: Arg, options: _Options) -> None:
        mask, keys = options.mask, k.shape[2]
        self.options, self.first_seen = options, keys - q.shape[2]
        self.batch = q.shape[0] if mask is not None and mask.strides[0] else 1
        self.heads = q.shape[1] if options.max_bias or (mask is not None and mask.strides[1]) else 1
        self.tokens = min(q.shape[2], max(1, BIAS.value // (self.batch * self.heads * keys)))
        self.size = self.batch * self.heads * self.tokens * keys
        self.hidden_size = self.tokens * keys if options.causal else 0

    def bind(self, some: slice, end: int, arrays: Mapping[str, Tensor]) -> tuple[Tensor, list[Call]]:
        """The bias of some tokens and the keys before ``end``, and the calls that compute it."""
        options, count = self.options, some.stop - some.start
        bias = beginning(arrays["scores"], self.batch, self.heads, count, end)
        device = bias.device
        calls: list[Call] = [bias.zero_]
        if options.mask is not None:
            mask = tensor(options.mask)[: self.batch, :, some, :end]
            calls = [partial(bias.copy_, mask if self.heads > 1 else mask[:, :1])]
        if options.max_bias:
            slopes = torch.from_numpy(alibi_slopes(self.heads, options.max_bias)).to(device, bias.dtype)
            calls.append(partial(bias.mul_, slopes.view(-1, 1, 1)))
        if options.causal:
            hidden = beginning(arrays["hidden"], count, end)
            last = torch.arange(self.first_seen + some.start, self.first_seen + some.stop, device=device)
            keys = torch.arange(end, device=device)
            calls.append(partial(torch.gt, keys, last.unsqueeze(1), out=hidden))
            calls.append(partial(bias.masked_fill_, hidden, -inf))
        return bias, calls


def _fused_on_cpu(
    out: Tensor, q: Arg, k: Arg, v: Arg, options: _Options, arrays: Mapping[str, Tensor], tiles: Callable[[], Call]
) -> Call | None:
    """The call of the fused kernel, ``None`` where it does not express the case.

    Where all scores of a row are -inf or NaN, the kernel gives 0 for the result and for the logarithm of the sum, which
    can be 0 for other rows too. Where a logarithm is 0, all is computed again in tiles. In half types, on processors
    without AVX-512, it gives 0 for rows with a score of +inf too, whose logarithm is +inf.
    """
    tokens, keys, causal = q.shape[2], k.shape[2], _is_causal(q, options)
    flash = flash_attention_on_cpu()
    if flash is None or (causal and tokens > keys) or (options.sinks is not None and q.dtype.is_half):
        return None  # what sinks are applied to was rounded before
    query, key, value = [tensor(arg) for arg in (q, k, v)]
    sinks = None if options.sinks is None else tensor(options.sinks).unsqueeze(-1)
    parts: list[tuple[Any, ...]] = []
    if _is_biased(q, k, options):
        bias = _Bias(q, k, options)
        for first in range(0, tokens, bias.tokens):
            some = slice(first, min(first + bias.tokens, tokens))
            end = keys - tokens + some.stop if causal else keys
            added, calls = bias.bind(some, end, arrays)
            parts.append((calls, query[:, :, some], key[:, :, :end], value[:, :, :end], added, out[:, :, some]))
    else:
        parts.append(([], query, key, value, None if options.mask is None else tensor(options.mask), out))
    plainly_causal, half = causal and not _is_biased(q, k, options), q.dtype.is_half

    def run() -> None:
        for calls, queries, some_keys, values, mask, target in parts:
            for call in calls:
                call()
            # The kernel reads rows as if they had no gaps, without a check.
            operands = [x if x.stride(-1) == 1 else x.contiguous() for x in (queries, some_keys, values)]
            result, total = flash(*operands, 0.0, plainly_causal, attn_mask=mask, scale=options.scale)
            if not total.all() or (half and not total.isfinite().all()):
                tiles()()
                return
            if sinks is None:
                target.copy_(result)
            else:
                torch.mul(result, torch.sigmoid(total - sinks).unsqueeze(-1), out=target)

    return run


def _fused_elsewhere(out: Tensor, q: Arg, k: Arg, v: Arg, options: _Options) -> Call | None:
    """The call of a fused kernel, ``None`` where torch has none for the operands."""
    if options.sinks is not None or _is_biased(q, k, options) or (_is_causal(q, options) and q.shape[2] > k.shape[2]):
        return None
    operands = tensor(q), tensor(k), tensor(v)
    mask = None if options.mask is None else tensor(options.mask)
    given = {"is_causal": _is_causal(q, options), "scale": options.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if not has_fused_attention(*operands, mask, **given):
        return None
    function = torch.nn.functional.scaled_dot_product_attention
    if mask is None:
        return lambda: out.copy_(function(*operands, None, 0.0, **given))
    once = mask[tuple([slice(None) if step else slice(1) for step in mask.stride()])]

    def run() -> None:
        # Where the mask hides all keys the result is NaN, as -inf - -inf is; the kernels give 0.
        top = once.amax(-1, keepdim=True)
        torch.add(function(*operands, mask, 0.0, **given), top - top, out=out)

    return run


# --- in tiles -------------------------------------------------------------------------------------------------------


def beginning(array: Tensor, *shape: int) -> Tensor:
    """The first elements of a flat array in another shape."""
    return array[: prod(shape)].view(shape)


def boxes(lengths: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most ``limit`` elements, or one, that cover axes of these lengths: last axes whole as long as they
    fit."""
    inner = prod(lengths[1:])
    step = max(1, limit // inner)
    for first in range(0, lengths[0], step):
        some = slice(first, min(first + step, lengths[0]))
        if inner <= limit:
            yield (some, *[slice(0, n) for n in lengths[1:]])
        else:
            for rest in boxes(lengths[1:], limit):
                yield (some, *rest)


class _Tiling:
    """How attention is tiled: axes are (groups, heads of a group, tokens); each tile sees all of the keys, so that its
    softmax is whole.

    Args:
        limit: most elements of a tile of scores, if there are fewer keys than that.

    Attributes:
        scores: how many an image has, those of sinks included.
        tiles: of one image.
    """

    def __init__(self, q: Arg, k: Arg, v: Arg, options: _Options, limit: int) -> None:
        self.q, self.k, self.v, self.options = q, k, v, options
        self.axes = (k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        self.columns = k.shape[2] + (options.sinks is not None)
        self.scores = prod(self.axes) * self.columns
        self.tiles: list[Any] = list(boxes(self.axes, max(1, limit // self.columns)))

    def sizes(self) -> dict[str, int]:
        """Elements of the arrays that the largest tile needs."""
        keys, half, options = self.k.shape[2], self.q.dtype.is_half, self.options
        rows = max([prod([some.stop - some.start for some in tile]) for tile in self.tiles])
        groups, _, tokens = [max([some.stop - some.start for some in axis]) for axis in zip(*self.tiles, strict=True)]
        return {
            "queries": rows * self.q.shape[3] if half or self.axes[1] > 1 else 0,
            "scores": rows * self.columns,
            "results": rows * self.v.shape[3],
            "bias": rows * keys if options.mask is not None and (half or options.max_bias) else 0,
            "keys": groups * keys * self.k.shape[3] if half else 0,
            "values": groups * keys * self.v.shape[3] if half else 0,
            "hidden": tokens * keys if options.causal else 0,
        }

    def bind(self, out: Tensor, arrays: Mapping[str, Tensor]) -> Call:
        """The call that computes all tiles, one after the other, in the arrays of `sizes`."""
        options, axes = self.options, self.axes
        q, k, v = [tensor(arg) for arg in (self.q, self.k, self.v)]
        tokens, keys = q.shape[2], k.shape[2]
        queries, results = [x.unflatten(1, axes[:2]) for x in (q, out)]
        mask = None if options.mask is None else tensor(options.mask).unflatten(1, axes[:2])
        sinks = None if options.sinks is None else tensor(options.sinks).view(*axes[:2], 1)
        slopes = None
        if options.max_bias:
            steps = torch.from_numpy(alibi_slopes(q.shape[1], options.max_bias))
            slopes = steps.to(out.device, arrays["scores"].dtype).view(*axes[:2], 1, 1)
        factor = options.scale / options.soft_cap if options.soft_cap else options.scale
        key_numbers = torch.arange(keys, device=out.device)
        last_seen = torch.arange(keys - tokens, keys, device=out.device).unsqueeze(-1)

        calls: list[Call] = []
        do = calls.append
        copied: Any = None
        for n, (gs, hs, ts) in product(range(len(q)), self.tiles):
            shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start)
            matrix = (shape[0], shape[1] * shape[2])
            end = max(1, min(keys, keys - tokens + ts.stop)) if options.causal else keys
            right, values = k[n, gs], v[n, gs]
            if "keys" in arrays:
                right, values = beginning(arrays["keys"], *right.shape), beginning(arrays["values"], *values.shape)
                if copied != (n, gs):
                    copied = (n, gs)
                    do(partial(right.copy_, k[n, gs]))
                    do(partial(values.copy_, v[n, gs]))
            some = queries[n, gs, hs, ts]
            if "keys" in arrays or shape[1] > 1:  # else a matrix for each group, as it lies
                wide = beginning(arrays["queries"], *shape, q.shape[3])
                do(partial(wide.copy_, some))
                some = wide
            some = some.flatten(1, 2)
            whole = beginning(arrays["scores"], *matrix, end + (sinks is not None))
            scores = whole[..., :end]
            grid = whole.view(*shape, -1)[..., :end]
            do(partial(scores.baddbmm_, some, right[:, :end].transpose(1, 2), beta=0, alpha=factor))
            if options.soft_cap:
                do(scores.tanh_)
                do(partial(scores.mul_, options.soft_cap))
            if mask is not None:
                bias = mask[n, gs, hs, ts, :end]
                if "bias" in arrays:
                    wide = beginning(arrays["bias"], *bias.shape)
                    do(partial(wide.copy_, bias))
                    bias = wide
                if slopes is not None:
                    do(partial(bias.mul_, slopes[gs, hs]))
                do(partial(grid.add_, bias))
            if options.causal and end > keys - tokens + ts.start + 1:
                hidden = beginning(arrays["hidden"], shape[2], end)
                do(partial(torch.gt, key_numbers[:end], last_seen[ts], out=hidden))
                do(partial(grid.masked_fill_, hidden, -inf))
            if sinks is not None:
                do(partial(whole.view(*shape, -1)[..., end].copy_, sinks[gs, hs]))
            do(partial(torch.softmax, whole, -1, out=whole))
            mixed = beginning(arrays["results"], *matrix, v.shape[3])
            do(partial(torch.bmm, scores, values[:, :end], out=mixed))
            do(partial(results[n, gs, hs, ts].copy_, mixed.view(*shape, -1)))
        return in_order(calls)
