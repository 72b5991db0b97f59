// append on the GPU to a copy of a cache on the host.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/cuda/device_problem.h"

namespace halftone::testing {

struct DevicePages {
  Tensor pages;
  std::int32_t status;
};

/// The cache's pages after the same append on the GPU.
inline DevicePages append_on_device(const Cache& cache, AppendArgs args) {
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  args.status = status.view();
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const AppendArgs device_args = uploads.add(args);
  append(device, device_args);
  check_cuda(cudaDeviceSynchronize());
  Tensor pages = cache.pages.clone();
  download(device.pages, pages);
  download(device_args.status, status);
  EXPECT_TRUE(uploads.guards_intact());
  return {std::move(pages), status.as<std::int32_t>()[0]};
}

}  // namespace halftone::testing
