// What lies where in a workspace. The same function sizes it (base null) and carves it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/build.h"

namespace halftone::planning {

inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// What a workspace must hold.
struct WorkspaceParams {
  ScheduleParams schedule;
  std::int64_t partials = 0;  ///< slots
  std::int32_t v_dim = 0;
  bool plain = false;              ///< plain K and V: the schedule has cu_kv
  std::int64_t backend_bytes = 0;  ///< what the device's backend keeps beside the schedule
};

struct Workspace {
  Schedule schedule{};
  float* partial_out = nullptr;    // [partials, row_block, v_dim] not divided by the sum
  float* partial_state = nullptr;  // [partials, row_block, 2] natural maximum, sum (RowState)
  std::byte* backend = nullptr;    // [backend_bytes]
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

inline Workspace carve_workspace(const WorkspaceParams& p, std::byte* base) {
  Carver carver(base);
  Workspace w;
  const std::int64_t batch = p.schedule.batch;
  w.schedule.params = p.schedule;
  w.schedule.header = carver.take<ScheduleHeader>(1);
  w.schedule.first_step = carver.take<std::int64_t>(batch + 1);
  w.schedule.starts = carver.take<WorkerStart>(std::int64_t{p.schedule.workers} + 1);
  w.schedule.cu_q = carver.take<std::int32_t>(batch + 1);
  w.schedule.kv_lengths = carver.take<std::int32_t>(batch);
  if (p.plain) w.schedule.cu_kv = carver.take<std::int32_t>(batch + 1);
  if (p.backend_bytes > 0) w.backend = carver.take<std::byte>(p.backend_bytes);
  w.schedule_bytes = carver.bytes();
  const std::int64_t rows = saturating_product(p.partials, p.schedule.row_block);
  w.partial_out = carver.take<float>(saturating_product(rows, p.v_dim));
  w.partial_state = carver.take<float>(saturating_product(rows, 2));
  w.bytes = carver.bytes();
  return w;
}

}  // namespace halftone::planning
