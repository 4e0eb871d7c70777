"""The processor's model and properties, as the operating system reports them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache

__all__ = ["cpu_fields", "cpu_name"]


@cache
def cpu_fields() -> Mapping[str, str]:
    """The fields of the first processor in ``/proc/cpuinfo``; none on systems without such a file."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    return fields


def cpu_name() -> str:
    """The name of the processor's model, else that of its architecture."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine() or "CPU"
