"""What the stand-ins of one model share."""

from __future__ import annotations

import threading

import torch

from hf_paged.fused.kernels import FusedKernels


class Scope:
    """Whose forward runs, and with what.

    Args:
        kernels: the native operations.
    """

    def __init__(self, kernels: FusedKernels) -> None:
        self.kernels = kernels
        self.thread: int | None = None
        self.num_threads = 1
        self.num_calls = 0  # operations computed natively, over the life of the scope
        self.num_layers = 0  # whole layers

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Whether this is the forward that the scope is open for, and plain float32 rows without gradients."""
        return (
            self.thread == threading.get_ident()
            and not torch.is_grad_enabled()
            and all(
                type(tensor) is torch.Tensor and tensor.dtype is torch.float32 and tensor.is_cpu for tensor in tensors
            )
            and not torch.is_autocast_enabled("cpu")
        )
