#include "cpu/attention/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>

#include "cpu/append.h"
#include "cpu/attention/gather.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/layer.h"
#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "cpu/slots.h"
#include "cpu/threads.h"
#include "format/part.h"
#include "format/status.h"
#include "halftone/error.h"
#include "plan/merge.h"

namespace halftone::cpu {
namespace {

using planning::MergeItem;
using planning::RowState;
using planning::WorkItem;

static_assert(std::ranges::all_of(kAttentionKernels, [](const planning::Kernel& c) {
  return c.row_block <= kMaxRows && c.kv_tile == kBlockedTokens && c.split_tokens % kChunkTokens == 0;
}));

Side paged_side(const KvCacheSpec& spec, const PageLayout& layout, KvPart which, const StaticScale& scale) {
  const page::Part part = page::part_of(spec, layout, which);
  Side s;
  s.element = element_of(part.format);
  s.dim = part.dim;
  s.groups = part.format.static_scale() ? 1 : part.groups;
  s.stored_params = part.format.dynamic_scale();
  s.has_min = part.format.asymmetric;
  s.f32_params = part.format.scale_dtype == DType::kFloat32;
  s.group_size = s.groups > 1 ? part.format.group_size : 0;
  if (part.format.static_scale()) {
    s.static_scale = static_cast<const float*>(scale.scale.data);
    s.static_min = static_cast<const float*>(scale.min.data);
    s.static_per_head = part.format.granularity == Granularity::kHead;
  }
  s.data_offset = part.data_offset;
  s.param_offset = part.param_offset;
  s.token_bytes = std::int64_t{part.dim} * unit_bytes(s.element);
  return s;
}

Side plain_side(const TensorView& t, int dim) {
  Side s;
  s.element = t.dtype == DType::kFloat32   ? Element::kF32
              : t.dtype == DType::kFloat16 ? Element::kF16
                                           : Element::kBF16;
  s.dim = dim;
  s.plain = static_cast<const std::uint8_t*>(t.data);
  s.token_bytes = t.strides[0] * unit_bytes(s.element);
  s.head_bytes = t.strides[1] * unit_bytes(s.element);
  return s;
}

MapKey map_key(const Side& s) { return {s.element, s.dim, s.group_size}; }

/// How the operands are taken (docs/arithmetic.md).
void set_arithmetic(const AttentionProblem& problem, Layer& l) {
  l.arithmetic = problem.arithmetic;
  if (l.arithmetic == Arithmetic::k16Bit) {
    const bool bf16 = problem.q_dtype == DType::kBFloat16 && l.channels.scale == nullptr;
    l.bf16_q = bf16 && !l.rotate_k;
    l.bf16_sums_q = bf16 && l.rotate_k;
    const bool codes = l.bf16_q && !row_order(l.k.element);
    l.stored_k = codes && has_one_scale(l.k);
    l.grouped_k = codes && !l.stored_k;
    return;
  }
  const bool fp8 = l.arithmetic == Arithmetic::kFp8;
  l.stored_k = l.k.element == (fp8 ? Element::kE4M3 : Element::kI8) && l.k.groups == 1;
  l.bare_v = fp8 && l.v.static_scale != nullptr && !l.v.has_min;
  const bool f16 = problem.q_dtype == DType::kFloat16;
  l.bf16_weights = l.arithmetic == Arithmetic::kHalfInt8 && !f16;
  if (l.arithmetic == Arithmetic::kHalfInt8 && l.v.element != (f16 ? Element::kF16 : Element::kBF16)) {
    l.v_type = f16 ? DType::kFloat16 : DType::kBFloat16;
  }
}

Layer make_layer(const Plan::Impl& plan, const AttentionArgs& args) {
  const AttentionProblem& problem = plan.problem;
  Layer l;
  l.plan = &plan;
  l.args = &args;
  l.group = problem.q_heads / problem.kv_heads();
  l.head_dim = problem.head_dim();
  l.v_dim = problem.v_dim();
  if (problem.alibi) l.slopes = static_cast<const float*>(args.alibi_slopes.data);
  if (const auto* tensors = std::get_if<KvTensorViews>(&args.kv)) {
    l.paged = false;
    l.k = plain_side(tensors->k, l.head_dim);
    l.v = plain_side(tensors->v, l.v_dim);
    l.maps = &layer_maps(map_key(l.k), map_key(l.v), vector_lanes());
    set_arithmetic(problem, l);
    return l;
  }
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  const auto& cache = std::get<PagedKv>(args.kv);
  l.rotate_k = spec.rotate_k;
  l.rotate_v = spec.rotate_v;
  l.channels = channels_of(cache.k_channels);
  if (!problem.is_listed()) {
    l.table = static_cast<const std::int32_t*>(cache.block_table.data);
    l.table_stride = cache.block_table.strides[0];
  }
  if (is_gathered(problem)) return l;
  while ((1 << l.page_log2) < spec.page_size) ++l.page_log2;
  l.pages = static_cast<const std::uint8_t*>(cache.pages.data);
  l.num_pages = cache.pages.shape[0];
  l.page_stride = cache.pages.strides[0];
  l.k = paged_side(spec, plan.layout, KvPart::kK, cache.k_scale);
  l.v = paged_side(spec, plan.layout, KvPart::kV, cache.v_scale);
  l.maps = &layer_maps(map_key(l.k), map_key(l.v), vector_lanes());
  set_arithmetic(problem, l);
  return l;
}

/// A pass of one call of run(), shared by its threads.
class Runner {
 public:
  Runner(const Layer& layer, const planning::PassWorkspace& workspace)
      : plan_(*layer.plan), args_(*layer.args), workspace_(workspace), layer_(layer) {}

