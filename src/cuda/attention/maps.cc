#include "cuda/attention/maps.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cuda/device/call.h"

namespace halftone::cuda {
namespace {

/// cuTensorMapEncodeTiled, from the driver that the run-time library has loaded.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  check(status, "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(ErrorCode::kDeviceError,
                "the driver has no cuTensorMapEncodeTiled, which prefill and latent attention need: use a "
                "driver of CUDA 12 or later.");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = find_encoder();
  return found;
}

CUtensorMapDataType map_type(DType dtype) {
  if (dtype_bits(dtype) == 8) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

CUtensorMapSwizzle swizzle_of(int row_bytes) {
  return row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

cuuint64_t bytes(std::int64_t n) { return static_cast<cuuint64_t>(n); }
/// Pages of a map, which has one at least.
cuuint64_t page_count(const PagedKv& cache) { return bytes(std::max<std::int64_t>(1, cache.pages.shape[0])); }
/// Of one page the stride says nothing.
cuuint64_t page_stride(const PagedKv& cache, const PageLayout& layout) {
  return bytes(cache.pages.shape[0] <= 1 ? layout.page_bytes : cache.pages.strides[0]);
}

/// Sizes, strides in bytes from the second dim on, and boxes, innermost first.
template <std::size_t kRank>
struct Boxes {
  const void* data;
  std::array<cuuint64_t, kRank> size;
  std::array<cuuint64_t, kRank - 1> stride;
  std::array<cuuint32_t, kRank> box;

  CUtensorMap map(DType dtype, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) const {
    std::array<cuuint32_t, kRank> steps;
    steps.fill(1);
    CUtensorMap map{};
    const CUresult status =
        encoder()(&map, map_type(dtype), kRank, const_cast<void*>(data), size.data(), stride.data(),
                  box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("cuTensorMapEncodeTiled failed with {}: report this as a bug.",
                              static_cast<int>(status)));
    }
    return map;
  }
};

}  // namespace

void require_tensor_maps() { (void)encoder(); }

bool has_boxes(const TensorView& t) {
  const std::int64_t vector = 16 / (dtype_bits(t.dtype) / 8);
  const auto fits = [&](int dim) {
    return t.shape[dim] <= 1 || (t.strides[dim] > 0 && t.strides[dim] % vector == 0);
  };
  return aligned_to_16(t.data) && fits(0) && fits(1);
}

CUtensorMap tensor_map(const TensorView& t, const void* somewhere, int heads, int tokens, int row_bytes) {
  const bool empty = t.numel() == 0;
  const int element = dtype_bits(t.dtype) / 8;
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(std::max<std::int64_t>(1, n)); };
  const auto stride = [&](int dim) {  // of a dim of one element it says nothing
    return static_cast<cuuint64_t>(empty || t.shape[dim] <= 1 ? 16 : t.strides[dim] * element);
  };
  const Boxes<3> boxes{empty ? somewhere : t.data,
                       {size(t.shape[2]), size(t.shape[1]), size(t.shape[0])},
                       {stride(1), stride(0)},
                       {static_cast<cuuint32_t>(row_bytes / element), static_cast<cuuint32_t>(heads),
                        static_cast<cuuint32_t>(tokens)}};
  return boxes.map(t.dtype, swizzle_of(row_bytes));
}

CUtensorMap page_map(const PagedKv& cache, const PageLayout& layout, std::int64_t offset, int dim,
                     DType dtype, int row_bytes) {
  const Boxes<5> boxes{
      static_cast<const std::uint8_t*>(cache.pages.data) + offset,
      {bytes(dim), kTileTokens, bytes(cache.spec.page_size / kTileTokens), bytes(cache.spec.kv_heads),
       page_count(cache)},
      {bytes(dim) * 2, bytes(layout.tile_bytes), bytes(layout.head_bytes), page_stride(cache, layout)},
      {static_cast<cuuint32_t>(row_bytes / 2), kTileTokens, 1, 1, 1}};
  return boxes.map(dtype, swizzle_of(row_bytes));
}

CUtensorMap code_page_map(const PagedKv& cache, const PageLayout& layout, int dim, int tiles) {
  constexpr int kDims = 64;
  const Boxes<5> boxes{
      cache.pages.data,
      {kDims, bytes(dim / kDims * kTileTokens), bytes(cache.spec.page_size / kTileTokens),
       bytes(cache.spec.kv_heads), page_count(cache)},
      {kDims, bytes(layout.tile_bytes), bytes(layout.head_bytes), page_stride(cache, layout)},
      {kDims, kTileTokens, static_cast<cuuint32_t>(tiles), 1, 1}};
  return boxes.map(DType::kUInt8, CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap latent_page_map(const PagedKv& cache, const PageLayout& layout, const void* somewhere,
                            DType dtype, int tokens, int columns) {
  constexpr int kDims = 64, kTokens = 8;
  const bool empty = cache.pages.shape[0] == 0;
  const Boxes<5> boxes{
      empty ? somewhere : cache.pages.data,
      {kDims, kTokens, bytes(cache.spec.head_dim / kDims), bytes(cache.spec.page_size / kTokens),
       page_count(cache)},
      {bytes(layout.row_bytes), 2 * kDims, bytes(kTokens * layout.row_bytes), page_stride(cache, layout)},
      {kDims, kTokens, static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(tokens / kTokens), 1}};
  return boxes.map(dtype);
}

}  // namespace halftone::cuda
