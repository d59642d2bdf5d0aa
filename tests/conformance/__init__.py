"""Transformers' own tests as a judge: `python -m tests.conformance CHECKOUT` runs them with "paged" as the default."""