  int workers() const { return workspace_.schedule.header->active; }

  /// All items of one worker, or those until the call is interrupted.
  void attend(int worker, Scratch& scratch, Interruption& interruption) const {
    planning::WorkCursor cursor(workspace_.schedule, worker);
    for (WorkItem work; !ends(interruption, scratch) && cursor.next(work);) {
      const Item item = item_of(work);
      if (layer_.gather != nullptr) {
        gathered_item(layer_, item, scratch);
      } else if (item.q_len * layer_.group <= kDirectRows && layer_.arithmetic == Arithmetic::k16Bit) {
        direct_item(layer_, item, scratch);
      } else {
        blocked_item(layer_, item, scratch);
      }
      if (work.fold) fold(work.partial, item.rows, scratch, Order::kSlotFirst);
      if (work.finish) {
        finish(item, scratch);
      } else {
        store(work.partial, item.rows, scratch);
      }
    }
  }

  /// The unit that `worker` began and others continued, if any. After all workers' attend().
  void merge(int worker, Scratch& scratch) const {
    MergeItem work;
    if (!planning::merge_item(workspace_.schedule, worker, work)) return;
    WorkItem whole{};
    whole.request = work.request;
    whole.kv_head = work.kv_head;
    whole.row_begin = work.row_begin;
    whole.row_end = work.row_end;
    const Item item = item_of(whole);
    load(work.slot, item.rows, scratch);
    for (int part = 1; part < work.parts; ++part) {
      fold(work.slot + part, item.rows, scratch, Order::kSlotSecond);
    }
    finish(item, scratch);
  }

 private:
  enum class Order : bool { kSlotFirst, kSlotSecond };

  /// A signal handler may make a call of its own here, in this thread's scratch.
  static bool ends(Interruption& interruption, Scratch& scratch) {
    const bool excluded = scratch.excluded;
    const bool ends = interruption.poll();
    scratch.excluded = excluded;
    return ends;
  }

  Item item_of(const WorkItem& w) const {
    const planning::Schedule& s = workspace_.schedule;
    return {w.request,
            w.kv_head,
            w.row_begin,
            w.row_end - w.row_begin,
            w.kv_begin,
            w.kv_end,
            planning::q_length(s, w.request),
            s.kv_lengths[w.request],
            s.cu_q[w.request],
            s.cu_kv == nullptr ? 0 : s.cu_kv[w.request]};
  }

  std::size_t slot_row(int slot) const {
    return static_cast<std::size_t>(slot) * static_cast<std::size_t>(workspace_.schedule.params.row_block);
  }
  float* slot_out(int slot) const {
    return workspace_.partial_out + slot_row(slot) * static_cast<std::size_t>(layer_.v_dim);
  }
  float* slot_state(int slot) const { return workspace_.partial_state + slot_row(slot) * 2; }

  void store(int slot, int rows, const Scratch& s) const {
    std::copy_n(s.out, rows * layer_.v_dim, slot_out(slot));
    float* state = slot_state(slot);
    for (int r = 0; r < rows; ++r) {
      state[2 * r] = s.max[r];
      state[2 * r + 1] = s.sum[r];
    }
  }

  void load(int slot, int rows, Scratch& s) const {
    std::copy_n(slot_out(slot), rows * layer_.v_dim, s.out);
    const float* state = slot_state(slot);
    for (int r = 0; r < rows; ++r) {
      s.max[r] = state[2 * r];
      s.sum[r] = state[2 * r + 1];
    }
  }

  /// scratch = merge(slot, scratch) or merge(scratch, slot).
  void fold(int slot, int rows, Scratch& s, Order order) const {
    const float* state = slot_state(slot);
    for (int r = 0; r < rows; ++r) {
      const RowState held{s.max[r], s.sum[r]}, stored{state[2 * r], state[2 * r + 1]};
      const bool slot_first = order == Order::kSlotFirst;
      const planning::MergedState m =
          slot_first ? planning::merge_states(stored, held) : planning::merge_states(held, stored);
      float* out = s.out + r * layer_.v_dim;
      const float* other = slot_out(slot) + r * layer_.v_dim;
      const float weight = slot_first ? m.weight_b : m.weight_a;
      const float other_weight = slot_first ? m.weight_a : m.weight_b;
      for (int d = 0; d < layer_.v_dim; ++d) out[d] = out[d] * weight + other[d] * other_weight;
      s.max[r] = m.state.max;
      s.sum[r] = m.state.sum;
    }
  }

