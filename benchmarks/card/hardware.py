"""`Card`: what measuring asks of the device that torch computes on; `StandIn`: the same of torch on the processor.

Everything that names CUDA is in `Card`, so that the other files run the same on the stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

__all__ = ["Card", "Hardware", "StandIn", "hardware"]

Run = Callable[[], Any]


class Hardware:
    """A device of torch.

    Args:
        target: torch's name of it.
    """

    def __init__(self, target: str) -> None:
        self.target = torch.device(target)

    def facts(self) -> dict[str, Any]:
        """What a reader of figures has to know about it."""
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    def seconds(self, run: Run, queue: Any = None) -> float:
        """Seconds that the device takes from the begin to the end of what ``run`` queues on ``queue``, by events of
        the device; ``None``: torch's current queue."""
        raise NotImplementedError

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device reads without a further copy."""
        raise NotImplementedError

    def queue(self) -> Any:
        raise NotImplementedError

    def taken(self) -> int:
        """Bytes of the device that torch's allocator has handed out."""
        raise NotImplementedError

    def allocations(self) -> int | None:
        """How often torch's allocator was asked for memory so far, ``None`` where it does not count."""
        raise NotImplementedError

    def peak(self, run: Run) -> int | None:
        """The most bytes that torch's allocator handed out while ``run`` ran, above those before."""
        raise NotImplementedError

    def launches(self, run: Run) -> dict[str, int]:
        """How many kernels and graphs the host starts in ``run``."""
        raise NotImplementedError

    def captured(self, function: Run) -> Run:
        """What repeats the work of ``function``, recorded once: a CUDA graph made by hand."""
        raise NotImplementedError


class Card(Hardware):
    """A card of CUDA (ROCm)."""

    def facts(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.target)
        return {
            "card": found.name, "memory": found.total_memory, "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}", "torch": torch.__version__,
            "cuda": torch.version.cuda or f"ROCm {torch.version.hip}", "driver": _driver(),
        }  # fmt: skip

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.target)

    def seconds(self, run: Run, queue: Any = None) -> float:
        queue = queue or torch.cuda.current_stream(self.target)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(queue)
        run()
        end.record(queue)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def queue(self) -> Any:
        return torch.cuda.Stream(self.target)

    def taken(self) -> int:
        return int(torch.cuda.memory_allocated(self.target))

    def allocations(self) -> int | None:
        return int(torch.cuda.memory_stats(self.target)["allocation.all.allocated"])

    def peak(self, run: Run) -> int | None:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.target)
        torch.cuda.reset_peak_memory_stats(self.target)
        run()
        self.synchronize()
        return int(torch.cuda.max_memory_allocated(self.target) - before)

    def launches(self, run: Run) -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            self.synchronize()
        names = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
        return {event.key: event.count for event in profiler.key_averages() if event.key in names}

    def captured(self, function: Run) -> Run:
        with torch.cuda.stream(torch.cuda.Stream(self.target)):
            for _ in range(3):  # libraries load kernels and choose algorithms when they are first used
                function()
        torch.cuda.synchronize(self.target)
        graph = torch.cuda.CUDAGraph()
        # Of the workspaces of the queue above, torch.compile frees all that it finds.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.target)):
            function()
        return graph.replay  # type: ignore[no-any-return]


class StandIn(Hardware):
    """torch on the processor, which works while it is called. It has no graphs: a captured function is called again."""

    def facts(self) -> dict[str, Any]:
        return {"card": f"none: torch on the processor stands in, {torch.get_num_threads()} threads",
                "torch": torch.__version__}  # fmt: skip

    def synchronize(self) -> None:
        torch.cpu.synchronize()

    def seconds(self, run: Run, queue: Any = None) -> float:
        start = perf_counter()
        run()
        return perf_counter() - start

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def queue(self) -> Any:
        return torch.cpu.Stream()

    def taken(self) -> int:
        return 0

    def allocations(self) -> int | None:
        return None

    def peak(self, run: Run) -> int | None:
        run()
        return None

    def launches(self, run: Run) -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        return {"functions of torch": sum(event.count for event in profiler.key_averages())}

    def captured(self, function: Run) -> Run:
        return function


def hardware(device: str) -> Hardware:
    """The torch device behind one of opweave: ``torch:cuda:0``, ``torch:cpu``."""
    target = device.removeprefix("torch:")
    return Card(target) if target.startswith("cuda") else StandIn(target)


def _driver() -> str:
    """The version of the driver, where its tool is there."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found[0] if found else "unknown"
