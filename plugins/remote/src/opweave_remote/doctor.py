"""Checks for ``opweave doctor``: whether the servers that are listed answer, and how far away they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import perf_counter

from opweave.registry import Diagnosis
from opweave_remote import backend
from opweave_remote.wire import Kind

__all__ = ["diagnose"]

_FAR = 2e-3
"""Seconds of a round trip from which on short runs mostly wait for the network."""


def diagnose() -> Iterator[Diagnosis]:
    """What there is to say about the servers that this process uses."""
    if not os.environ.get("OPWEAVE_REMOTE") and not backend.servers():
        return
    found = backend.RemoteBackend()
    try:
        found.devices()
    except Exception as error:
        yield Diagnosis("remote", "wrong", str(getattr(error, "message", error)), str(getattr(error, "remedy", "")))
        return
    for name, why in found.features().items():
        yield Diagnosis(f"remote {name}", "wrong", str(why), "start `opweave serve-devices` there, or leave it out")
    for connection in backend.servers():
        device = connection.devices[0]
        took = []
        for _ in range(5):
            start = perf_counter()
            connection.control.call(Kind.INFO, device.remote_name)
            took.append(perf_counter() - start)
        packing = connection.packing
        rate = packing.rate() / 1e6
        message = (
            f"{len(connection.devices)} devices, a round trip takes {min(took) * 1e3:.2f} ms, uploads {rate:,.0f} MB/s"
        )
        if packing.raw:
            message += f", compressed by {packing.codec} to {packing.packed / packing.raw:.0%}"
        far = min(took) > _FAR
        yield Diagnosis(f"remote {connection.name}", "slow" if far else "ok", message,
                        "let large parts of a graph run there, not single nodes" if far else "")  # fmt: skip
