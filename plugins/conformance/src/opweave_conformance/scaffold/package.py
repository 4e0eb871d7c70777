"""`write_package`: the files of a new backend's package, from the templates of this folder."""

from __future__ import annotations

import keyword
from datetime import date
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, Literal, NamedTuple

from opweave.errors import NameConflict, OpweaveError, PathError
from opweave.registry.discovery import core_version
from opweave.registry.naming import key
from opweave.registry.registry import Registry

__all__ = ["LICENCES", "Package", "ScaffoldError", "write_package"]

LICENCES: Final = ("MIT", "BSD-3-Clause", "Apache-2.0", "LicenseRef-Proprietary")
"""SPDX expressions of the licences that a package can be given."""

TEMPLATES: Final = Path(__file__).parent / "templates"

FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "conformance.toml": "conformance.toml",
    "src/opweave_{name}/__init__.py": "backend.py",
    "src/opweave_{name}/py.typed": "",
    "tests/test_conformance.py": "test_conformance.py",
    "tests/test_{name}.py": "test_backend.py",
    ".github/workflows/ci.yml": "ci.yml",
}
"""File of a package -> its template; ``""``: it is empty."""

C_FILES: Final = {
    "setup.py": "setup.py",
    "MANIFEST.in": "MANIFEST.in",
    "build_{name}.py": "build_kernels.py",
    "c/{name}.h": "kernels.h",
    "c/{name}.c": "kernels.c",
}
"""Those that a package with kernels in C has besides."""


class ScaffoldError(OpweaveError, ValueError):
    """A name that a backend and its Python package cannot both have, or options that exclude each other."""


class Package(NamedTuple):
    """What ``opweave new-backend`` is asked for.

    Attributes:
        name: of the backend and, behind ``opweave-``, of its package.
        memory: ``"own"``: memory that the host does not reach; ``"host"``: memory of this process.
        asynchronous: its stream queues work.
        compiler: its stream makes one call of all steps of a split.
        language: of the kernels.
        licence: one of `LICENCES`.
        author: who holds the copyright; ``""``: the authors of the package.
    """

    name: str
    memory: Literal["host", "own"] = "own"
    asynchronous: bool = False
    compiler: bool = False
    language: Literal["python", "c"] = "python"
    licence: str = "MIT"
    author: str = ""

    @property
    def distribution(self) -> str:
        return f"opweave-{self.name.replace('_', '-')}"

    def check(self, registry: Registry) -> None:
        """Raise unless such a package can be written and installed beside the plugins of ``registry``.

        Raises:
            ScaffoldError: no name for a Python package; options that exclude each other.
            NameConflict: an installed plugin or distribution has the name.
        """
        name = self.name
        if not (name.isidentifier() and name.isascii() and name == name.lower()) or keyword.iskeyword(name):
            raise ScaffoldError(
                f"{name!r:.60} cannot be the name of a backend and of a Python package: take lower-case letters, "
                "digits and underscores, a letter first, such as acme"
            )
        if self.language == "c" and self.memory == "host":
            raise ScaffoldError("--language c writes a device with memory of its own: leave --memory host out")
        if self.licence not in LICENCES:
            raise ScaffoldError(f"{self.licence!r:.60} is none of the licences {', '.join(LICENCES)}")
        taken = next((r for r in registry.plugins() if key(r.name) == name), None)
        if taken is not None:
            where = f"the installed {taken.distribution}" if taken.distribution else "a plugin that is here"
            raise NameConflict(f"the name {name!r} is taken by {where}", remedy="take another name")
        try:
            distribution(self.distribution)
        except PackageNotFoundError:
            return
        raise NameConflict(f"a package {self.distribution} is installed", remedy="take another name")

    def files(self) -> dict[str, str]:
        """Path within the package -> content."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
            keep_trailing_newline=True,
        )  # fmt: skip
        values = {
            **self._asdict(), "author": self.author or f"The authors of {self.distribution}",
            "title": "".join(word.capitalize() for word in self.name.split("_")), "upper": self.name.upper(),
            "distribution": self.distribution, "core": core_requirement(), "year": date.today().year,
        }  # fmt: skip
        templates = FILES | (C_FILES if self.language == "c" else {}) | {"LICENSE": f"licences/{self.licence}"}
        return {
            path.format(name=self.name): environment.get_template(f"{template}.j2").render(values) if template else ""
            for path, template in templates.items()
        }


def core_requirement() -> str:
    """Requires opweave from the minor version on that the package was written with: later ones use it as long as their
    contract has the same version."""
    return "opweave>=" + ".".join((core_version() or "0.1").split(".")[:2])


def write_package(package: Package, folder: Path, registry: Registry) -> list[Path]:
    """Write the package into ``folder``, which must not exist or be empty.

    Returns:
        The files, in the order in which one reads them.

    Raises:
        ScaffoldError, NameConflict: see `Package.check`. Nothing was written.
        PathError: the folder has files, or cannot be written.
    """
    package.check(registry)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PathError(f"{folder} is there already: name a new folder by --into")
    written = []
    try:
        for path, content in package.files().items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
            written.append(file)
    except OSError as error:
        raise PathError(f"cannot write {error.filename}: {error.strerror}") from None
    return written
