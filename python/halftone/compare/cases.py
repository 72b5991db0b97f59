"""What is measured: shapes, and the inputs made for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Case:
    """Attention of ``batch`` requests alike: ``q_len`` queries over ``context`` keys each, causal."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.context} keys, {self.q_heads}/{self.kv_heads} heads, dim {self.head_dim}" + (
            f", {self.q_len} queries" if self.q_len > 1 else ""
        )

    @property
    def tokens(self) -> int:
        """Keys of all requests."""
        return self.batch * self.context

    @property
    def flops(self) -> float:
        """Of both products, counting only keys that a query sees."""
        seen = self.q_len * self.context - self.q_len * (self.q_len - 1) / 2
        return 4.0 * self.batch * self.q_heads * self.head_dim * seen


SHAPES = {
    # The shapes of the published decode comparisons, and a grouped-query one.
    "cuda": [Case(b, 1, 8, 1, 128, 8192) for b in (32, 64, 128, 256, 512)]
    + [Case(64, 1, 32, 8, 128, 8192), Case(64, 3, 16, 1, 128, 8192)],
    "cpu": [Case(1, 1, 32, 8, 128, 4096), Case(4, 1, 32, 8, 128, 2048), Case(16, 1, 8, 1, 128, 4096)],
}
SMOKE = {
    "cuda": [Case(2, 1, 8, 1, 128, 512)],
    "cpu": [Case(2, 1, 8, 2, 128, 128)],
}


@dataclass(frozen=True)
class Inputs:
    """q [batch, q_len, q_heads, dim], k and v [batch, context, kv_heads, dim]: bf16 torch tensors on CUDA, f32 NumPy
    arrays on the CPU."""

    case: Case
    device: str
    q: Any
    k: Any
    v: Any

    def request(self, index: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """q, k and v of one request as f32 NumPy arrays."""
        parts = (self.q[index], self.k[index], self.v[index])
        q, k, v = (p if isinstance(p, np.ndarray) else p.float().cpu().numpy() for p in parts)
        return q, k, v


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Normal values; K has a few outlier channels, as the K of trained models has."""
    q_shape = (case.batch, case.q_len, case.q_heads, case.head_dim)
    kv_shape = (case.batch, case.context, case.kv_heads, case.head_dim)
    q: Any
    k: Any
    v: Any
    outliers = [3, case.head_dim // 2 + 5]
    if device == "cpu":
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in (q_shape, kv_shape, kv_shape))
    else:
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = dict(device=device, dtype=torch.bfloat16, generator=generator)
        q, k, v = (torch.randn(s, **options) for s in (q_shape, kv_shape, kv_shape))
    k[..., outliers] *= 4
    return Inputs(case, device, q, k, v)
