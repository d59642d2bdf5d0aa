"""Paged attention in Triton. Nothing here is imported before a Triton backend is made: triton itself takes a second."""
