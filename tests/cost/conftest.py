"""The command in this process, on plugins of a test's own."""

from tests.core.cli.conftest import folder, run

__all__ = ["folder", "run"]
