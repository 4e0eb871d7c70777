"""The examples that train: small ones of their kind, against torch."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

import opweave_training as training
from benchmarks.training import torch_transformer
from examples import digits, text

SMALL = text.Size(layers=1, width=32, heads=2, context=16)
STEPS, BATCH = 40, 16


@pytest.fixture(scope="module")
def words():
    found = text.read_text()
    assert len(found.train) > 100_000
    return found


@pytest.fixture(scope="module")
def torchs(words):
    """The loss on held-out pieces after training in torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them are slower for tensors of this size
    params = {name: torch.tensor(a, requires_grad=True) for name, a in start(words).items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    data, rate = pieces(words)[0], training.cosine(1e-2, STEPS, 5)

    def loss(batch):
        ids, labels = (torch.from_numpy(np.asarray(batch[name], np.int64)) for name in ("ids", "labels"))
        scores = torch_transformer(ids, params, SMALL)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    for step, batch in enumerate(data.batches(BATCH, data.order(0, 0)[: STEPS * BATCH])):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
    with torch.no_grad():
        found = float(loss(pieces(words)[1]))
    torch.set_num_threads(threads)
    return found


def start(words):
    return text.parameters(len(words.letters), SMALL)


def pieces(words):
    train = text.examples(words.train, SMALL.context, SMALL.context)
    held = text.examples(words.held, SMALL.context, SMALL.context)
    train = {name: a[: STEPS * BATCH] for name, a in train.items()}
    return training.Dataset(train), {name: a[:256] for name, a in held.items()}


@pytest.mark.parametrize("devices", [["cpu"], ["torch:cpu"], ["opencl:0"], ["opencl:0", "cpu"]], ids=",".join)
def test_the_transformer_learns_as_in_torch(words, torchs, devices):
    params = text.states(start(words))
    with training.Trainer(
        lambda ids: text.transformer(ids, params, SMALL), training.AdamW(params), training.cosine(1e-2, STEPS, 5),
        batch=BATCH, clip_norm=1.0, devices=[*devices, "host"],
    ) as trainer:  # fmt: skip
        data, held = pieces(words)
        before = trainer.evaluate(held).loss
        trainer.run_epoch(data)
        after = trainer.evaluate(held).loss
    assert trainer.steps == STEPS
    assert after == pytest.approx(torchs, rel=0.02)
    assert after < 0.85 * before


def test_the_transformer_of_the_example_has_a_million_parameters_and_writes(words):
    arrays = text.parameters(len(words.letters))
    assert 0.9e6 < sum(a.size for a in arrays.values()) < 1.1e6
    written = text.written("The ", 5, words.letters, text.states(start(words)), SMALL, devices="cpu")
    assert written.startswith("The ")
    assert len(written) == 9
    assert written == text.written("The ", 5, words.letters, text.states(start(words)), SMALL, devices="cpu")


def test_the_digits_are_learnt_on_a_device_and_split_over_two(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", ["digits", "--devices", "cpu,opencl:0", "--json"])
    assert digits.main() == 0
    found = json.loads(capsys.readouterr().out)["placements"]
    assert [row["placement"] for row in found] == ["cpu", "opencl:0", "cpu + opencl:0"]
    for row in found:
        assert row["trained"]["perceptron"] >= 0.97
        assert row["trained"]["convolutional"] >= 0.985
