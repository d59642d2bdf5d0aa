"""How far a backend may be from the float64 reference, by the dtype of the query. Values and outputs are about 1."""

from __future__ import annotations

import torch

# A few units in the last place of a sum of some hundred terms; half types round the inputs of each product sum once.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 5e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that two results of the same dtype agree; NaN never does."""
    torch.testing.assert_close(actual, expected, **TOLERANCES[actual.dtype])
