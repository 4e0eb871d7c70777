"""Cases for the operators of ATen: name -> a function of named tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as nnf

__all__ = ["ELEMENTWISE", "LAYERS", "OVERLOADS", "SHAPES", "Case"]

A: Any = torch.ops.aten
Case = Callable[[dict[str, torch.Tensor]], Any]


FUNCTIONS = """
    relu sigmoid tanh exp log1p expm1 sin cos rsqrt reciprocal neg abs floor ceil trunc round sign square sqrt log
"""
ACTIVATIONS = "silu hardswish hardsigmoid gelu leaky_relu elu softplus relu6 hardtanh mish logsigmoid celu selu"


def _of(function: Callable[[torch.Tensor], torch.Tensor], operand: str) -> Case:
    return lambda t: function(t[operand])


ELEMENTWISE: dict[str, Case] = {
    **{name: _of(getattr(torch, name), "p") for name in FUNCTIONS.split()},
    **{name: _of(getattr(nnf, name), "x") for name in ACTIVATIONS.split()},
    "gelu tanh": lambda t: nnf.gelu(t["x"], approximate="tanh"),
    "softplus beta": lambda t: nnf.softplus(t["x"], 2.0),
    "add": lambda t: (t["x"] + t["y"], t["x"] + 2, torch.add(t["x"], t["y"], alpha=3), t["i"] + t["j"], t["i"] + 1.5),
    "sub": lambda t: (t["x"] - t["y"], 2 - t["x"], torch.sub(t["x"], t["y"], alpha=0.5), t["i"] - t["x"]),
    "mul": lambda t: (t["x"] * t["y"], t["x"] * 0.1, t["i"] * t["j"], t["b"] * t["x"], t["b"] * t["i"], t["i"] * 3),
    "div": lambda t: (t["x"] / t["p"], t["i"] / 3, 1 / t["p"], t["i"] / t["j"]),
    "div modes": lambda t: (
        torch.div(t["x"], 0.3, rounding_mode="floor"),
        torch.div(t["x"], 0.3, rounding_mode="trunc"),
        t["i"] // 3,
        torch.div(t["i"], t["j"], rounding_mode="trunc"),
        t["i"] % 3,
    ),
    "pow": lambda t: (t["x"] ** 2, t["p"] ** 0.5, t["p"] ** t["y"], 2 ** t["x"], t["i"] ** 2, t["x"] ** 3),
    "extremes": lambda t: (torch.maximum(t["x"], t["y"]), torch.minimum(t["i"], t["j"])),
    "clamp": lambda t: (
        t["x"].clamp(-0.5, 0.5),
        t["x"].clamp(min=0.1),
        t["i"].clamp(max=2),
        t["x"].clamp(t["y"], t["p"]),
        A.clamp_min(t["x"], 0.1),
        A.clamp_max(t["x"], 0.1),
    ),
    "comparisons": lambda t: (
        t["x"] < t["y"],
        t["x"] <= 0,
        t["x"] > t["i"],
        t["i"] >= 1,
        t["i"] == t["j"],
        t["x"] != 0,
        t["i"] < 0.5,
    ),
    "logic": lambda t: (
        t["b"] & t["c"],
        t["b"] | t["c"],
        t["b"] ^ t["c"],
        ~t["b"],
        torch.logical_not(t["x"]),
        torch.logical_and(t["x"], t["i"]),
        torch.logical_or(t["i"], t["b"]),
        torch.logical_xor(t["i"], t["b"]),
    ),
    "bits": lambda t: (t["i"] & 3, t["i"] | t["j"], t["i"] ^ 1, ~t["i"]),
    "nan": lambda t: (torch.isnan(t["x"] / 0), torch.isinf(t["x"] / 0), torch.isnan(t["i"]), torch.isinf(t["i"])),
    "where": lambda t: (
        torch.where(t["b"], t["x"], t["y"]),
        torch.where(t["b"], t["x"], 0.0),
        torch.where(t["b"], 1.0, t["x"]),
        torch.where(t["b"], t["i"], t["x"]),
        t["x"].masked_fill(t["b"], -1e9),
        A.where.Scalar(t["b"], 1.0, 2.0),
    ),
    "to": lambda t: (t["x"].to(torch.int32), t["i"].to(torch.float64), t["x"].half(), t["x"].bool(), t["b"].long()),
    "copies": lambda t: (t["x"].clone(), A.copy(t["x"], t["i"]), t["x"].contiguous(), t["x"].detach()),
    "full like": lambda t: (
        torch.zeros_like(t["x"]),
        torch.ones_like(t["i"]),
        torch.full_like(t["x"], 3),
        t["x"].new_full((2,), 4),
        t["x"].new_zeros(3),
        t["i"].new_ones((1, 2)),
        torch.zeros_like(t["x"], dtype=torch.int32),
    ),
    "creation": lambda t: (
        torch.arange(5),
        torch.zeros(2, 3),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        torch.ones(2) * 2,
    ),
}

SHAPES: dict[str, Case] = {
    "view": lambda t: (t["x"].view(12, 2), t["x"].reshape(-1), t["x"].flatten(1), t["x"].transpose(0, 2).reshape(4, 6)),
    "permute": lambda t: (t["x"].permute(2, 0, 1), t["x"].transpose(1, 2), t["m"].t(), t["x"].movedim(0, -1)),
    "squeeze": lambda t: (
        t["x"].unsqueeze(1),
        t["x"][:, :1].squeeze(1),
        t["x"][:1, :1].squeeze(),
        t["x"][:1, :1].squeeze((0, 1)),
    ),
    "expand": lambda t: (
        t["x"][:1].expand(5, -1, -1),
        t["x"].expand(2, 2, 3, 4),
        t["m"].expand_as(t["x"][:, :1] + t["m"]),
    ),
    "slices": lambda t: (
        t["x"][:, 1:],
        t["x"][..., ::2],
        t["x"][0],
        t["x"][:, -1],
        t["x"][1:1],
        t["x"].narrow(2, 1, 2),
    ),
    "parts": lambda t: (
        t["x"].split(2, 2),
        t["x"].split([1, 2], 1),
        t["x"].chunk(3, 2),
        t["x"].unbind(1),
        t["x"].split(3, 2),
    ),
    "joins": lambda t: (
        torch.cat([t["x"], t["y"]], 1),
        torch.stack([t["x"], t["y"]], -1),
        torch.cat([t["i"], t["x"]]),
        torch.cat([torch.zeros(0), t["m"]]),
    ),
    "flip": lambda t: (t["x"].flip(0, 2), t["x"].roll(1, 2), t["x"].roll((1, 2), (0, 1)), t["x"].roll(5)),
    "repeats": lambda t: (
        t["x"].repeat(2, 1, 3),
        t["m"].repeat(2, 1, 1),
        t["x"].repeat_interleave(2, 1),
        t["m"].tile(2),
    ),
    "pads": lambda t: (
        nnf.pad(t["x"], (1, 2)),
        nnf.pad(t["x"], (1, 0, 2, 1), value=3.0),
        nnf.pad(t["x"], (-1, 1)),
        nnf.pad(t["image"], (1, 2, 0, 1), "reflect"),
        nnf.pad(t["image"], (1, 2, 0, 1), "replicate"),
    ),
    "triangles": lambda t: (
        t["m"].tril(),
        t["m"].triu(1),
        t["m"].tril(-1),
        t["m"].diagonal(),
        t["x"].diagonal(1, 0, 2),
    ),
    "shuffle": lambda t: nnf.pixel_shuffle(t["image"], 2),
    "sum": lambda t: (
        t["x"].sum(),
        t["x"].sum(1),
        t["x"].sum((0, 2), True),
        t["i"].sum(),
        t["b"].sum(0),
        t["i"].sum(0, dtype=torch.float32),
    ),
    "mean": lambda t: (t["x"].mean(), t["x"].mean((1, 2)), t["i"].mean(0, dtype=torch.float32)),
    "prod": lambda t: (t["x"].prod(), t["x"].prod(1), t["i"].prod(0)),
    "most": lambda t: (
        t["x"].amax(1),
        t["x"].amin((0, 1), True),
        t["x"].max(),
        t["x"].min(),
        t["x"].max(1),
        t["x"].min(2),
        t["i"].max(0),
        t["i"].min(0),
    ),
    "argmax": lambda t: (t["x"].argmax(), t["x"].argmax(1), t["x"].argmin(2, True), t["i"].argmin(1)),
    "any": lambda t: (t["b"].any(), t["b"].all(1), t["x"].any(2), t["b"].any(0), t["x"].all()),
    "var": lambda t: (t["x"].var(), t["x"].var(1), t["x"].std((0, 1), correction=0), torch.var_mean(t["x"], 2)),
    "norms": lambda t: (
        t["x"].norm(),
        torch.linalg.vector_norm(t["x"], 1, 1),
        torch.linalg.vector_norm(t["x"], float("inf")),
        torch.linalg.vector_norm(t["x"], 3, 2),
        nnf.normalize(t["x"], dim=1),
    ),
    "logsumexp": lambda t: (t["x"].logsumexp(1), t["x"].logsumexp((0, 2), True), (t["x"] - torch.inf).logsumexp(1)),
    "cumsum": lambda t: (t["x"].cumsum(1), t["i"].cumsum(-1), t["b"].cumsum(0)),
    "sorting": lambda t: (
        t["x"].topk(2, 2),
        t["x"].topk(2, 1, largest=False),
        t["x"].sort(2),
        t["x"].sort(1, True),
        t["x"].argsort(2),
        torch.sort(t["i"], stable=True, dim=0, descending=False),
    ),
}

LAYERS: dict[str, Case] = {
    "products": lambda t: (
        t["m"] @ t["m"].t(),
        t["x"] @ t["w"],
        torch.bmm(t["x"], t["x"].mT),
        t["m"] @ t["v"],
        t["v"] @ t["v"],
        torch.addmm(t["v"][:3], t["m"], t["m"].t()),
        torch.addmm(t["v"][:3], t["m"], t["m"].t(), beta=0.5, alpha=2),
        torch.baddbmm(t["x"][:, :, :3], t["x"], t["x"].mT),
        torch.outer(t["v"], t["v"]),
        t["k"] @ t["k"].t(),
        torch.einsum("bij,bkj->bik", t["x"], t["y"]),
        torch.addmm(t["v"][:3], t["m"], t["m"].t(), beta=0),
    ),
    "linear": lambda t: (
        nnf.linear(t["x"], t["m"]),
        nnf.linear(t["x"], t["m"], t["v"][:3]),
        nnf.linear(t["v"], t["m"]),
    ),
    "conv": lambda t: (
        nnf.conv2d(t["image"], t["kernel"]),
        nnf.conv2d(t["image"], t["kernel"], t["v"], 2, 1),
        nnf.conv2d(t["image"], t["kernel"][:, :2], None, 1, 2, 2, 2),
        nnf.conv2d(t["image"][0], t["kernel"], None, 1, "same"),
        nnf.conv2d(t["image"], t["kernel"][..., :2], padding="same"),
        nnf.conv2d(t["image"], t["kernel"], padding="valid"),
        nnf.conv1d(t["image"][:, :, 0], t["kernel"][..., 0], padding=1),
        nnf.conv3d(t["image"][:, :, None], t["kernel"][:, :, None], padding=(0, 1, 1)),
    ),
    "transposed": lambda t: (
        nnf.conv_transpose2d(t["image"], t["kernel"], None, 2, 1, 1),
        nnf.conv_transpose2d(t["image"], t["kernel"], t["v"]),
        nnf.conv_transpose1d(t["image"][:, :, 0], t["kernel"][..., 0], None, 3),
        nnf.conv_transpose3d(t["image"][:, :, None], t["kernel"][:, :, None]),
    ),
    "pools": lambda t: (
        nnf.max_pool2d(t["image"], 2),
        nnf.max_pool2d(t["image"], 3, 2, 1, ceil_mode=True),
        nnf.max_pool1d(t["x"], 2),
        nnf.max_pool2d(t["image"], 2, return_indices=True),
        nnf.avg_pool2d(t["image"], 3, 2, 1),
        nnf.avg_pool2d(t["image"], 3, 2, 1, count_include_pad=False),
        nnf.avg_pool2d(t["image"], 2, divisor_override=3),
        nnf.avg_pool1d(t["x"], 2),
        nnf.avg_pool2d(t["image"][0], (1, 2)),
    ),
    "adaptive pools": lambda t: (
        nnf.adaptive_avg_pool2d(t["image"], 1),
        nnf.adaptive_avg_pool2d(t["image"], (3, 2)),
        nnf.adaptive_avg_pool2d(t["image"], 4),
        nnf.adaptive_avg_pool1d(t["x"], 2),
        nnf.adaptive_max_pool2d(t["image"], 2),
    ),
    "resampling": lambda t: (
        nnf.interpolate(t["image"], scale_factor=2),
        nnf.interpolate(t["image"], (5, 9), mode="bilinear"),
        nnf.interpolate(t["image"], (5, 9), mode="bilinear", align_corners=True),
        nnf.interpolate(t["x"], 7, mode="linear"),
        nnf.interpolate(t["image"], scale_factor=1.7, mode="bicubic"),
        nnf.interpolate(t["image"], (4, 3)),
        nnf.interpolate(t["image"], (3, 4), mode="bilinear", antialias=True),
        nnf.interpolate(t["x"], scale_factor=1.5),
        nnf.interpolate(t["image"][:, :, None], (2, 5, 5), mode="trilinear"),
    ),
    "normalization": lambda t: (
        nnf.layer_norm(t["x"], (4,), t["v"], t["v"]),
        nnf.layer_norm(t["x"], (3, 4)),
        nnf.rms_norm(t["x"], (4,), t["v"]),
        nnf.group_norm(t["image"], 2, t["v"], t["v"], 1e-3),
        nnf.group_norm(t["image"], 4),
        nnf.batch_norm(t["image"], t["v"], t["v"] ** 2, t["v"], t["v"]),
        nnf.batch_norm(t["x"].mT, t["v"], t["v"] ** 2),
        nnf.instance_norm(t["image"]),
        nnf.rms_norm(t["x"], (3, 4), eps=1e-5),
    ),
    "softmax": lambda t: (
        t["x"].softmax(1),
        nnf.log_softmax(t["x"], -1),
        t["i"].softmax(0, dtype=torch.float32),
        nnf.softmin(t["x"], 0),
        A._safe_softmax((t["x"] - torch.inf), -1),
        nnf.dropout(t["x"], 0.5, training=False),
    ),
    "attention": lambda t: (
        nnf.scaled_dot_product_attention(t["q"], t["q"], t["q"]),
        nnf.scaled_dot_product_attention(t["q"], t["q"][..., :3, :], t["q"][..., :3, :], is_causal=True),
        nnf.scaled_dot_product_attention(t["q"], t["q"], t["q"], attn_mask=t["mask"]),
        nnf.scaled_dot_product_attention(
            t["q"], t["q"], t["q"], attn_mask=torch.where(t["mask"], 0.0, -torch.inf), scale=0.5
        ),
        nnf.scaled_dot_product_attention(t["x"], t["y"], t["x"]),
        nnf.scaled_dot_product_attention(t["q"], t["q"][:, :1], t["q"][:, :1], enable_gqa=True),
        nnf.scaled_dot_product_attention(t["q"][None], t["q"][None], t["q"][None], attn_mask=t["mask"]),
    ),
    "indexing": lambda t: (
        nnf.embedding(t["k"], t["m"]),
        t["x"][:, t["k"]],
        t["x"][t["k"] % 2, t["k"]],
        t["x"][..., t["k"] - 2],
        t["x"].index_select(2, t["k"]),
        t["x"].gather(2, t["i"][:, :2] % 4),
        t["x"][t["b"][:, 0, 0].long(), :, t["k"][:2]],
        t["m"][torch.tensor([2, -1])],
        t["x"].take_along_dim(t["i"] % 3, 1),
    ),
    "scattering": lambda t: (
        A.slice_scatter(t["x"], t["y"][:, 1:], 1, 1),
        A.select_scatter(t["x"], t["m"], 0, 1),
        A.slice_scatter(t["x"], t["y"][..., ::2], 2, 0, 4, 2),
        torch.scatter(t["x"], 2, t["i"] % 4, t["y"]),
        t["x"].scatter_add(1, t["i"] % 3, t["y"]),
        t["m"].index_add(0, t["k"] % 3, t["w"].t()[:1].expand(3, -1)),
        t["x"].index_put((t["k"] % 2,), t["y"][:1]),
        t["x"].index_fill(1, t["k"], 3.0),
    ),
    "others": lambda t: (
        torch.erf(t["x"]),
        t["x"].tan(),
        nnf.unfold(t["image"], 2),
        nnf.grid_sample(t["image"], t["image"][:, :, :, :2] / 3, align_corners=False),
        nnf.cross_entropy(t["m"], t["k"] % 4),
        nnf.one_hot(t["k"], 4),
        torch.cdist(t["x"], t["y"]),
    ),
}

OVERLOADS: dict[str, Case] = {
    "numbers": lambda t: (
        A.add.Scalar(t["x"], 2),
        A.sub.Scalar(t["i"], 2),
        A.mul.Scalar(t["x"], 3),
        A.div.Scalar(t["i"], 2),
        A.div.Scalar_mode(t["x"], 0.3, rounding_mode="trunc"),
        A.eq.Scalar(t["i"], 1),
        A.bitwise_or.Scalar(t["i"], 1),
        A.rsub.Tensor(t["x"], t["y"], alpha=2),
        A.rsub.Scalar(t["x"], 2),
    ),
    "tensors": lambda t: (
        A.ne.Tensor(t["i"], t["j"]),
        A.ge.Tensor(t["x"], t["i"]),
        A.le.Tensor(t["x"], t["y"]),
        A.masked_fill.Tensor(t["x"], t["b"], t["v"].sum()),
        A.clamp_min.Tensor(t["x"], t["y"]),
        A.clamp_max.Tensor(t["x"], t["y"]),
        A.alias(t["x"]),
        t["x"].new_empty((2, 0)),  # without elements: what an empty tensor holds is not defined, it may be a NaN
        torch.empty_like(t["x"][:0]),
    ),
    "along axes": lambda t: (
        A.any.dims(t["b"], [0, 2]),
        A.all.dims(t["b"], [1]),
        A.argsort.stable(t["x"], stable=True, dim=1),
        A._softmax(t["x"], 1, False),
        A._log_softmax(t["x"], 2, False),
        A._unsafe_view(t["x"], [4, 6]),
        A.reflection_pad1d(t["x"], [1, 2]),
        A.reflection_pad3d(t["image"], [1, 1, 0, 1, 1, 0]),
    ),
    "products": lambda t: (
        A.mm(t["m"], t["w"]),
        A.mv(t["m"], t["v"]),
        A.dot(t["v"], t["v"]),
        A.addmv(t["v"][:3], t["m"], t["v"]),
    ),
    "layers": lambda t: (
        A.conv1d.padding(t["x"].mT, t["kernel"][..., 0], None, [1], "same"),
        A._adaptive_avg_pool2d(t["image"], [3, 4]),
        A.conv3d.padding(t["image"][:, :, None], t["kernel"][:, :, None], None, [1, 1, 1], "valid"),
        A._fused_rms_norm(t["x"], [4], t["v"], 1e-5),
        A.native_layer_norm(t["x"], [4], t["v"], t["v"], 1e-5),
        A.native_group_norm(t["image"], t["v"], t["v"], 2, 4, 48, 2, 1e-5),
        A._native_batch_norm_legit_functional(t["image"], t["v"], t["v"], t["v"], t["v"] ** 2, True, 0.1, 1e-5),
    ),
    "resampling": lambda t: (
        A.upsample_nearest1d(t["x"], [7]),
        A.upsample_nearest2d(t["image"], [5, 9]),
        A.upsample_linear1d(t["x"], [7], True),
        A.upsample_nearest3d(t["image"][:, :, None], [2, 3, 4]),
        A.upsample_trilinear3d(t["image"][:, :, None], [2, 3, 4], False),
        A._upsample_bilinear2d_aa(t["image"], [3, 4], False),
        A._upsample_bicubic2d_aa(t["image"], [3, 4], False),
        nnf.interpolate(t["image"][:, :, None], scale_factor=2),
        A._upsample_bicubic2d_aa.vec(t["image"], [3, 4], False, None),
    ),
}
"""Overloads that torch.nn.functional and operators of Python do not lead to."""
