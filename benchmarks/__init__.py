"""Benchmarks: `python -m benchmarks`. Every figure is a ratio within one run."""
