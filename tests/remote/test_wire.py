"""The codec: what is encoded comes back, and nothing but a typed error comes of other bytes."""

from __future__ import annotations

import os
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opweave.errors import FormatError
from opweave_remote.wire import HEAD, MAGIC, SCHEMA, FrameReader, Kind, checked, encode

MUTATIONS = int(os.environ.get("OPWEAVE_TEST_MUTATIONS", "5000"))
SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "u": st.integers(0, (1 << 63) - 1),
    "s": st.text(max_size=20),
    "b": st.binary(max_size=40),
    "*": st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=5),
        lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=4), part, max_size=4),
        max_leaves=10,
    ),
}


def reader_of(data: bytes, pieces: random.Random | None = None, **limits: int) -> FrameReader:
    """A reader of bytes that arrive in pieces of random sizes."""
    at = 0

    def receive(target: memoryview, got: list[int]) -> None:
        nonlocal at
        most = len(target) if pieces is None else min(len(target), pieces.randint(1, 9))
        piece = data[at : at + most]
        target[: len(piece)] = piece
        at += len(piece)
        got.append(len(piece))

    return FrameReader(receive, limits.get("max_args", 1 << 20), limits.get("max_data", 1 << 20))


@settings(deadline=None)
@given(st.data(), st.sampled_from(list(Kind)), st.integers(0, 2**32))
def test_messages_come_back_however_they_are_cut(data, kind, seed):
    args = [data.draw(SAMPLES[letter]) for letter in SCHEMA[kind]]
    with_data = kind in (Kind.WRITE, Kind.UPLOAD, Kind.DATA)
    raw = data.draw(st.binary(max_size=60)) if with_data else b""
    message = encode(kind, *args, size=len(raw)) + raw
    reader = reader_of(message * 2, random.Random(seed))
    for _ in range(2):
        frame = reader.frame()
        assert frame == (kind, args, len(raw))
        got = bytearray(len(raw))
        reader.into(memoryview(got))
        assert bytes(got) == raw
    with pytest.raises(EOFError):
        reader.frame()


@pytest.mark.parametrize(
    ("kind", "args", "size", "words"),
    [
        (99, [], 0, "no message of kind 99"),
        (Kind.RUN, [1], 5, "carries no data"),
        (Kind.RUN, [], 0, "has 1 arguments"),
        (Kind.RUN, [-1], 0, "argument 0"),
        (Kind.RUN, [True], 0, "argument 0"),
        (Kind.RUN, [1 << 63], 0, "argument 0"),
        (Kind.RUN, ["1"], 0, "argument 0"),
        (Kind.INFO, [1, b"cpu"], 0, "argument 1"),
        (Kind.FREE, [msgpack.ExtType(3, b"x")], 0, "type ExtType"),
        (Kind.FREE, [msgpack.Timestamp(1)], 0, "type Timestamp"),
    ],
)
def test_other_arguments_than_the_schema_names_are_refused(kind, args, size, words):
    with pytest.raises(FormatError, match=words):
        checked(kind, msgpack.packb(args), size)


def test_values_nested_too_deeply_are_refused():
    value: Any = []
    for _ in range(40):
        value = [value]
    with pytest.raises(FormatError, match="nested"):
        checked(Kind.FREE, msgpack.packb([value]), 0)


def test_frames_above_the_limits_are_refused_before_memory_is_taken():
    for length, size in ((1 << 31, 0), (10, 1 << 60)):
        head = HEAD.pack(MAGIC, Kind.WRITE, 0, length, size)
        with pytest.raises(FormatError, match="above the limits"):
            reader_of(head).frame()


def test_mutated_frames_give_typed_errors_only():
    rng = random.Random(7)
    messages = [
        encode(Kind.ALLOC, 1, "cpu", 2, 1000, "any"),
        encode(Kind.ASK, 1, "cpu", [["add", [0, 0, "f32", [2], [4], 0], [], {}, True, "", "exact"]]),
        encode(Kind.WRITE, 1, 2, 3, size=8) + bytes(8),
        encode(Kind.HELLO, 1, "session", b"", bytes(32), bytes(32)),
    ]
    for _ in range(MUTATIONS):
        raw = bytearray(rng.choice(messages))
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.2:
            del raw[rng.randrange(len(raw)) :]
        reader = reader_of(bytes(raw), max_args=4096, max_data=4096)
        try:
            frame = reader.frame()
            reader.skip(frame.size)
        except (FormatError, EOFError):
            pass
