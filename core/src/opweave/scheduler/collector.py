"""`COLLECTOR`: keeps Python's collector of cycles out of builds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["COLLECTOR"]


class _Collector:
    """Keeps Python's collector of cycles out of builds, which make many objects that stay and no garbage.

    What a large build made is put where it is not walked through soon, which would cost as much as the build. The
    collector does not count these objects, and would not come for those that were given up; so they are counted here.

    Four builds of 20,000 nodes, ms each, and ms of the 20,000 small lists made after each, on an AMD Zen 5: left alone
    155 to 466 and 2 to 5; with the collector only disabled 141 to 203 and 11 to 317; so 104 to 109 and 1.
    """

    LARGE: Final = 5_000
    """Objects from which a build is large, those of some 500 nodes. To walk through what a build of 1,000 nodes made
    takes a tenth of the build."""

    MANY: Final = 2_000_000
    """Objects of large builds after which everything is walked through, before the next build."""

    def __init__(self) -> None:
        self.parked = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        if not gc.isenabled():
            yield
            return
        if self.parked > self.MANY:
            gc.collect()
            self.parked = 0
        gc.disable()
        try:
            yield
        finally:
            made = gc.get_count()[0]
            if made > self.LARGE and not gc.get_freeze_count():
                # There and back, objects arrive in the oldest generation without having been walked through.
                gc.freeze()
                gc.unfreeze()
                self.parked += made
            gc.enable()


COLLECTOR: Final = _Collector()
