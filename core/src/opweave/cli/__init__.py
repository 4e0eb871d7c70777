"""The ``opweave`` command. The only place that imports typer."""

__all__ = ["main"]


def main() -> None:
    """Run the command that ``sys.argv`` names. Exits with 0, 1 for an error, 2 for a wrong call."""
    from opweave.cli.app import main as run  # processes that ask plugins (`probe`) need nothing of it

    run()
