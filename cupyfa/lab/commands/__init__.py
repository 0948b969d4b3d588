"""The commands of the command line, one module per command.

A command parses its options, calls one function of the library and prints the result. Data goes to
stdout, progress and notes go to stderr.
"""

WRONG, BAD_ARGUMENTS, UNSUPPORTED, INTERRUPTED = 1, 2, 3, 130
