"""The C kernels for CPUs, and how they are built."""
