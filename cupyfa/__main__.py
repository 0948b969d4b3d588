"""Runs cli.py, for ``python -m cupyfa`` and for the installed command."""

import runpy

from cupyfa.planner.source import ROOT


def main() -> None:
    """Runs the command-line program."""
    runpy.run_path(str(ROOT / "cli.py"))["main"](prog_name="cupyfa")


if __name__ == "__main__":
    main()
