"""The parts of `python -m benchmarks.gpu_check`. They need torch, Triton, Transformers and numpy, and nothing else."""
