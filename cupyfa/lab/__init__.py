"""The workshop: check, bench, tune, analyse, report, and the command line."""
