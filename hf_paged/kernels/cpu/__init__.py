"""Paged attention on a CPU in plain C, compiled on the machine that runs it."""
