#include "cuda/prefill/host.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <variant>

#include "cuda/attention/maps.h"
#include "cuda/attention/workspace.h"
#include "cuda/dequantize/host.h"
#include "cuda/device/call.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/estimate.h"
#include "cuda/prefill/kernels.h"
#include "cuda/prefill/params.h"
#include "cuda/prefill/stage.h"
#include "cuda/prefill/stage_tensors.h"
#include "cuda/prefill/stage_values.h"

namespace halftone::cuda {
namespace {

/// What V of a cache is as values of 16 bits. With a scale per head at most it fits into f16: beside stored
/// scales of f16 it does, up to what AppendArgs::status reports.
DType value_dtype(const KvFormat& v) {
  if (dtype_bits(v.dtype) == 16) return v.dtype;
  return v.static_scale() || v.scale_dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

/// The type of V beside staged K; kUInt8: not served. V in E4M3 is the cache's own, with a static scale, or
/// becomes such with one for all keys of a request and head: one that changed from token to token would have
/// to go into P, whose range is small.
DType staged_dtype(const AttentionProblem& problem) {
  constexpr DType kNone = DType::kUInt8;
  if (problem.is_latent() || dtype_bits(problem.q_dtype) != 16) return kNone;
  const bool fp8 = problem.arithmetic == Arithmetic::kFp8;
  if (const auto* const tensors = std::get_if<KvTensors>(&problem.kv)) {
    return dtype_bits(tensors->dtype) != 16 ? kNone : fp8 ? DType::kFloat8E4M3 : tensors->dtype;
  }
  return fp8 ? DType::kFloat8E4M3 : value_dtype(std::get<KvCacheSpec>(problem.kv).v_format);
}

/// The type of V and of the operands of P V; kUInt8: the kernel cannot read them.
DType operand_dtype(const AttentionProblem& problem) {
  const PrefillKeys keys = keys_of(problem);
  if (keys == PrefillKeys::kPacked) return DType::kFloat16;
  if (keys != PrefillKeys::kGiven) return staged_dtype(problem);
  const auto* const tensors = std::get_if<KvTensors>(&problem.kv);
  const DType dtype = tensors != nullptr ? tensors->dtype : problem.q_dtype;
  return problem.is_latent() || dtype != problem.q_dtype ? DType::kUInt8 : dtype;
}

/// `count` heads of a tensor [tokens][heads][dim] from `first` on.
TensorView heads_of(TensorView t, std::int64_t first, std::int64_t count) {
  t.shape[1] = count;
  if (t.data != nullptr) {
    t.data = static_cast<std::byte*>(t.data) + first * t.strides[1] * (dtype_bits(t.dtype) / 8);
  }
  return t;
}

/// Moves a tensor of floats that may be absent.
void advance(TensorView& t, std::int64_t floats) {
  if (t.data != nullptr) t.data = static_cast<float*>(t.data) + floats;
}

/// `count` KV heads of a cache from `first` on.
PagedKv heads_of(PagedKv cache, const PageLayout& layout, int first, int count) {
  if (cache.pages.data != nullptr) {
    cache.pages.data = static_cast<std::byte*>(cache.pages.data) + first * layout.head_bytes;
  }
  cache.spec.kv_heads = count;
  for (const auto& [format, scale] :
       {std::pair{&cache.spec.k_format, &cache.k_scale}, std::pair{&cache.spec.v_format, &cache.v_scale}}) {
    if (format->granularity != Granularity::kHead) continue;
    advance(scale->scale, first);
    advance(scale->min, first);
  }
  advance(cache.k_channels.offset, std::int64_t{first} * cache.spec.head_dim);
  advance(cache.k_channels.scale, std::int64_t{first} * cache.spec.head_dim);
  return cache;
}

/// What a launch takes: all heads, or those of a round.
AttentionArgs round_args(const Plan::Impl& plan, const planning::Pass& pass, AttentionArgs args, int round) {
  if (pass.staged.rounds == 1) return args;
  const int kv_heads = pass.staged.heads, kv_first = round * kv_heads;
  const std::int64_t count = std::int64_t{kv_heads} * pass.schedule.group, first = round * count;
  if (auto* const tensors = std::get_if<KvTensorViews>(&args.kv)) {
    tensors->k = heads_of(tensors->k, kv_first, kv_heads);
    tensors->v = heads_of(tensors->v, kv_first, kv_heads);
  } else {
    args.kv = heads_of(std::get<PagedKv>(args.kv), plan.layout, kv_first, kv_heads);
  }
  args.q = heads_of(args.q, first, count);
  args.out = heads_of(args.out, first, count);
  advance(args.alibi_slopes, first);
  advance(args.sinks, first);
  advance(args.lse, first * args.lse.strides[1]);
  return args;
}

/// What a round stages: K and V, [keys, heads, dim], and a scale for each key, [heads, keys]; V in E4M3 in
/// tiles of 16 keys, [heads, keys / 16]. Of K that is read in its pages nothing but scales; nor V, if it is,
/// or if it is a tensor of the caller's.
struct StagedRows {
  TensorView k, v;
  float* key_scales;  // null: static ones, which the kernel reads itself
  std::int64_t keys;
  float* value_units;  // of V that becomes E4M3, for each request and head: stage_values.h
  // Of tensors in E4M3, whose rows are not those of the caller's: stage_tensors.h.
  std::int32_t *first, *first_run, *present;
  float* run_maxima;
};

constexpr int bytes_of(DType t) { return dtype_bits(t) / 8; }

/// Whether the kernel reads K in its pages: codes of E4M3 that are multiplied as they are. Integers are
/// staged even so: their tiles of 80 keys take more copies of less each, which costs more than staging does.
bool reads_code_pages(const KvCacheSpec& spec, DType operand) {
  return operand == DType::kFloat8E4M3 && has_codes(spec, operand);
}

StagedRows staged_rows(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args,
                       std::byte* at) {
  StagedRows staged{};
  const auto* const tensors = std::get_if<KvTensorViews>(&args.kv);
  const PrefillConfig& config = kPrefillTable[pass.variant];
  const bool moved = tensors != nullptr && config.dtype == DType::kFloat8E4M3;
  // Where rows are the caller's, those that there are: what lies beyond is no key, whatever lengths say.
  staged.keys =
      tensors != nullptr && !moved ? std::min(pass.staged.keys, tensors->k.shape[0]) : pass.staged.keys;
  const auto rows = [&](DType dtype, std::int64_t dims) {
    std::byte* const data = at;
    const std::int64_t heads = pass.staged.heads;
    at += staged.keys * heads * dims * bytes_of(dtype);
    return TensorView::contiguous(data, dtype, {staged.keys, heads, dims}, plan.problem.device);
  };
  const auto* const spec = std::get_if<KvCacheSpec>(&plan.problem.kv);
  const bool in_pages = spec != nullptr && reads_code_pages(*spec, config.dtype);
  if (!in_pages) staged.k = rows(operand_of(config.keys, config.dtype), config.head_dim);
  if (moved || (spec != nullptr && config.keys != PrefillKeys::kCodePages)) {
    staged.v = rows(config.dtype, config.value_dim);
  }
  const std::int64_t heads = pass.staged.heads, batch = plan.problem.batch;
  const auto floats = [&](std::int64_t each) {
    auto* const data = reinterpret_cast<float*>(at);
    at += heads * each * sizeof(float);
    return data;
  };
  if (!in_pages || !spec->k_format.static_scale()) staged.key_scales = floats(staged.keys);
  if (config.dtype == DType::kFloat8E4M3 && (moved || !has_value_codes(*spec)))
    staged.value_units = floats(batch);
  if (moved) {
    staged.first = reinterpret_cast<std::int32_t*>(staged.value_units + heads * batch);
    staged.first_run = staged.first + batch;
    staged.present = staged.first_run + batch + 1;
    staged.run_maxima = reinterpret_cast<float*>(staged.present + batch);
  }
  return staged;
}

/// Fills them with K and V of tensors in E4M3, of all requests. Of rows beyond those that are staged at the
/// plan's bounds none is a key.
void stage_moved(const KvTensorViews& tensors, const planning::Schedule& schedule, const StagedRows& staged,
                 Stream stream) {
  StageTensorsParams p{};
  p.k = tensors.k.data, p.v = tensors.v.data;
  p.k_token_stride = tensors.k.strides[0], p.k_head_stride = tensors.k.strides[1];
  p.v_token_stride = tensors.v.strides[0], p.v_head_stride = tensors.v.strides[1];
  p.tokens = tensors.k.shape[0];
  p.cu_kv = schedule.cu_kv, p.kv_lengths = schedule.kv_lengths;
  p.batch = schedule.params.batch;
  p.heads = static_cast<std::int32_t>(tensors.k.shape[1]);
  p.key_dim = static_cast<std::int32_t>(tensors.k.shape[2]);
  p.value_dim = static_cast<std::int32_t>(tensors.v.shape[2]);
  p.type = tensors.k.dtype;
  p.rows = staged.keys;
  p.k_codes = static_cast<std::uint8_t*>(staged.k.data),
  p.v_tiles = static_cast<std::uint8_t*>(staged.v.data);
  p.k_scales = staged.key_scales, p.run_maxima = staged.run_maxima, p.v_units = staged.value_units;
  p.first = staged.first, p.first_run = staged.first_run, p.present = staged.present;
  check(launch_stage_tensors(p, stream), "run");
}

/// Fills them with K of tensors, of all requests.
void stage(const KvTensorViews& tensors, const planning::Schedule& schedule, const StagedRows& staged,
           Stream stream) {
  StageRowsParams p{};
  p.rows = tensors.k.data;
  p.type = tensors.k.dtype;
  p.token_stride = tensors.k.strides[0], p.head_stride = tensors.k.strides[1];
  p.tokens = staged.keys;
  p.used = schedule.cu_kv + schedule.params.batch;
  p.heads = static_cast<std::int32_t>(tensors.k.shape[1]);
  p.dim = static_cast<std::int32_t>(tensors.k.shape[2]);
  p.out = static_cast<std::uint8_t*>(staged.k.data);
  p.scales = staged.key_scales;
  check(launch_stage_rows(p, stream), "run");
}

/// Fills them: of every request of the pass its keys, one request after the other. Tokens of missing pages
/// are zeros.
void stage(const Plan::Impl& plan, const planning::Pass& pass, const PagedKv& cache,
           const planning::Schedule& schedule, const StagedRows& staged, Stream stream) {
  const auto params = [&](KvPart which, const StaticScale& scale, const TensorView& out) {
    StageParams p{};
    p.rows = dequantize_params(cache, plan.layout, page::part_of(cache.spec, plan.layout, which), scale, out);
    p.rows.rows = staged.keys;  // also where only scales are wanted
    p.rows.lengths = schedule.staged;
    p.rows.batch = plan.problem.batch;
    p.rows.row_tokens = pass.schedule.staged_tokens;
    p.rows.clears_rest = false;
    return p;
  };
  StageParams k = params(KvPart::kK, cache.k_scale, staged.k),
              v = params(KvPart::kV, cache.v_scale, staged.v);
  const PrefillConfig& config = kPrefillTable[pass.variant];
  const bool e4m3 = config.dtype == DType::kFloat8E4M3;
  k.scales = staged.key_scales;
  if (staged.k.data == nullptr) {
    k.as = StagedAs::kScales;
  } else if (config.keys == PrefillKeys::kCodes) {
    k.as = e4m3 ? StagedAs::kE4m3Codes : StagedAs::kCodes;
    k.has_codes = has_codes(cache.spec, staged.k.dtype);
  } else {
    k.as = StagedAs::kKeys;
  }
  v.as = e4m3 ? StagedAs::kE4m3Values : StagedAs::kValues;
  const bool converts = staged.value_units != nullptr;  // V, in several kernels, which come first
  if (converts) {
    check(launch_stage_values({v.rows, schedule.cu_q, pass.schedule.window_left, staged.value_units}, stream),
          "run");
  }
  k.second = converts;
  v.second = staged.key_scales != nullptr;
  if (staged.key_scales != nullptr) check(launch_stage(k, stream), "run");
  if (staged.v.data != nullptr && !converts) check(launch_stage(v, stream), "run");
}

void check_rows(const TensorView& t, const char* name) {
  if (t.numel() == 0 || has_boxes(t)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} starts {} bytes past a multiple of 16 with strides {} and {}, but CUDA needs "
                          "rows at multiples of 16 bytes, none of them shared: use an aligned buffer and "
                          "positive strides that are multiples of 8.",
                          name, reinterpret_cast<std::uintptr_t>(t.data) % 16, t.strides[0], t.strides[1]));
}

CompiledKernel compiled_kernel(int row) {
  const PrefillConfig& config = kPrefillTable[row];
  if (config.keys == PrefillKeys::kPacked) return prefill_kernel_packed(row);
  if (config.keys != PrefillKeys::kGiven) return prefill_kernel_staged(row);
  return config.dtype == DType::kBFloat16 ? prefill_kernel_bf16(row) : prefill_kernel_f16(row);
}

/// `staged`: what the pass has staged, if it does.
PrefillParams prefill_params(const Plan::Impl& plan, const AttentionArgs& args,
                             const planning::Workspace& workspace, std::size_t index,
                             const StagedRows& staged) {
  const planning::Pass& pass = plan.passes()[index];
  const PrefillConfig& config = kPrefillTable[pass.variant];
  PrefillParams p{};
  p.attention = attention_params(plan, args, workspace, index);
  p.taken = backend_parts(pass, workspace.passes[index]).taken;
  p.promoted = reinterpret_cast<float4*>(workspace.scratch);
  const int group = pass.schedule.group;
  const auto boxes = [&](const TensorView& t) {
    return 64 % group == 0 && dtype_bits(t.dtype) == 16 && has_boxes(t) && t.numel() > 0;
  };
  p.q_boxes = boxes(args.q), p.out_boxes = boxes(args.out);
  if (p.q_boxes) p.q = tensor_map(args.q, nullptr, group, 64 / group, config.row_bytes);
  if (p.out_boxes) p.out = tensor_map(args.out, nullptr, group, 64 / group, config.row_bytes);
  const auto rows = [&](const TensorView& t, int row_bytes) {
    const void* const somewhere = workspace.passes[index].schedule.header;
    return tensor_map(t, somewhere, 1, config.kv_tile, row_bytes);
  };
  const auto* const tensors = std::get_if<KvTensorViews>(&args.kv);
  const auto* const cache = std::get_if<PagedKv>(&args.kv);
  p.code_pages = cache != nullptr && reads_code_pages(cache->spec, config.dtype);
  if (p.code_pages) {
    p.k = code_page_map(*cache, plan.layout, config.head_dim, 1);
    if (cache->spec.page_size > kTileTokens)
      p.k_pairs = code_page_map(*cache, plan.layout, config.head_dim, 2);
  }
  if (pass.staged.keys > 0) {
    if (!p.code_pages) p.k = rows(staged.k, key_row_bytes(config));
    if (config.dtype != DType::kFloat8E4M3) {
      p.v = rows(tensors != nullptr ? tensors->v : staged.v, config.row_bytes);
    }
    p.kv_tokens = staged.keys;
    p.key_scales = staged.key_scales;
    p.value_tiles = pointer<std::uint8_t>(staged.v);
    p.value_units = staged.value_units;
    p.present = staged.present;
    if (staged.first != nullptr) p.attention.schedule.cu_kv = staged.first;
    // Staged values are in the caller's basis, codes in that of the cache.
    p.attention.rotate_v &= config.dtype == DType::kFloat8E4M3;
  } else if (config.keys == PrefillKeys::kPacked || p.code_pages) {  // no other maps: tiles are copied
  } else if (cache != nullptr) {
    p.k = page_map(*cache, plan.layout, 0, config.head_dim, config.dtype, config.row_bytes);
    p.v = page_map(*cache, plan.layout, plan.layout.v_data_offset, config.value_dim, config.dtype,
                   config.row_bytes);
  } else {
    p.k = rows(tensors->k, config.row_bytes);
    p.v = rows(tensors->v, config.row_bytes);
    p.kv_tokens = tensors->k.shape[0];
  }
  return p;
}

}  // namespace

