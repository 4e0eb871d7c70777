"""``python -m opweave`` is the ``opweave`` command."""

from opweave.cli import main

if __name__ == "__main__":
    main()
