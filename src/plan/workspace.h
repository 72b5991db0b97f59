// What lies where in a workspace. The same function sizes it (base null) and carves it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plan/build.h"

namespace halftone::planning {

inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// Kernels that one run() may launch, one after another, each for the requests that it fits.
inline constexpr int kMaxPasses = 2;

/// K and V that run() writes into the workspace, where the kernel of a pass reads them as plain tensors:
/// those of `heads` KV heads, then those of the next ones in their place, in as many rounds as the heads
/// need. With lists bytes alone: a place's key lies where the lists have the place.
struct Staged {
  std::int64_t keys = 0;  ///< of all requests; 0: the kernel reads K and V where they are
  std::int32_t heads = 0;
  std::int32_t rounds = 1;
  std::int64_t bytes = 0;
};

/// A kernel of a plan with the schedule of its requests, those of schedule.min_rows to max_rows packed rows.
/// With staged keys it is a round's.
struct Pass {
  ScheduleParams schedule{};
  Staged staged{};
  std::int64_t partials = 0;       ///< slots
  std::int64_t backend_bytes = 0;  ///< what the device's backend keeps beside the schedule
  std::int64_t scratch_bytes = 0;  ///< what its workers work with while run() lasts
  int kernel_index = 0;            ///< row of Backend::kernels
  int variant = 0;                 ///< what Backend::variant says of it
};

/// What a workspace must hold.
struct WorkspaceParams {
  std::array<Pass, kMaxPasses> passes{};
  int count = 1;  ///< of passes
  std::int32_t v_dim = 0;
  bool plain = false;  ///< plain K and V: the schedules have cu_kv
  bool lists = false;  ///< two lists of keys: the schedules have first_list
};

/// A pass's parts of a workspace. The partial results are in the same memory for every pass: they are merged
/// before the next pass stores any.
struct PassWorkspace {
  Schedule schedule{};
  std::byte* backend = nullptr;    // [backend_bytes]
  float* partial_out = nullptr;    // [partials, row_block, v_dim] not divided by the sum
  float* partial_state = nullptr;  // [partials, row_block, 2] natural maximum, sum (RowState)
};

struct Workspace {
  std::array<PassWorkspace, kMaxPasses> passes{};
  std::byte *staged = nullptr, *scratch = nullptr;  // the most that a pass has of it
  std::int64_t schedule_bytes = 0;
  std::int64_t bytes = 0;
};

/// Hands out aligned parts of a buffer, or only counts when the buffer is null. Sizes saturate at INT64_MAX.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t at = bytes_;
    const std::int64_t size = saturating_product(count, sizeof(T));
    if (__builtin_add_overflow(at, size, &bytes_) ||
        __builtin_add_overflow(bytes_, kWorkspaceAlignment - 1, &bytes_)) {
      bytes_ = INT64_MAX;
    }
    bytes_ = bytes_ / kWorkspaceAlignment * kWorkspaceAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

/// What a pass has for itself of the schedule part. Staged keys of plain K and V lie where the tensors have
/// them.
inline PassWorkspace carve_pass(const Pass& p, bool plain, Carver& carver) {
  PassWorkspace w;
  w.schedule.params = p.schedule;
  w.schedule.header = carver.take<ScheduleHeader>(1);
  w.schedule.first_step = carver.take<std::int64_t>(std::int64_t{p.schedule.batch} + 1);
  w.schedule.starts = carver.take<WorkerStart>(std::int64_t{p.schedule.workers} + 1);
  if (p.backend_bytes > 0) w.backend = carver.take<std::byte>(p.backend_bytes);
  if (p.staged.keys > 0 && !plain) {
    w.schedule.cu_kv = carver.take<std::int32_t>(std::int64_t{p.schedule.batch} + 1);
    w.schedule.staged = carver.take<std::int32_t>(p.schedule.batch);
  }
  return w;
}

/// The first pass's header comes first.
inline Workspace carve_workspace(const WorkspaceParams& p, std::byte* base) {
  Carver carver(base);
  Workspace w;
  std::int64_t rows = 0, staged = 0, scratch = 0;  // of partial results; bytes
  for (int i = 0; i < p.count; ++i) {
    const Pass& pass = p.passes[i];
    w.passes[i] = carve_pass(pass, p.plain, carver);
    const std::int64_t own = saturating_product(pass.partials, pass.schedule.row_block);
    rows = own > rows ? own : rows;
    staged = pass.staged.bytes > staged ? pass.staged.bytes : staged;
    scratch = pass.scratch_bytes > scratch ? pass.scratch_bytes : scratch;
  }
  const std::int64_t batch = p.passes[0].schedule.batch;
  auto* const cu_q = carver.take<std::int32_t>(batch + 1);
  auto* const kv_lengths = carver.take<std::int32_t>(batch);
  auto* const cu_kv = p.plain ? carver.take<std::int32_t>(batch + 1) : nullptr;
  auto* const first_list = p.lists ? carver.take<std::int32_t>(batch) : nullptr;
  w.schedule_bytes = carver.bytes();
  auto* const partial_out = carver.take<float>(saturating_product(rows, p.v_dim));
  auto* const partial_state = carver.take<float>(saturating_product(rows, 2));
  if (staged > 0) w.staged = carver.take<std::byte>(staged);
  if (scratch > 0) w.scratch = carver.take<std::byte>(scratch);
  w.bytes = carver.bytes();
  for (int i = 0; i < p.count; ++i) {
    PassWorkspace& pass = w.passes[i];
    pass.schedule.cu_q = cu_q, pass.schedule.kv_lengths = kv_lengths;
    pass.schedule.first_list = first_list;
    if (p.plain) pass.schedule.cu_kv = cu_kv;
    pass.partial_out = partial_out, pass.partial_state = partial_state;
  }
  return w;
}

}  // namespace halftone::planning