int prefill_variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (problem.arithmetic == Arithmetic::kFullInt8) return -1;
  const PrefillKeys keys = keys_of(problem);
  const DType dtype = operand_dtype(problem);
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  if (kernel.row_block != prefill_unit(problem, keys)) return -1;
  for (std::size_t row = 0; row < kPrefillTable.size(); ++row) {
    const PrefillConfig& c = kPrefillTable[row];
    if (keys == PrefillKeys::kPacked && !reads_packed(c, *spec)) continue;
    // Codes of V are in the cache's basis, and no warpgroup has all dims of O to rotate it back.
    if (c.shares > 1 && c.dtype == DType::kFloat8E4M3 && spec != nullptr && spec->rotate_v) continue;
    if (is_built(c) && c.keys == keys && c.dtype == dtype && c.head_dim == problem.head_dim() &&
        c.value_dim == problem.v_dim() && rows_of(c) == kernel.row_block) {
      return static_cast<int>(row);
    }
  }
  return -1;
}

planning::StagedKey prefill_staged_key(const AttentionProblem& problem) {
  const PrefillKeys keys = keys_of(problem);
  if (keys == PrefillKeys::kGiven || keys == PrefillKeys::kPacked) return {};
  const DType operand = operand_dtype(problem);
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  const int k = problem.head_dim() * bytes_of(operand_of(keys, operand));
  const int v = problem.v_dim() * bytes_of(operand), scale = sizeof(float);
  planning::StagedKey key{k + scale + (spec != nullptr ? v : 0), k + scale + v};
  if (spec == nullptr && operand == DType::kFloat8E4M3) {
    constexpr int kRequest = 5 * sizeof(float);  // its first row and run, its keys; of a head the unit, a run
    key.bytes += v + 1;                          // a byte is more than other runs take
    key.request_bytes = kRequest;
  }
  if (spec != nullptr && reads_code_pages(*spec, operand)) {
    key.bytes = (keys == PrefillKeys::kCodePages ? 0 : v) + (spec->k_format.static_scale() ? 0 : scale);
  }
  if (operand == DType::kFloat8E4M3) {
    key.tokens = kTileTokens;
    if (spec != nullptr && !has_value_codes(*spec)) key.request_bytes = sizeof(float);
  }
  return key;
}

