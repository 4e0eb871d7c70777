"""The decoder with its cache, against torch computing every sequence anew, in ragged batches that come and go."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional

from examples.decoder import main
from tests.support import small_decoder as example
from tests.support.small_decoder import GROUPS, HEADS, LAYERS, LETTERS, PROMPTS, SHAPES, SIZE, WIDTH

DEVICES = (["cpu"], ["opencl:0"], ["torch:cpu"], ["ort:cpu"], ["opencl:0", "cpu"], ["cpu", "torch:cpu"])
RNG = np.random.default_rng(0)
ARRAYS = {name: (RNG.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for name, s in SHAPES.items()}
WEIGHTS = {name: torch.from_numpy(array).double() for name, array in ARRAYS.items()}
LIMITS = {"f32": 2e-4, "f16": 2e-2}


def turned(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(SIZE // 2) * 2.0 / SIZE)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@cache
def truth(*tokens):
    """Logits after the last token."""
    w = WEIGHTS
    x, positions = w["words"][list(tokens)], torch.arange(len(tokens), dtype=torch.float64)

    def norm(x):
        return functional.rms_norm(x, (WIDTH,), eps=1e-6)

    for i in range(LAYERS):
        q, k, v = ((norm(x) @ w[f"{i}.{n}"].T).reshape(len(tokens), -1, SIZE).transpose(0, 1) for n in "qkv")
        k, v = (turned(k, positions), v)
        k, v = (y.repeat_interleave(HEADS // GROUPS, 0) for y in (k, v))
        mixed = functional.scaled_dot_product_attention(turned(q, positions), k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(x.shape) @ w[f"{i}.o"].T
        h = norm(x)
        x = x + ((h @ w[f"{i}.up"].T) * functional.silu(h @ w[f"{i}.gate"].T)) @ w[f"{i}.down"].T
    return (norm(x[-1]) @ w["words"].T).numpy()


@pytest.mark.parametrize(("dtype", "blocks"), [("f32", None), ("f16", None), ("f32", 9)])
@pytest.mark.parametrize("devices", DEVICES, ids=",".join)
def test_logits_are_those_of_the_whole_sequence(devices, dtype, blocks):
    rng = np.random.default_rng(1)
    step, kv = example.decoder(ARRAYS, devices, sequences=3, capacity=40, dtype=dtype, block=8, blocks=blocks)
    texts: dict[int, list[int]] = {}

    def feed(counts):
        new = {sequence: rng.integers(0, len(LETTERS), count).tolist() for sequence, count in counts.items()}
        batch = kv.feed(new)
        logits = step(*batch)
        for sequence, ids in new.items():
            texts[sequence] = texts.get(sequence, []) + ids
            want = truth(*texts[sequence])
            error = np.abs(logits[batch.rows[sequence]] - want).max() / np.abs(want).max()
            assert error < LIMITS[dtype], (sequence, len(texts[sequence]))

    a, b = kv.join(), kv.join()
    feed({a: 7})  # a prompt alone
    feed({b: 3, a: 1})  # a prompt beside a token
    c = kv.join()
    feed({c: 5, b: 2})  # while a waits
    feed({a: 1, b: 1, c: 1})
    kv.release(b)
    del texts[b]
    feed({a: 1, c: 1})
    assert kv.join() == b  # another sequence takes the place
    feed({b: 2})
    feed({a: 4, b: 11, c: 1})
    kv.truncate(a, 9)
    del texts[a][9:]
    feed({a: 40 - 9})  # up to the capacity
    feed({b: 1, c: 1})  # beside it
    assert kv.lengths.tolist() == [40, 14, 9]
    assert kv.free_blocks == 0  # of nine blocks of eight tokens, some of which another sequence had before
    step.close()


@pytest.mark.parametrize("blocks", [None, 3])
@pytest.mark.parametrize("devices", DEVICES, ids=",".join)
def test_what_a_sequence_leaves_reaches_no_other_one(devices, blocks):
    words = ARRAYS["words"].copy()
    words[30] = np.nan  # a token with which all of its sequence becomes NaN
    step, kv = example.decoder(ARRAYS | {"words": words}, devices, sequences=2, capacity=16, block=8, blocks=blocks)
    ids = [1, 2, 3, 4, 5]

    def scores(sequences, *new):
        batch = kv.feed(dict(zip(sequences, new, strict=True)))
        logits = step(*batch)
        return [logits[batch.rows[sequence], :30] for sequence in sequences]

    ill, well = kv.join(), kv.join()
    broken, good = scores([ill, well], [30] * 8, ids)
    assert np.isnan(broken).all()
    want = truth(*ids)[:30]
    assert np.abs(good - want).max() < 2e-4 * np.abs(want).max()
    kv.release(ill)
    assert kv.join() == ill
    want = truth(*ids, 6)[:30]
    assert np.isfinite(scores([ill], ids)).all()
    for got in scores([ill, well], [6], [6]):
        assert np.abs(got - want).max() < 2e-4 * np.abs(want).max()
    # Tokens that were only tried, and cut off within a block.
    assert np.isnan(scores([ill], [30, 30])[0]).all()
    kv.truncate(ill, 6)
    want = truth(*ids, 6, 7)[:30]
    assert np.abs(scores([ill], [7])[0] - want).max() < 2e-4 * np.abs(want).max()
    step.close()


@pytest.mark.parametrize("blocks", [None, 8])
def test_a_step_plans_nothing_once_its_shapes_are_known(blocks):
    step, kv = example.decoder(ARRAYS, ["cpu"], sequences=2, capacity=64, block=16, blocks=blocks)
    sequence, other = kv.join(), kv.join()
    seen = set()
    for length in range(1, 65):
        batch = kv.feed({sequence: [1], other: [2]})
        before = step.scheduler.stats.built
        step(*batch)
        assert step.scheduler.stats.built - before == (batch.reach not in seen)
        seen.add(batch.reach)
        assert batch.reach >= length
    assert seen == set(kv.reaches) == {16, 32, 64}
    step.close()


def test_every_device_writes_the_same():
    texts = []
    for devices in DEVICES:
        step, kv = example.decoder(ARRAYS, devices, block=32)
        texts.append(sorted(example.continued(PROMPTS, 24, step, kv)))
        assert kv.lengths.tolist() == [0, 0]
        step.close()
    assert [len(text) for text in texts[0]] == [24, 24, 24]
    assert [text[: len(prompt)] for text, prompt in zip(texts[0], sorted(PROMPTS), strict=True)] == sorted(PROMPTS)
    assert all(text == texts[0] for text in texts)


def test_the_example_continues_one_beginning_on_every_device(tmp_path, capsys):
    pytest.importorskip("transformers")
    from tests.support.small_models import make_folder

    make_folder("llama", tmp_path)
    main([str(tmp_path), "--devices", "cpu", "cpu,host", "--beginning", "in the", "--endings", " one", " other"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in the")]
    assert len(lines) == 4
    assert lines[:2] == lines[2:]
    assert [line[: len("in the o")] for line in lines] == ["in the o"] * 4
