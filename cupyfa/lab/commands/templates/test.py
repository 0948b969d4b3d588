"""Tests of NAME: on a GPU, or in the simulator if there is none."""

from pathlib import Path

import cupyfa

KERNEL = f"{Path(__file__).with_name('NAME.py')}:NAME"


def test_random_problems():
    """Checks sizes near multiples of tile sizes, with each supported dtype, option and layout."""
    done = cupyfa.check(KERNEL, samples=8)
    commands = [failure.command for failure in done.failures]  # each command repeats one failure
    assert done.right == done.runs > 0, "\n".join([str(done), *commands])
