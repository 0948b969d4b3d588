"""Examples: launches of fa2; the library's plans are the expected results."""

import cupyfa
from cupyfa.lab.analysis.resources import MULTIPROCESSORS
from cupyfa.lab.exercises.exercise import Example

SM = MULTIPROCESSORS["90"]


def examples(_):
    for batch, heads, M, d, Br, Bc in (
        (4, 16, 2048, 64, 128, 32),
        (1, 2, 100, 64, 32, 32),
        (2, 3, 1000, 32, 64, 32),
        (1, 1, 50, 8, 8, 4),
        (1, 1, 1000, 8, 512, 4),
    ):
        plan = cupyfa.plan(
            kernel="fa2",
            backend="simulator",
            batch=batch,
            heads=heads,
            M=M,
            d=d,
            tiles={"Br": Br, "Bc": Bc},
        )
        (made,) = plan.launches
        blocks = made.grid[0] * made.grid[1] * made.grid[2]
        fits = 1024 * SM.shared // (made.shared_bytes + SM.reserved)
        expected = {
            "blocks": blocks,
            "threads": made.threads,
            "shared_bytes": made.shared_bytes,
            "resident": min(fits, 32 * SM.warps // made.threads, SM.blocks),
        }
        arguments = {"batch": batch, "heads": heads, "M": M, "d": d, "Br": Br, "Bc": Bc}
        yield Example(f"M={M} d={d} Br={Br} Bc={Bc}", arguments, expected, tolerance=0.0)
