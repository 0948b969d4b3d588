"""Score and mask expressions: parsing, tracing and evaluation; dropout."""
