"""Finds other processes by a word in their command line or environment."""

import os
import time
from pathlib import Path


def running_with(word):
    """Returns command lines of other processes with a word in their command line or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
                if word.encode() in line + (folder / "environ").read_bytes():
                    found.append(line.replace(b"\0", b" ").decode())
            except OSError:  # the process has ended, or belongs to another user
                continue
    return found


def left_running(word, seconds=5.0):
    """Returns the processes of ``running_with`` that do not end within some seconds."""
    ended = time.monotonic() + seconds
    while (left := running_with(word)) and time.monotonic() < ended:
        time.sleep(0.02)
    return left
