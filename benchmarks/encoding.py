"""Quantizing of arrays with and without importances: MiB of f32 values a second, on one thread, and root mean square
errors relative to the values, beside ``ggml_quantize_chunk``, where llama-cpp-python is installed (see `_ggml`).

There are targets for errors only: at most 1.03 times ggml's.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import opweave as ow
from benchmarks import _ggml
from benchmarks._measure import Report, interleaved, options
from opweave.ops.encoding import ENCODED, WEIGHED

Array = np.ndarray[Any, Any]


def quantized(values: Array, name: str, importance: Array | None) -> Array:
    return ow.quantize(values, name, importance=importance).data


def main() -> None:
    report = Report("encoding", options(__doc__ or ""))
    rows = 64 if report.options.quick else 256
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, 1024), np.float32)
    importance = rng.random(1024, np.float32) ** 4 + np.float32(1e-3)
    for name in ENCODED:
        kind = ow.as_dtype(name)
        for weights in (None, importance) if name in WEIGHED else (None,):
            calls = {"opweave": partial(quantized, values, name, weights)}
            if find_spec("llama_cpp") is not None:
                # It encodes to these only with importances.
                given = np.ones(1024, np.float32) if weights is None and name in ("iq2_xs", "iq2_xxs") else weights
                number = GGMLQuantizationType[name.upper()].value
                calls["ggml"] = partial(_ggml.quantized, number, values, given, rows * kind.row_bytes(1024))
            figures: dict[str, float] = {}
            for who, times in interleaved(calls, 3).items():
                figures[f"{who}_MiB_s"] = values.nbytes / 2**20 / min(times)
                blocks = ow.Blocks(calls[who](), values.shape, name)
                factors = 1 if weights is None else weights
                wrong = (ow.dequantize(blocks).astype(np.float64) - values) ** 2 * factors
                figures[f"{who}_error"] = float(np.sqrt(wrong.sum() / (values.astype(np.float64) ** 2 * factors).sum()))
            report.row(type=name, importance="yes" if weights is not None else "", **figures)
            if "ggml" in calls:
                title = name + (" with importances" if weights is not None else "")
                report.target(title, figures["opweave_error"] / figures["ggml_error"], 1.03, "times ggml's error")
    report.finish("quantizing")


if __name__ == "__main__":
    main()
