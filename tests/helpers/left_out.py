"""Kernels with one statement left out, chosen at run time so that they are compiled once."""

from itertools import count

VARIABLE = "LEFT_OUT"
HEAD = f"""extern "C" char* getenv(const char*);
extern "C" int atoi(const char*);
static bool is_left_out(int statement) {{ return atoi(getenv("{VARIABLE}")) == statement; }}
"""


def optional(text, pattern):
    """The text, where what matches is left out if LEFT_OUT, as it runs, is its number, from 1."""
    number = count(1)
    return HEAD + pattern.sub(lambda found: f"if (!is_left_out({next(number)})) {found[0]}", text)
