"""The build backend of the root, which is no package: every call ends with what to install instead."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

MESSAGE = """
The root of this repository is no package. To install opweave from this clone, name the packages:

    pip install ./core ./plugins/cpu        # and ./plugins/torch, ./plugins/ort, ./plugins/opencl,
                                            # ./plugins/remote, ./plugins/ray, ./plugins/training, ./plugins/cost,
                                            # ./plugins/conformance, ./plugins/combined, ./models

From a package index: pip install "opweave[cpu]" (or [opencl], [ort], [ray], [remote], [torch], [combined],
[conformance], [cost], [models], [training], [all]).
To work on it: pip install -r requirements/test.txt -r requirements/checks.txt
"""


def _refuse(*args: Any, **settings: Any) -> NoReturn:
    sys.exit(MESSAGE)


build_wheel = build_sdist = build_editable = _refuse
get_requires_for_build_wheel = get_requires_for_build_sdist = get_requires_for_build_editable = _refuse
