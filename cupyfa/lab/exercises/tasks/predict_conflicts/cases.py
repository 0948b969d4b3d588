"""Examples: a warp's loads from rows of 64 and 65 floats, broadcasts, and strided loads."""

from cupyfa.lab.exercises.exercise import Example

LANES = range(32)
FIVES = [4 * (5 + lane % 2 + 32 * (lane // 2 % 5)) for lane in LANES[2:]]


def examples(_):
    for name, addresses, cycles in (
        ("neighbouring floats", [4 * lane for lane in LANES], 1),
        ("column 0 of rows of 64 floats", [4 * 64 * lane for lane in LANES], 32),
        ("column 0 of rows of 65 floats", [4 * 65 * lane for lane in LANES], 1),
        ("every lane the same float", [400] * 32, 1),
        ("every second float", [8 * lane for lane in LANES], 2),
        ("pairs of lanes share a float, rows of 64", [4 * 64 * (lane // 2) for lane in LANES], 16),
        ("16-bit numbers, neighbouring", [2 * lane for lane in LANES], 1),
        ("16-bit numbers, every second", [4 * lane + 2 for lane in LANES], 1),
        ("16-bit numbers, rows of 128", [256 * x + 2 * (x % 2) for x in LANES], 32),
        ("three words of bank 0, others apart", [4 * x for x in (*range(30), 32, 64)], 3),
        ("two halves of rows, no bank twice", [4 * (x + x // 16 * 64) for x in LANES], 1),
        ("two words of bank 0, five of two others", [0, 128, *FIVES], 5),
        ("two words of bank 0, others apart", [0, 128, *(4 * lane for lane in LANES[2:])], 2),
    ):
        yield Example(name, {"addresses": addresses}, {"cycles": cycles}, tolerance=0.0)
