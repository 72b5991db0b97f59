// The projections before the layers of a chain, each with weights of its own.
#pragma once

#include "cli/cuda/device.h"

namespace halftone::cli::cuda {

/// Square products of `width` channels that bring `rows` tokens from some activations to others.
class Projections {
 public:
  /// Random weights and activations; what comes out is about as large as what goes in. Throws
  /// ResourceExhausted where the device has no room.
  Projections(int width, int rows, int layers);

  /// Enqueues that of a layer; `out` [rows, width] in bf16.
  void enqueue(int layer, void* out, Stream stream) const;

 private:
  int width_, rows_;
  DeviceBuffer weights_, x_;
};

}  // namespace halftone::cli::cuda
