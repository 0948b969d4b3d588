"""Tests of NAME: on a GPU, or in the simulator if there is none."""

from pathlib import Path

import cupyfa

KERNEL = f"{Path(__file__).with_name('NAME.py')}:NAME"


def test_random_problems():
    """Sizes near the kernel's tiles; each dtype, option and layout that it can do."""
    done = cupyfa.check(KERNEL, samples=8)
    commands = [failure.command for failure in done.failures]  # each repeats a failure
    assert done.right == done.runs > 0, "\n".join([str(done), *commands])
