#include "cuda/append/host.h"

#include <cmath>
#include <variant>

#include "cuda/append/params.h"
#include "cuda/device/call.h"
#include "format/channels.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/status.h"

namespace halftone::cuda {
namespace {

/// `input`: K or V, of which the span is a piece.
AppendPart append_part(const page::Part& part, const TensorView& input, const StaticScale& scale) {
  AppendPart a{};
  a.part = part;
  const int first = part.first_in(part.which);
  if (input.data != nullptr) {
    a.input = static_cast<const std::byte*>(input.data) + first * (dtype_bits(input.dtype) / 8);
  }
  a.token_stride = input.strides[0];
  a.head_stride = input.strides[1];
  a.input_type = input.dtype;
  a.aligned = rows_aligned(input);
  a.static_scale = pointer<float>(scale.scale);
  a.static_min = pointer<float>(scale.min);
  a.static_stride = a.part.format.granularity == Granularity::kHead ? 1 : 0;
  const bool limited = part.v_first >= 0 && a.part.groups > 0 && a.part.format.scale_dtype == DType::kFloat16;
  // A rotated value is at most the norm of its block.
  const float spread =
      a.part.rotated ? std::sqrt(static_cast<float>(hadamard::block_size(a.part.dim))) : 1.0F;
  a.largest = limited ? kMaxScaledV / spread : codec::kMaxInput;
  a.segment_log2 = a.part.dim <= 64 ? 3 : a.part.dim <= 128 ? 4 : 5;
  a.group_log2 = a.part.groups > 1     ? log2_of(a.part.format.group_size / kChunk)
                 : is_wide(a.part.dim) ? a.segment_log2 + 1
                                       : a.segment_log2;
  if (a.part.groups > 0) {
    const auto first = a.part.scale_offset(0, 0);
    a.scale_first = static_cast<std::int32_t>(first);
    a.scale_token = static_cast<std::int32_t>(a.part.scale_offset(1, 0) - first);
    a.scale_group = static_cast<std::int32_t>(a.part.scale_offset(0, 1) - first);
    a.min_away = static_cast<std::int32_t>(a.part.min_offset(0, 0) - first);
  }
  const int bits = dtype_bits(a.part.format.dtype);
  for (int block = 0; part.order == KvOrder::kFragments && block * 32 < a.part.dim; ++block) {
    const int strings = part.which == KvPart::kK ? 64 : 32, length = a.part.dim * bits * 2 / strings;
    const int pos = block * 64 * bits / strings;
    const int first = page::chunked(0, strings, length, pos);
    a.block_first[block] = static_cast<std::int32_t>(a.part.data_offset) + first;
    a.block_step[block] = page::chunked(1, strings, length, pos) - first;
  }
  return a;
}

/// Everything but how many tokens requests have.
AppendParams append_params(const PagedKv& cache, const AppendArgs& args) {
  const PageLayout layout = page_layout(cache.spec);
  AppendParams p{};
  int count = 0;
  for (const page::Part& part : page::parts_of(cache.spec, layout)) {
    const bool of_k = part.which == KvPart::kK;
    AppendPart& a = p.parts[count++];
    a = append_part(part, of_k ? args.k : args.v, of_k ? cache.k_scale : cache.v_scale);
    if (of_k) a.channels = channels_of(cache.k_channels);
  }
  p.tile_bytes = layout.tile_bytes;
  p.head_bytes = layout.head_bytes;
  p.pages = static_cast<std::uint8_t*>(cache.pages.data);
  p.page_stride = cache.pages.strides[0];
  p.num_pages = cache.pages.shape[0];
  p.page_log2 = log2_of(cache.spec.page_size);
  p.kv_heads = cache.spec.kv_heads;
  p.tokens = args.k.shape[0];
  p.slot_mapping = pointer<std::int64_t>(args.slot_mapping);
  p.block_table = pointer<std::int32_t>(cache.block_table);
  p.table_stride = cache.block_table.strides[0];
  p.table_width = cache.block_table.shape[1];
  p.pairing = args.rope.pairing;
  if (p.pairing != RopePairing::kNone) {
    p.rope_half = static_cast<std::int32_t>(args.rope.cos.shape[1]);
    p.rope_rows = args.rope.cos.shape[0];
    p.cos = pointer<float>(args.rope.cos);
    p.sin = pointer<float>(args.rope.sin);
    p.positions = pointer<std::int32_t>(args.rope.positions);
    p.rope_aligned = aligned_to_16(p.cos) && aligned_to_16(p.sin) && p.rope_half % 4 == 0;
  }
  p.status = static_cast<std::int32_t*>(args.status.data);
  return p;
}

void launch(const PagedKv& cache, const AppendParams& p, Stream stream) {
  check(cache.spec.is_latent() ? launch_append_records(p, stream) : launch_append(p, stream), "append");
}

}  // namespace

void append(const PagedKv& cache, const AppendArgs& args, Stream stream) {
  AppendParams p = append_params(cache, args);
  if (p.slot_mapping == nullptr) {
    p.cu_seqlens = pointer<std::int32_t>(args.cu_seqlens);
    p.lengths = pointer<std::int32_t>(cache.lengths);
    p.batch = static_cast<std::int32_t>(cache.lengths.shape[0]);
  }
  p.next_knows = p.settled = args.cache_settled;
  const DeviceScope scope(cache.pages.device.index);
  launch(cache, p, stream);
  if (args.advance) {
    check(launch_advance(static_cast<std::int32_t*>(cache.lengths.data), p.cu_seqlens, p.batch,
                         args.cache_settled, stream),
          "append");
  }
}

AppendParams step_params(const AttentionArgs& args, const planning::Schedule& schedule) {
  const NewTokens& tokens = args.append;
  AppendParams p = append_params(std::get<PagedKv>(args.kv), {.k = tokens.k,
                                                              .v = tokens.v,
                                                              .slot_mapping = tokens.slot_mapping,
                                                              .rope = tokens.rope,
                                                              .status = args.status});
  p.cu_seqlens = schedule.cu_q;
  p.lengths = schedule.kv_lengths;
  p.counted = 1;
  p.batch = schedule.params.batch;
  return p;
}

StepParams pass_step(const AttentionProblem& problem, const AttentionArgs& args,
                     const planning::Schedule& schedule, std::size_t index, bool fused) {
  StepParams p{};
  p.new_tokens_late = problem.appends || args.new_tokens_late;
  p.appends = fused;
  if (fused) p.append = step_params(args, schedule);
  if (problem.appends && index == 0 && args.append.advance) {
    p.lengths = static_cast<std::int32_t*>(std::get<PagedKv>(args.kv).lengths.data);
  }
  return p;
}

void append_step(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream) {
  const auto& cache = std::get<PagedKv>(args.kv);
  const DeviceScope scope(cache.pages.device.index);
  AppendParams p = step_params(args, schedule);
  p.next_knows = true;
  p.settled = args.cache_settled && p.slot_mapping == nullptr;  // which may be as new as K and V
  launch(cache, p, stream);
}

void settle_lengths(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream) {
  const auto& cache = std::get<PagedKv>(args.kv);
  const DeviceScope scope(cache.pages.device.index);
  check(launch_settle(static_cast<std::int32_t*>(cache.lengths.data), schedule.kv_lengths, schedule.cu_q,
                      schedule.params.batch, stream),
        "run");
}

}  // namespace halftone::cuda
