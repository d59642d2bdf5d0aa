"""Other engines, each run in this checkout by an interpreter of its own; nothing of ours is installed there."""
