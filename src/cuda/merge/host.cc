#include "cuda/merge/host.h"

#include "cuda/device/call.h"
#include "cuda/merge/params.h"
#include "plan/fail.h"

namespace halftone::cuda {
namespace {

MergeValues merge_values(const TensorView& t) { return {t.data, t.strides[0], t.strides[1], t.dtype}; }

MergeLse merge_lse(const TensorView& t) { return {static_cast<float*>(t.data), t.strides[0], t.strides[1]}; }

}  // namespace

void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse, Stream stream) {
  if (parts.size() > kMaxMergeParts) {
    planning::fail(ErrorCode::kUnsupported,
                   "parts has {} views, but the CUDA backend merges at most {} at once: merge groups of them "
                   "first.",
                   parts.size(), kMaxMergeParts);
  }
  LargestMerge p{};
  p.shape = {out.shape[0], out.shape[1], out.shape[2], out.shape[2] % 8 == 0 && rows_aligned(out)};
  p.out = merge_values(out);
  p.lse = merge_lse(lse);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    p.parts[p.count++] = {merge_values(parts[i]), merge_lse(part_lse[i])};
    p.shape.aligned = p.shape.aligned && rows_aligned(parts[i]);
  }
  const DeviceScope scope(out.device.index);
  check(launch_merge(p, stream), "merge");
}

}  // namespace halftone::cuda