std::int64_t prefill_scratch_bytes(int variant) {
  const PrefillConfig& c = kPrefillTable[variant];
  if (c.dtype != DType::kFloat8E4M3) return 0;
  const std::int64_t near = std::int64_t{4} * near_sums(c) * 128 * c.warpgroups;
  return (std::int64_t{rows_of(c)} * c.value_dim - near) * std::int64_t{sizeof(float)};
}

void check_prefill(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args) {
  check_out(args);
  require_tensor_maps();
  require_built(compiled_kernel(pass.variant), "prefill", pass.variant);
  if (plan.problem.is_paged()) return;
  const auto& tensors = std::get<KvTensorViews>(args.kv);
  check_rows(tensors.k, "k");
  check_rows(tensors.v, "v");
}

void run_prefill(const Plan::Impl& plan, const AttentionArgs& args, const planning::Workspace& workspace,
                 std::size_t index, Stream stream) {
  const planning::Pass& pass = plan.passes()[index];
  for (int round = 0; round < pass.staged.rounds; ++round) {
    const AttentionArgs own = round_args(plan, pass, args, round);
    StagedRows staged{};
    if (pass.staged.keys > 0) {
      const DeviceScope scope(plan.problem.device.index);
      const planning::Schedule& schedule = workspace.passes[index].schedule;
      staged = staged_rows(plan, pass, own, workspace.staged);
      if (const auto* const cache = std::get_if<PagedKv>(&own.kv)) {
        stage(plan, pass, *cache, schedule, staged, stream);
      } else if (const auto& tensors = std::get<KvTensorViews>(own.kv); staged.first != nullptr) {
        stage_moved(tensors, schedule, staged, stream);
      } else {
        stage(tensors, schedule, staged, stream);
      }
    }
    const PrefillParams p = prefill_params(plan, own, workspace, index, staged);
    launch(compiled_kernel(pass.variant), &p, plan, pass, stream);
  }
}

}  // namespace halftone::cuda
