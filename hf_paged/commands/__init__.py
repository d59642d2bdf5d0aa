"""What `hf-paged` can do: one module a command, and the parts that they share."""
