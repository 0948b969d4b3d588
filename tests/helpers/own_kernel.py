"""A user's kernel: a .cu file and the script with its record, in a folder outside the project."""

from pathlib import Path

MINE = Path(__file__).with_name("mine.cu").read_text()

SCRIPT = """\
from pathlib import Path

from cupyfa import Kernel, Launch, cdiv

mine = Kernel(
    name="mine",
    adds="a kernel of my own",
    launches=(
        Launch(
            "mine",
            args="Q K V O M N scale",
            grid=lambda p, c: (cdiv(p.M, 64), p.heads, p.batch),
            threads=lambda p, c: 64,
        ),
    ),
    features=("strides", "dv"),
    folder=Path(__file__).parent,
)
"""


def write(folder, kernel=MINE, script=SCRIPT, *, cu=None, py=None):
    """Writes mine.cu and script.py to a folder and returns the script.

    ``cu`` and ``py`` are replacements (old, new) to make in these files.
    """
    for name, text, change in (("mine.cu", kernel, cu), ("script.py", script, py)):
        if change is not None:
            assert change[0] in text, "the change must change something"
            text = text.replace(*change)
        (folder / name).write_text(text)
    return folder / "script.py"
