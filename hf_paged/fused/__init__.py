"""Norms, gates and rotary embeddings of a packed forward on a CPU, each computed in one pass."""
