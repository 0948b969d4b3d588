"""Benchmarks: timing, comparison with other libraries, and tuning."""
