"""The tables in which every family registers its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from opweave.contract.kernels import F, KernelTable
from opweave.graph.dtypes import FLOATS, NUMBERS, PLAIN, DType, as_dtype

__all__ = ["FLOATS", "KERNELS", "MOVABLE", "NUMBERS", "PLAIN"]

MOVABLE: Final = PLAIN


class OpenCLKernels(KernelTable):
    """Every kernel, for devices that compute in double precision.

    Attributes:
        without_f64: the same for devices that do not: their kernels accept f64 only where they move elements.
    """

    def __init__(self) -> None:
        super().__init__("f32", "strided", index="i32 i64")
        self.without_f64: Final = KernelTable("f32", "strided", index="i32 i64")

    def __call__(
        self, *ops: str, dtypes: str | Iterable[DType] | None = None, moves: bool = False, **rules: Any
    ) -> Callable[[F], F]:
        """As `KernelTable`; ``moves`` says that elements are not computed with."""
        types = [as_dtype(t) for t in (dtypes.split() if isinstance(dtypes, str) else dtypes or self.dtypes)]
        usual = types if moves else [t for t in types if t.name != "f64"]
        register = super().__call__(*ops, dtypes=types, **rules)
        register_usual = self.without_f64(*ops, dtypes=usual, **rules)
        return lambda factory: register(register_usual(factory))


KERNELS: Final = OpenCLKernels()
"""What OpenCL devices run."""
