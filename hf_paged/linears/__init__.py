"""Products with weights for few rows: a C kernel in place of torch's, for the length of a packed forward."""
