"""llama.cpp's server in this process, where xllamacpp is installed."""

import os
from math import inf
from typing import Any

PEER = "llama.cpp"
"""What it is called in reports."""


def server(path: str, sequences: int, context: int, threads: int | None = None) -> Any:
    """A server of a GGUF file for so many sequences, which share ``context`` tokens, on all processors by default."""
    import xllamacpp

    options: Any = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx, options.verbosity = path, sequences, context, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads or os.cpu_count() or 1
    return xllamacpp.Server(options)


def request(ids: list[int], steps: int) -> dict[str, Any]:
    """What is asked of the server: so many tokens, the most likely ones, with nothing kept of earlier prompts."""
    return {"prompt": ids, "n_predict": steps, "temperature": 0, "ignore_eos": True, "cache_prompt": False}


def rates(server: Any, ids: list[int], steps: int) -> tuple[float, float, float]:
    """Tokens a second of a prompt and of an answer, as `opweave_models.commands.rates`; single steps are not told."""
    times = server.handle_completions(request(ids, steps))["timings"]
    return times["prompt_per_second"], times["predicted_per_second"], inf
