#include <algorithm>

#include "cuda/schedule/kernel.h"
#include "cuda/schedule/params.h"
#include "cuda/schedule/small_items.h"

namespace halftone::cuda {
namespace {

__global__ void __launch_bounds__(kScheduleThreads, 1)
    build(const __grid_constant__ ScheduleBuildParams params) {
  const PassBuildParams& pass = params.passes[blockIdx.x];
  if (pass.schedule.params.queue_tokens > 0) {
    build_queue_block(params, pass);
  } else {
    build_schedule_block(params, pass);
  }
}

/// kSimple: for one pass with neither lists nor a mask.
template <bool kSimple>
__global__ void __launch_bounds__(kScheduleThreads, 1)
    build_small(const __grid_constant__ small::Params params) {
  __shared__ small::Shared shared;
  const unsigned pass = kSimple ? 0 : blockIdx.x;
  small::build_block<kSimple>(params.build, params.build.passes[pass], params.divisors[pass], shared);
}

bool is_small(const ScheduleBuildParams& p, const planning::Schedule& s) {
  const planning::ScheduleParams& shape = s.params;
  if (shape.queue_tokens > 0 || s.staged != nullptr || p.cu_kv != nullptr) return false;
  if (shape.batch > kSmallBatch || shape.workers > kSmallWorkers) return false;
  const std::int64_t positions = planning::max_positions(shape);
  const std::int64_t tokens = std::max(shape.max_kv_len, shape.max_q_len);
  return planning::saturating_product(positions, std::int64_t{shape.workers} + 1) <= INT32_MAX &&
         tokens * shape.batch <= INT32_MAX;
}

/// Threads for a request or a worker each, and for the items that the lists may have, up to kListThreads.
unsigned small_threads(const ScheduleBuildParams& p) {
  constexpr std::int64_t kListThreads = 512;
  std::int64_t most = 1;
  for (int i = 0; i < p.count; ++i) {
    const planning::ScheduleParams& shape = p.passes[i].schedule.params;
    const std::int64_t items = shape.absolute ? kListThreads : planning::max_units(shape) + shape.workers - 1;
    most = std::max(
        {most, std::int64_t{shape.batch}, std::int64_t{shape.workers} + 1, std::min(items, kListThreads)});
  }
  return static_cast<unsigned>(std::min<std::int64_t>(kScheduleThreads, (most + 31) / 32 * 32));
}

/// Of a request in one row block, the last query sees all keys, whatever window_right.
void drop_idle_window(planning::ScheduleParams& shape) {
  if (planning::max_served_rows(shape) <= shape.row_block) shape.window_right = -1;
}

small::Divisors divisors_of(const planning::ScheduleParams& shape) {
  const auto divisor = [](std::int32_t by) { return small::Divisor(static_cast<std::uint32_t>(by)); };
  return {divisor(shape.group), divisor(shape.row_block), divisor(shape.kv_heads)};
}

}  // namespace

bool is_small_batch(const ScheduleBuildParams& params) {
  return std::all_of(params.passes, params.passes + params.count,
                     [&](const PassBuildParams& pass) { return is_small(params, pass.schedule); });
}

int launch_schedule(const ScheduleBuildParams& params, void* stream) {
  const auto launch = [&](auto* kernel, unsigned threads, const void* argument) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(params.count), dim3(threads),
                            const_cast<void**>(&argument), 0, static_cast<cudaStream_t>(stream));
  };
  if (!is_small_batch(params)) return launch(&build, kScheduleThreads, &params);
  small::Params p{params, {}};
  for (int i = 0; i < params.count; ++i) {
    planning::ScheduleParams& shape = p.build.passes[i].schedule.params;
    p.divisors[i] = divisors_of(shape);
    drop_idle_window(shape);
  }
  const bool simple =
      params.count == 1 && params.top_k == 0 && !planning::has_mask(p.build.passes[0].schedule.params);
  return launch(simple ? &build_small<true> : &build_small<false>, small_threads(params), &p);
}

}  // namespace halftone::cuda
