"""Level 0: metadata of the plugin, properties of its devices, and opening and closing streams."""

from __future__ import annotations

from collections.abc import Mapping

from opweave.contract import Device, Kind
from opweave.errors import LifetimeError, OpweaveError
from opweave.registry.naming import device_names, key
from opweave.registry.records import State
from opweave_conformance.checklist import Checklist, Mismatch, Subject, expect, expect_raises, inapplicable

__all__ = ["CHECKS"]

backend = Checklist(0, "hygiene", per_device=False)
device = Checklist(0, "hygiene")


@backend("entry-point")
def _(subject: Subject) -> None:
    """The plugin belongs to a distribution with a name and a version, and is ready."""
    record = subject.record
    expect(record.state is State.READY, f"the plugin is {record.state.value}: {record.error}")
    if record.name == "host":
        inapplicable("it is built in")
    if not record.distribution:
        inapplicable("no distribution carries it")
    expect(record.version, f"the distribution {record.distribution} has no version")


@backend("names")
def _(subject: Subject) -> None:
    """The backend has its entry point's name; names of devices begin with the backend's, and are unique."""
    name = subject.backend.name
    if not subject.record.value.endswith(".py") and ":" in subject.record.value:
        expect(key(name) == key(subject.record.name), f"the backend is called {name!r}, not {subject.record.name!r}")
    names = list(subject.record.devices)
    expect(names, "it has no devices")
    expect(len({key(n) for n in names}) == len(names), f"two devices have one name: {names}")
    for given in names:
        expect(key(given) == key(name) or key(given).startswith(f"{key(name)}:"), f"{given!r} does not begin {name!r}")


@backend("devices-repeatable")
def _(subject: Subject) -> None:
    """Each call of ``devices()`` gives the same number of devices, with the same ids, kinds and hardware ids."""
    first, second = (_described(list(subject.backend.devices()), subject.backend.name) for _ in range(2))
    expect(first == second, f"devices() first gives {first}, then {second}")


def _described(devices: list[Device], name: str) -> list[tuple[str, Kind, str | None]]:
    try:
        names = device_names(name, [d.id for d in devices])
    except OpweaveError as error:
        raise Mismatch(str(error)) from None
    return [(n, d.kind, d.hardware_id) for n, d in zip(names, devices, strict=True)]


@device("properties")
def _(subject: Subject) -> None:
    """Kind, description, hardware id, alignment and the largest buffer have valid types and values."""
    d = subject.device
    expect(isinstance(d.kind, Kind), f"kind is {d.kind!r}")
    expect(d.kind is not Kind.HOST or subject.backend.name == "host", "only the core's own device is of kind HOST")
    expect(isinstance(d.description, str), f"description is {d.description!r}, no text")
    expect("\n" not in d.description, "the description has several lines")
    expect(d.hardware_id is None or (isinstance(d.hardware_id, str) and d.hardware_id.strip()),
           f"hardware_id is {d.hardware_id!r}, neither None nor a text")  # fmt: skip
    n = d.alignment
    expect(isinstance(n, int) and n > 0 and n & (n - 1) == 0, f"alignment is {n!r}, no power of two")
    limit = d.max_buffer_size
    expect(limit is None or (isinstance(limit, int) and limit > 0), f"max_buffer_size is {limit!r}")
    expect(d.props().name == d.name, f"props() says the name is {d.props().name!r}, not {d.name!r}")
    expect(d.reaches(d.space), "it does not reach its own memory space")


@device("mem-info")
def _(subject: Subject) -> None:
    """mem_info() gives free and total bytes, free at most total; (0, 0) where the device does not know."""
    answer = subject.device.mem_info()
    pair = isinstance(answer, tuple) and len(answer) == 2 and all(type(n) is int for n in answer)
    expect(pair, f"mem_info() gives {answer!r}, not two integers")
    free, total = answer
    expect(0 <= free <= total, f"mem_info() says {free:,} bytes free of {total:,}")


@device("features")
def _(subject: Subject) -> None:
    """features() is a mapping with names as keys."""
    found = subject.device.features()
    named = isinstance(found, Mapping) and all(isinstance(name, str) and name for name in found)
    expect(named, f"features() gives {found!r:.200}")


@device("kernels")
def _(subject: Subject) -> None:
    """Kernels are registered for operations that exist."""
    from opweave.graph.opdef import OPS

    table = getattr(subject.device, "kernels", None)
    if table is None:
        inapplicable("it has no kernel table")
    unknown = {name for name in table.ops() if name not in OPS}
    expect(not unknown, f"there are kernels for operations that nobody defines: {', '.join(sorted(unknown))}")
    views = {name for name in table.ops() if name in OPS and OPS[name].is_view}
    expect(not views, f"there are kernels for views, which never arrive: {', '.join(sorted(views))}")


@device("streams")
def _(subject: Subject) -> None:
    """Several streams can be open at once, and be closed twice; using a closed one raises LifetimeError."""
    with subject.device.open() as first, subject.device.open() as second:
        expect(first is not second, "opening a second stream gives the first one")
        for stream in (first, second):
            stream.run([])
            stream.record().synchronize()
            stream.synchronize()
    first.close()
    expect(first.closed and second.closed, "a stream that was closed does not say so")
    expect_raises(LifetimeError, "an event on a closed stream", first.record)
    expect_raises(LifetimeError, "compiling on a closed stream", lambda: first.compile([]))


@device("stream-parameters")
def _(subject: Subject) -> None:
    """A parameter that the device does not take is refused with a TypeError."""
    d = subject.device
    expect_raises(TypeError, "open() with an unknown parameter", lambda: d.open(opweave_no_such_parameter=1).close())


@device("stream-class")
def _(subject: Subject) -> None:
    """`Stream.is_async` and `Stream.has_events` agree with the device's capabilities."""
    caps = subject.device.caps
    with subject.device.open() as stream:
        expect(stream.is_async == caps.asynchronous, f"is_async is {stream.is_async}, caps say {caps.asynchronous}")
        expect(stream.has_events == caps.events, f"has_events is {stream.has_events}, caps say {caps.events}")


CHECKS = (*backend.checks, *device.checks)
