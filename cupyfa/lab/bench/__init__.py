"""Timing, results, peers and tuning."""
