"""Whether the fused operations can be built where the tests run."""

from __future__ import annotations

from hf_paged.fused.kernels import FusedKernels
from tests.linears.built import needs

needs_fused = needs(FusedKernels, "the fused operations")
