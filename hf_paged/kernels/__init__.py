"""Attention over blocks: tensors and metadata, never requests."""
