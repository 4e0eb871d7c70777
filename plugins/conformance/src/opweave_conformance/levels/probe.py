"""Run as a script: finds, imports and loads one plugin in a fresh process, and prints as JSON which modules each of
these stages imported.

Arguments: the import path as JSON, and the plugin's name or the path of its file.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def probe(target: str) -> dict[str, Any]:
    """Top-level modules by stage, and the modules of all plugins by the plugins' names."""
    from importlib import import_module
    from importlib.metadata import entry_points

    modules = {p.name: p.value.partition(":")[0] for p in entry_points(group="opweave.backends")}
    result: dict[str, Any] = {"plugins": {name: module.partition(".")[0] for name, module in modules.items()}}
    seen: set[str] = set()

    def loaded() -> list[str]:
        now = {name.partition(".")[0] for name in sys.modules}
        new = sorted(now - seen)
        seen.update(now)
        return new

    from opweave import registry

    loaded()
    registry.plugins()
    result["scan"] = loaded()
    if target in modules:
        import_module(modules[target])
        result["import"] = loaded()
    registry.load(target)
    result["load"] = loaded()
    return result


def main() -> None:
    # What a plugin prints, from C too, must not get into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = json.loads(sys.argv[1])
    with answer:
        json.dump(probe(sys.argv[2]), answer)


if __name__ == "__main__":
    main()
