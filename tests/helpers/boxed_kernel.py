"""A kernel that accesses its arrays through tensor maps, for tests of the host code."""

from pathlib import Path

from cupyfa import Kernel, Launch, cdiv

BOXED = Path(__file__).with_name("by_boxes.cu").read_text()


def _columns(p, c):
    return cdiv(max(p.d, p.dv), 64) * 64


def write(folder, text=BOXED):
    """Writes the kernel's source file to `folder` and returns its record."""
    (Path(folder) / "by_boxes.cu").write_text(text)
    return Kernel(
        name="by_boxes",
        adds="tiles copied by boxes",
        launches=(
            Launch(
                "by_boxes",
                args="Q.map K.map V.map O.map M N heads batch group scale",
                grid=lambda p, c: min(cdiv(p.M, c.Br) * p.heads * p.batch, c.multiprocessors),
                threads=lambda p, c: 128,
                shared=lambda p, c: 2 * _columns(p, c) * (c.Br + 2 * c.Bc) + 1024,
                constants={"columns": _columns},
                boxes={
                    "Q": lambda p, c: c.Br,
                    "K": lambda p, c: c.Bc,
                    "V": lambda p, c: c.Bc,
                    "O": lambda p, c: c.Br,
                },
            ),
        ),
        tiles=({"Br": 16, "Bc": 8},),
        dtypes=("float16", "bfloat16"),
        features=("gqa", "strides", "dv"),
        arch="90a",
        largest_d=128,
        folder=folder,
    )
