"""Benchmarks: `python -m benchmarks.mixed`, `python -m benchmarks.import_time`, `python -m benchmarks.table`."""
