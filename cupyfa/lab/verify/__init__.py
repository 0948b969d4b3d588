"""Checks kernels on grids of cases; shrinks, stores and replays failures."""
