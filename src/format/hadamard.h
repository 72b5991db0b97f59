// The block Hadamard rotation of K (and Q) and of V: spreads outlier channels over all dims before
// quantisation (QuaRot, arXiv:2404.00456). Orthonormal, symmetric and its own inverse, so q.k is unchanged
// when both are rotated.
#pragma once

#include "format/codec.h"
#include "format/host_device.h"

namespace halftone::hadamard {

/// Size of the diagonal blocks: the largest power of two that divides `dim` (80 = 5 x 16, 96 = 3 x 32, 192 =
/// 3 x 64).
HT_HOST_DEVICE constexpr int block_size(int dim) { return dim & -dim; }

/// 1 / sqrt(block), rounded to fp32.
HT_HOST_DEVICE constexpr float factor(int block) {
  switch (block) {
    case 16:
      return 0.25f;
    case 32:
      return 0.17677669529663688110f;
    case 64:
      return 0.125f;
    case 128:
      return 0.08838834764831844055f;
    case 256:
      return 0.0625f;
    default:
      return 0.04419417382415922028f;  // 512
  }
}

/// Rotates `x` [dim] in place. The order of operations is part of the definition: stages h = 1, 2, 4, ...,
/// block / 2 replace each pair (a, b) = (x[i], x[i + h]), bit h of i clear, by (a + b, a - b); a last
/// multiplication by factor(block) normalises. A device that spreads x over lanes gets the same bits by
/// following the stages.
HT_HOST_DEVICE inline void rotate(float* x, int dim) {
  const int block = block_size(dim);
  for (int h = 1; h < block; h *= 2) {
    for (int start = 0; start < dim; start += 2 * h) {
      for (int i = start; i < start + h; ++i) {
        const float a = x[i], b = x[i + h];
        x[i] = codec::ht_add(a, b);
        x[i + h] = codec::ht_sub(a, b);
      }
    }
  }
  for (int i = 0; i < dim; ++i) x[i] = codec::ht_mul(x[i], factor(block));
}

}  // namespace halftone::hadamard