  /// What the offset of K adds to every logit of a query, which its state lacks.
  float offset_logit(std::int64_t token, int head, Scratch& s) const {
    const TensorView& q = args_.q;
    load_row(q.dtype, row_at(q, token, head), layer_.head_dim, s.row);
    const float* offset = layer_.channels.offset + std::int64_t{head / layer_.group} * layer_.head_dim;
    double sum = 0;
    for (int d = 0; d < layer_.head_dim; ++d) sum += static_cast<double>(s.row[d]) * offset[d];
    return static_cast<float>(plan_.scale * sum);
  }

  void finish(const Item& item, Scratch& s) const {
    const AttentionProblem& problem = plan_.problem;
    const bool adds_offset = layer_.channels.offset != nullptr && (problem.lse || problem.sinks);
    for (int r = 0; r < item.rows; ++r) {
      const int packed = item.row_begin + r;
      const std::int64_t token = item.q_first + packed / layer_.group;
      const int head = item.kv_head * layer_.group + packed % layer_.group;
      const bool has_keys = s.max[r] != -std::numeric_limits<float>::infinity();  // else q may be anything
      const float offset = adds_offset && has_keys ? offset_logit(token, head, s) : 0.0f;
      const RowState state{s.max[r] + offset, s.sum[r]};
      const planning::FinishedState done =
          problem.sinks ? planning::finish_state(state, static_cast<const float*>(args_.sinks.data)[head])
                        : planning::finish_state(state);
      float* out = s.out + r * layer_.v_dim;
      for (int d = 0; d < layer_.v_dim; ++d) out[d] = planning::is_empty(state) ? 0.0f : out[d] * done.scale;
      if (layer_.rotate_v) rotate_row(out, layer_.v_dim);
      store_row(args_.out.dtype, out, layer_.v_dim, row_at(args_.out, token, head));
      if (!problem.lse) continue;
      const TensorView& lse = args_.lse;
      static_cast<float*>(lse.data)[token * lse.strides[0] + head * lse.strides[1]] = done.lse;
    }
  }

  const Plan::Impl& plan_;
  const AttentionArgs& args_;
  const planning::PassWorkspace& workspace_;
  const Layer& layer_;
};

/// This thread's scratch, kept for its next call.
Scratch& thread_scratch() {
  thread_local const auto scratch = std::make_unique_for_overwrite<Scratch>();
  scratch->excluded = false;
  return *scratch;
}

/// Calls `body(i, scratch)` for i in [0, count) on up to `count` threads, then again with `second` unless
/// interrupted.
template <class First, class Second>
void in_parallel(int count, const First& first, const Second& second, const Interruption& interruption,
                 bool& excluded) {
  std::exception_ptr failure;
  std::mutex mutex;
  const int threads = region_threads(count);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch* scratch = nullptr;
    try {
      scratch = &thread_scratch();
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
#pragma omp barrier
    if (failure == nullptr) {  // nobody starts unless all can
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < count; ++i) first(i, *scratch);
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < count; ++i) {
        if (!interruption.stopped()) second(i, *scratch);
      }
      if (scratch->excluded) {
        const std::lock_guard lock(mutex);
        excluded = true;
      }
    }
  }
  if (failure == nullptr) return;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("run needs {:.1f} MiB of memory per thread, but it is not free: use fewer OpenMP "
                            "threads.",
                            sizeof(Scratch) / 1048576.0));
  }
}

}  // namespace

void run(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace) {
  const planning::Workspace parts = planning::carve_workspace(plan, workspace);
  Layer layer = make_layer(plan, args);
  Gather gather;
  if (is_gathered(plan.problem)) {
    gather = make_gather(plan, args, parts.passes[0].schedule);
    layer.gather = &gather;
  }
  if (plan.problem.appends) append_step(args, parts.passes[0].schedule);
  bool excluded = false;
  Interruption interruption;
  for (std::size_t i = 0; i < plan.passes().size(); ++i) {
    const Runner runner(layer, parts.passes[i]);
    if (runner.workers() == 0) continue;
    in_parallel(
        runner.workers(), [&](int worker, Scratch& scratch) { runner.attend(worker, scratch, interruption); },
        [&](int worker, Scratch& scratch) { runner.merge(worker, scratch); }, interruption, excluded);
    interruption.check();
  }
  if (excluded && args.status.present()) {
    *static_cast<std::int32_t*>(args.status.data) |= kStatusBadPage;
  }
  if (args.append.advance) {
    const planning::Schedule& schedule = parts.passes[0].schedule;
    auto* const lengths = static_cast<std::int32_t*>(std::get<PagedKv>(args.kv).lengths.data);
    std::copy_n(schedule.kv_lengths, plan.problem.batch, lengths);
  }
}

}  // namespace halftone::cpu
