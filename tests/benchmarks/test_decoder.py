"""What is measured of decoders: by the command and the benchmarks alike, and of llama.cpp with one set-up."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

commands = pytest.importorskip("opweave_models.commands")

from benchmarks import _llama, batching, decoder  # noqa: E402
from benchmarks._measure import Report  # noqa: E402


class Session:
    """Its tokens are 5, 6, 7, ..."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def feed(self, ids: list[int]) -> None:
        self.fed.append(ids)

    def logits(self) -> Any:
        return np.eye(20)[4 + len(self.fed)]


@pytest.fixture
def model(monkeypatch):
    """Takes 2 seconds for the prompt, then 1, 4 and 1 for the steps."""
    clock = iter([10.0, 12.0, 13.0, 17.0, 18.0] * 3)
    monkeypatch.setattr(commands, "perf_counter", lambda: next(clock))
    made = SimpleNamespace(sessions=[], warm=lambda: None, close=lambda: None, config=SimpleNamespace(vocabulary=9),
                           plan=SimpleNamespace(devices=["a"]))  # fmt: skip

    def session() -> Session:
        made.sessions.append(Session())
        return made.sessions[-1]

    made.session = session
    return made


def test_rates_are_those_of_a_prompt_and_of_the_steps_after_it(model):
    assert commands.rates(model, [1, 2, 3, 4], 3) == (2.0, 0.5, 4.0)
    assert model.sessions[0].fed == [[1, 2, 3, 4], [5], [6], [7]]


def test_the_command_gives_the_best_of_three_rounds(model):
    class Entered(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    assert commands.measured(Entered(**vars(model)), 6, 3) == {"devices": ["a"], "prompt": 3.0, "answer": 0.5}
    assert [len(session.fed[0]) for session in model.sessions] == [6, 6, 6]


def test_rates_are_compared_with_llama_cpp_and_with_those_of_the_parts(monkeypatch):
    class Model(ExitStack):
        config = SimpleNamespace(vocabulary=9)

        def __init__(self, name: str, split: Any) -> None:
            super().__init__()
            assert split == ([1.0, 1.0] if name == "a,b" else None)
            self.plan = SimpleNamespace(shares=[SimpleNamespace(device="a", weights=1),
                                                SimpleNamespace(device="b", weights=3)])  # fmt: skip
            self.found = {"a": (60.0, 10.0, 1.5), "b": (15.0, 5.0, 2.5), "a,b": (20.0, 6.25, 1.0)}[name]

        def warm(self) -> None:
            pass

    monkeypatch.setattr("opweave_models.load", lambda path, name, split, **options: Model(name, split))
    monkeypatch.setattr(decoder, "rates", lambda model, ids, steps: model.found)
    monkeypatch.setattr(decoder, "find_spec", lambda name: name)
    monkeypatch.setattr(_llama, "server", lambda *given: given)
    monkeypatch.setattr(_llama, "rates", lambda server, ids, steps: (30.0, 20.0, inf))
    given = Namespace(devices=["a", "b", "a,b"], contexts=[7], steps=3, threads=2, quick=True, json=True)
    report = Report("decoder", given)
    decoder.compare(report, "folder/m.gguf", given)
    assert report.rows[2:] == [
        {"model_and_tokens": "m, 7", "by": "a,b", "prompt": 20.0, "answer": 6.25, "prompt_ratio": 20 / 30,
         "answer_ratio": 6.25 / 20, "slowest": 1.0, "to_parts": pytest.approx(0.16 / 0.175)},
        {"model_and_tokens": "m, 7", "by": "llama.cpp", "prompt": 30.0, "answer": 20.0, "prompt_ratio": 1.0,
         "answer_ratio": 1.0},
    ]  # fmt: skip
    assert {target.name.removeprefix("m, 7: "): (target.value, target.limit) for target in report.targets} == {
        "slowest step by a": (1.5, 2), "slowest step by b": (2.5, 2), "slowest step by a,b": (1.0, 2),
        "a,b to its parts": (pytest.approx(0.16 / 0.175), 1.1), "prompt": (0.5, 1), "answer": (2.0, 1),
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--prompt", "--tokens"])
def test_nothing_to_measure_is_a_wrong_call(option):
    app = typer.Typer()
    commands.add(app)
    assert CliRunner().invoke(app, ["models", "bench", "m.gguf", option, "0"]).exit_code == 2


def test_llama_cpp_is_set_up_alike(monkeypatch):
    asked, served = [], []

    class Server:
        def __init__(self, options: Any) -> None:
            served.append(options)

        def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
            asked.append(request)
            return {"timings": {"prompt_per_second": 30.0, "predicted_per_second": 4.0}}

    def params() -> Any:
        return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace(CommonParams=params, Server=Server))
    assert _llama.rates(_llama.server("m.gguf", 1, 100, 3), [1, 2], 5)[:2] == (30.0, 4.0)
    batching.theirs("m.gguf", 4)
    assert (asked[0]["prompt"], asked[0]["n_predict"], asked[0]["cache_prompt"]) == ([1, 2], 5, False)
    one, several = served
    assert (one.model.path, one.n_parallel, one.n_ctx, one.cpuparams_batch.n_threads) == ("m.gguf", 1, 100, 3)
    assert (several.n_parallel, several.n_ctx, several.verbosity) == (4, 1024, one.verbosity)
    assert several.cpuparams.n_threads == several.cpuparams_batch.n_threads >= 1
