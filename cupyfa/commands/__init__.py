"""The commands of the command line, a module each; cli.py gathers them.

Each parses, calls one function of the library, and prints. Data goes to stdout; progress and notes
go to stderr.
"""

WRONG, BAD_ARGUMENTS, UNSUPPORTED, INTERRUPTED = 1, 2, 3, 130
