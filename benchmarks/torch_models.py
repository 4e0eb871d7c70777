"""Modules of torch through the front end: beside eager torch, and beside torch.compile with its own compiler, inductor,
which needs a C++ compiler. All on the same processor and number of threads, in f32, without gradients.

``opweave`` is a module imported from its exported program on torch:cpu; ``compile`` is torch.compile with the backend
opweave. Figures are the shortest of interleaved runs."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options
from opweave_torch import import_program
from tests.support.torch_nets import Bert, Gpt2, Llama, MobileNet, ResNet, UNet, Vit, ids, picture, randomized

MASK = torch.ones(1, 64, dtype=torch.long)
LARGE: dict[str, Any] = {
    "resnet": (lambda: ResNet(32, 2), lambda: (picture(1, 3, 128),)),
    "mobilenet": (lambda: MobileNet(32), lambda: (picture(1, 3, 128),)),
    "unet": (lambda: UNet(16), lambda: (picture(1, 1, 64),)),
    "vit": (lambda: Vit(64, 8, 192, 4), lambda: (picture(1, 3, 64),)),
    "gpt2": (lambda: Gpt2(1000, 128, 256, 4), lambda: (ids(1, 64),)),
    "llama": (lambda: Llama(1000, 256, 4, 8, 4), lambda: (ids(1, 64),)),
    "bert": (lambda: Bert(1000, 128, 256, 4), lambda: (ids(1, 64), MASK)),
}
"""Name -> what makes a network, and what makes its arguments."""


def compiled(module: Any, backend: str, **more: Any) -> Any:
    """The compiled module; raises what the compiler raises, when it is first called."""
    return torch.compile(module, backend=backend, **more)


def main() -> None:
    report = Report("torch_models", options(__doc__ or ""))
    quick = report.options.quick
    warnings.simplefilter("ignore")  # of torch's export and compilers
    for name in ("gpt2", "mobilenet") if quick else LARGE:
        torch.manual_seed(0)
        make, arguments = LARGE[name]
        module, args = randomized(make()), arguments()
        torch._dynamo.reset()
        with torch.no_grad(), import_program(torch.export.export(module, args), ["torch:cpu"]) as model:
            calls: dict[str, Any] = {"eager": module, "opweave": model}
            calls["compile"] = compiled(module, "opweave", options={"devices": ["torch:cpu"]})
            want = module(*args)
            inductor = compiled(module, "inductor")
            try:
                inductor(*args)
                calls["inductor"] = inductor
            except Exception as error:  # without a compiler for C++
                print(f"no inductor: {error!s:.100}")
            for who, call in calls.items():
                for got, expected in zip(_tensors(call(*args)), _tensors(want), strict=True):
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=lambda m, w=who: f"{w}: {m}")
            bound = {who: partial(call, *args) for who, call in calls.items()}
            best = {who: min(t) for who, t in interleaved(bound, 5 if quick else 15, 0.03).items()}
        ratios = {f"to_{who}": best["opweave"] / best[who] for who in ("eager", "compile", "inductor") if who in best}
        report.row(network=name, opweave_ms=best["opweave"] * 1e3, **ratios)
        report.target(f"{name}: a run", ratios["to_eager"], 1.0, "times eager torch")
    report.finish("modules of torch, fastest of interleaved samples; ratios below 1: opweave is faster")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in (value.values() if isinstance(value, dict) else value) for t in _tensors(v)]


if __name__ == "__main__":
    main()
