"""Benchmarks, each a module: `python -m benchmarks.compare`. README.md lists them."""
