"""Where K and V live: blocks, tables, prefixes, and the tensors themselves."""
