"""What the host does in a step, timed by `pytest tests/micro --benchmark-enable`; else each runs once."""
