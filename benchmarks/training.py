"""Training steps on our CPU devices beside eager torch: their time and their memory.

The perceptron and the convolutional network of ``examples/digits.py`` (32 images) and the transformer of
``examples/text.py`` (32 pieces of 64 letters, about 1 M parameters), f32, AdamW, equal threads. The contestants take
turns in one process; the figure of each is its fastest sample. The perceptron is also written by hand in NumPy.

Memory: what the program plans for temporaries, with parameters and moments, beside the peak of all live tensors of a
step of torch in a fresh process. `memory_limit` asks for 0.8 of that peak; where even computing values again does not
reach it, there is no limit. Targets: at most 1.0 times torch's time on the best of our devices and NumPy's on
``cpu``, and 0.8 times torch's memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it

import opweave as ow
import opweave_training as training
from opweave.runtime.host.cores import usable_cores

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options
from examples import text

Array = np.ndarray[Any, Any]
DEVICES: Final = tuple(os.environ.get("OPWEAVE_BENCHMARK_DEVICES", "cpu torch:cpu ort:cpu opencl:0").split())
RATE: Final = 1e-3


class Task(NamedTuple):
    """A model in opweave and in torch, its first parameters, and a batch."""

    arrays: dict[str, Array]
    ours: Callable[..., ow.Tensor]  # of the inputs, and params
    torchs: Callable[..., torch.Tensor]
    batch: dict[str, Array]


# --- the models -----------------------------------------------------------------------------------------------------


def torch_perceptron(images: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x = images
    for i in range(3):
        x = F.linear(x, w[f"layer{i}.weight"], w[f"layer{i}.bias"])
        x = F.relu(x) if i < 2 else x
    return x


def torch_convolutional(images: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x = images.reshape(-1, 1, 8, 8)
    for i in range(2):
        x = F.relu(F.conv2d(x, w[f"layer{i}.weight"], w[f"layer{i}.bias"], padding=1))
    return F.linear(F.max_pool2d(x, 2).flatten(1), w["layer2.weight"], w["layer2.bias"])


def torch_transformer(
    ids: torch.Tensor, w: Mapping[str, torch.Tensor], size: text.Size = text.SIZE
) -> torch.Tensor:  # fmt: skip
    """That of ``examples/text.py``."""
    batch, tokens = ids.shape
    half = size.width // size.heads // 2
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    angles = angles.to(ids.device)
    cos, sin = angles.cos(), angles.sin()

    def turned(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., ::2], y[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    x = F.embedding(ids, w["letters"])
    for i in range(size.layers):
        h = F.linear(F.rms_norm(x, (size.width,), w[f"{i}.norm1"], 1e-6), w[f"{i}.qkv"])
        q, k, v = h.view(batch, tokens, 3, size.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), w[f"{i}.out"])
        h = F.gelu(F.linear(F.rms_norm(x, (size.width,), w[f"{i}.norm2"], 1e-6), w[f"{i}.up"]), approximate="tanh")
        x = x + F.linear(h, w[f"{i}.down"])
    return F.linear(F.rms_norm(x, (size.width,), w["norm"], 1e-6), w["head"])


def transformer_task(size: text.Size = text.SIZE) -> Task:
    """That of ``examples/text.py``, over 32 pieces of the documentation."""
    words = text.read_text()
    found = text.examples(words.train, size.context, 512)
    return Task(
        text.parameters(len(words.letters), size), lambda ids, w: text.transformer(ids, w, size),
        lambda ids, w: torch_transformer(ids, w, size), {name: np.array(a[:32]) for name, a in found.items()},
    )  # fmt: skip


def tasks() -> dict[str, Task]:
    from examples import digits  # which needs scikit-learn

    rng = np.random.default_rng(0)
    images = {"images": rng.random((32, 64), np.float32), "labels": rng.integers(0, 10, 32).astype(np.int32)}

    def first(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        return {name: ow.read(tensor) for name, tensor in digits.parameters(shapes).items()}

    return {
        "perceptron": Task(first(digits.PERCEPTRON), lambda images, w: digits.logits(images, w, 3), torch_perceptron,
                           images),
        "conv net": Task(first(digits.CONVOLUTIONAL), lambda images, w: digits.convolutional(images, w),
                         torch_convolutional, images),
        "transformer": transformer_task(),
    }  # fmt: skip


# --- the contestants ------------------------------------------------------------------------------------------------


def _step(trainer: training.Trainer, batch: dict[str, Array]) -> None:
    trainer._train([batch], 32, last=True, start=0.0)()


def ours(task: Task, device: str, limit: int, rate: float = RATE) -> tuple[training.Trainer, Callable[[], Any]]:
    """A trainer, and a step of it, in at most ``limit`` bytes if that is possible."""
    states = 3 * sum(a.nbytes for a in task.arrays.values())
    for temporaries in (max(limit - states, 0), None):
        params = text.states(task.arrays)
        made = training.Trainer(
            lambda w=params, **inputs: task.ours(**inputs, w=w), training.AdamW(params), rate, batch=32,
            devices=ow.Scheduler([device, "host"], memory_limit=temporaries),
        )  # fmt: skip
        try:
            made._train([task.batch], 32, last=True, start=0.0)()
        except ow.AllocationError:
            made.scheduler.close()
            continue
        for name, param in params.items():
            ow.write(param, task.arrays[name])
        for state in made._optimizer.states.values():
            ow.write(state, np.zeros(state.shape))
        return made, partial(_step, made, task.batch)
    raise AssertionError("without a limit there is room")


def torchs(
    task: Task, target: torch.device | str = "cpu", *, compiled: bool = False,
    captured: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
) -> Callable[[], Any]:  # fmt: skip
    """A step of torch on a device.

    Args:
        compiled: values, loss and gradients by ``torch.compile``.
        captured: records the work of a function on the device, and returns what repeats it: the whole step then is a
            CUDA graph made by hand.
    """
    target = torch.device(target)
    params = {name: torch.tensor(array, requires_grad=True, device=target) for name, array in task.arrays.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=RATE, capturable=captured is not None and target.type != "cpu")
    given = [torch.from_numpy(task.batch[name]) for name in ("labels", *(n for n in task.batch if n != "labels"))]
    given = [value.long() if value.dtype == torch.int32 else value for value in given]

    def loss_of(labels: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(task.torchs(*values, params).flatten(0, -2), labels.flatten())

    function: Any = torch.compile(loss_of, mode="reduce-overhead") if compiled else loss_of
    fed = [value.to(target) for value in given]
    loss: list[torch.Tensor] = []

    def compute() -> None:
        optimizer.zero_grad()
        loss[:] = [function(*fed)]
        loss[0].backward()
        optimizer.step()

    work = compute if captured is None else captured(compute)

    def step() -> float:
        for there, value in zip(fed, given, strict=True):
            there.copy_(value)
        work()
        return float(loss[0].item())

    return step


def by_hand(task: Task) -> Callable[[], Any]:
    """The perceptron in NumPy, with arrays that are kept from step to step where that is easy."""
    w = {name: array.copy() for name, array in task.arrays.items()}
    moments = {name: (np.zeros_like(a), np.zeros_like(a)) for name, a in w.items()}
    images, labels = task.batch["images"], task.batch["labels"]
    rows, steps = np.arange(len(labels)), 0

    def step() -> float:
        nonlocal steps
        steps += 1
        seen = [images]
        for i in range(3):
            x = seen[-1] @ w[f"layer{i}.weight"].T
            x += w[f"layer{i}.bias"]
            seen.append(np.maximum(x, 0, out=x) if i < 2 else x)
        scores = seen.pop()
        scores -= scores.max(1, keepdims=True)
        shares = np.exp(scores)
        total = shares.sum(1, keepdims=True)
        loss = float((np.log(total[:, 0]) - scores[rows, labels]).mean())
        shares /= total
        shares[rows, labels] -= 1
        grad = shares / len(labels)
        grads = {}
        for i in (2, 1, 0):
            grads[f"layer{i}.weight"], grads[f"layer{i}.bias"] = grad.T @ seen[i], grad.sum(0)
            if i:
                grad = grad @ w[f"layer{i}.weight"]
                grad *= seen[i] > 0
        for name, g in grads.items():
            first, second = moments[name]
            first += (g - first) * np.float32(0.1)
            second += (g * g - second) * np.float32(0.001)
            size = np.sqrt(second)
            size /= np.float32(sqrt(1 - 0.999**steps))
            size += np.float32(1e-8)
            w[name] *= np.float32(1 - RATE * 0.01)
            w[name] -= np.float32(RATE / (1 - 0.9**steps)) * (first / size)
        return loss

    return step


# --- memory ---------------------------------------------------------------------------------------------------------


def torchs_peak(name: str) -> int:
    """The most bytes of live tensors during the third step, measured in a fresh process."""
    call = f"from benchmarks.training import print_peak; print_peak({name!r})"
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run([sys.executable, "-c", call], cwd=root, check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1])


def print_peak(name: str) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Peak(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
        """Notes the storages of all results, and their sum after each operation."""

        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, tuple[Any, int]] = {}
            self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in tree_iter((args, kwargs, result)):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    known = self.alive.get(storage._cdata)
                    if known is None or known[0].expired():
                        self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
            return result

    step = torchs(tasks()[name])
    with Peak() as seen:
        for _ in range(2):
            step()
        seen.peak = 0
        step()
    print(seen.peak)


def planned(trainer: training.Trainer) -> int:
    states = sum(t.nbytes for t in trainer._states.values())
    return states + sum(trainer.scheduler.buffer_size(d) for d in trainer.scheduler.devices)


def main() -> None:
    report = Report("training", options(__doc__ or ""))
    torch.set_num_threads(usable_cores().usable)
    for name, task in tasks().items():
        trainers, steps = {}, {"torch": torchs(task)}
        peak = torchs_peak(name)
        if name == "perceptron":
            steps["numpy"] = by_hand(task)
        for device in DEVICES:
            try:
                ow.device(device)
            except ow.OpweaveError:
                continue
            trainers[device], steps[device] = ours(task, device, int(0.8 * peak))
        losses = {contestant: [float(step()) for _ in range(3)] if contestant in ("torch", "numpy") else []
                  for contestant, step in steps.items()}  # fmt: skip
        for device, trainer in trainers.items():
            for _ in range(3):
                trainer._tally = type(trainer._tally)()
                steps[device]()
                losses[device].append(trainer._tally.loss / 32)
            np.testing.assert_allclose(losses[device], losses["torch"], rtol=1e-3)
        times = interleaved(steps, 5 if report.options.quick else 25, 0.1)
        best = {contestant: min(found) for contestant, found in times.items()}
        memory = {device: planned(trainer) for device, trainer in trainers.items()}
        for contestant, seconds in best.items():
            report.row(
                model=name, on=contestant, ms=seconds * 1e3, steps_per_second=1 / seconds,
                over_torch=seconds / best["torch"], KiB=memory.get(contestant, peak) / 1024,
            )  # fmt: skip
        fastest = min(trainers, key=lambda device: best[device])
        report.target(f"{name}, {fastest}", best[fastest] / best["torch"], 1.0, "times torch")
        if "numpy" in best:
            report.target(f"{name}, cpu", best["cpu"] / best["numpy"], 1.0, "times NumPy by hand")
        report.target(f"{name}, memory, {fastest}", memory[fastest] / peak, 0.8, "times torch's peak")
        for trainer in trainers.values():
            trainer.scheduler.close()
    report.finish("A step of training, fastest of interleaved samples")


if __name__ == "__main__":
    main()
