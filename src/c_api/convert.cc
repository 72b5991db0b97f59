#include "c_api/convert.h"

#include <fmt/format.h>

#include <cstring>

#include "c_api/traits.h"

namespace halftone::c_api {
namespace {

// The C enumerators are the C++ ones.
static_assert(HALFTONE_DTYPE_F32 == int(DType::kFloat32) && HALFTONE_DTYPE_F16 == int(DType::kFloat16) &&
              HALFTONE_DTYPE_BF16 == int(DType::kBFloat16) &&
              HALFTONE_DTYPE_E4M3 == int(DType::kFloat8E4M3) && HALFTONE_DTYPE_INT8 == int(DType::kInt8) &&
              HALFTONE_DTYPE_INT4 == int(DType::kInt4) && HALFTONE_DTYPE_UINT8 == int(DType::kUInt8) &&
              HALFTONE_DTYPE_INT32 == int(DType::kInt32) && HALFTONE_DTYPE_INT64 == int(DType::kInt64) &&
              HALFTONE_DTYPE_E8M0 == int(DType::kFloat8E8M0));
static_assert(HALFTONE_DEVICE_CPU == int(DeviceType::kCpu) && HALFTONE_DEVICE_CUDA == int(DeviceType::kCuda));
static_assert(HALFTONE_GRANULARITY_NONE == int(Granularity::kNone) &&
              HALFTONE_GRANULARITY_TENSOR == int(Granularity::kTensor) &&
              HALFTONE_GRANULARITY_HEAD == int(Granularity::kHead) &&
              HALFTONE_GRANULARITY_TOKEN == int(Granularity::kToken) &&
              HALFTONE_GRANULARITY_TOKEN_HEAD == int(Granularity::kTokenHead) &&
              HALFTONE_GRANULARITY_GROUP == int(Granularity::kGroup));
static_assert(HALFTONE_BLOCK_TABLE_TRUSTED == int(BlockTableMode::kTrusted) &&
              HALFTONE_BLOCK_TABLE_CLAMPED == int(BlockTableMode::kClamped));
static_assert(HALFTONE_ROPE_NONE == int(RopePairing::kNone) &&
              HALFTONE_ROPE_HALF == int(RopePairing::kHalf) &&
              HALFTONE_ROPE_INTERLEAVED == int(RopePairing::kInterleaved));
static_assert(HALFTONE_PART_K == int(KvPart::kK) && HALFTONE_PART_V == int(KvPart::kV));
static_assert(HALFTONE_SPLIT_FAST == int(SplitPolicy::kFast) &&
              HALFTONE_SPLIT_REPRODUCIBLE == int(SplitPolicy::kReproducible) &&
              HALFTONE_SPLIT_BATCH_INVARIANT == int(SplitPolicy::kBatchInvariant));
static_assert(HALFTONE_ARITHMETIC_16BIT == int(Arithmetic::k16Bit) &&
              HALFTONE_ARITHMETIC_HALF_INT8 == int(Arithmetic::kHalfInt8) &&
              HALFTONE_ARITHMETIC_FULL_INT8 == int(Arithmetic::kFullInt8) &&
              HALFTONE_ARITHMETIC_FP8 == int(Arithmetic::kFp8));
static_assert(HALFTONE_MAX_RANK == TensorView::kMaxRank);

/// An enumerator of E, which counts from 0 to `last`.
template <class E>
E to_enum(std::int32_t value, E last, const Name& argument, const char* type) {
  const int limit = static_cast<int>(last);
  if (value < 0 || value > limit) {
    invalid(fmt::format("{} is {}, but must be 0 to {}: use an enumerator of {}.", argument.text(), value,
                        limit, type));
  }
  return static_cast<E>(value);
}

void check_reserved(std::int64_t value, const Name& argument) {
  if (value != 0) {
    invalid(fmt::format("{}.reserved is {}, but must be 0: set it up with the struct's init function.",
                        argument.text(), value));
  }
}

/// Of the fields that both ways to append have.
template <class CArgs>
Rope to_rope(const CArgs& c, const Name& argument) {
  return {
      to_enum(c.rope_pairing, RopePairing::kInterleaved, argument("rope_pairing"), "halftone_rope_pairing"),
      to_cpp(c.cos, argument("cos")), to_cpp(c.sin, argument("sin")),
      to_cpp(c.positions, argument("positions"))};
}

}  // namespace

void invalid(const std::string& sentence) { throw Error(ErrorCode::kInvalidArgument, sentence); }

DType to_dtype(std::int32_t value, const Name& argument) {
  return to_enum(value, DType::kFloat8E8M0, argument, "halftone_dtype");
}

Device to_device(std::int32_t type, std::int32_t index, const Name& argument) {
  const DeviceType t = to_enum(type, DeviceType::kCuda, argument("device_type"), "halftone_device_type");
  if (index < 0 || (t == DeviceType::kCpu && index != 0)) {
    invalid(fmt::format("{}.device_index is {}, but must be {}: use 0.", argument.text(), index,
                        t == DeviceType::kCpu ? "0 on the CPU" : "at least 0"));
  }
  return {t, index};
}

bool to_bool(std::int32_t value, const Name& argument) {
  if (value != 0 && value != 1) {
    invalid(fmt::format("{} is {}, but must be 0 (no) or 1 (yes): use 1 for yes.", argument.text(), value));
  }
  return value == 1;
}

KvPart to_part(std::int32_t value, const Name& argument) {
  return to_enum(value, KvPart::kV, argument, "halftone_kv_part");
}

TensorView to_cpp(const halftone_tensor* in, const Name& argument) {
  if (in == nullptr) return {};
  const halftone_tensor c = read_struct(in, argument);
  check_reserved(c.reserved, argument);
  TensorView view;
  view.data = c.data;
  view.dtype = to_dtype(c.dtype, argument("dtype"));
  view.device = to_device(c.device_type, c.device_index, argument);
  if (c.rank < 0 || c.rank > HALFTONE_MAX_RANK) {
    invalid(fmt::format("{}.rank is {}, but must be 0 to {}: merge or drop dimensions.", argument.text(),
                        c.rank, HALFTONE_MAX_RANK));
  }
  view.rank = c.rank;
  for (int i = 0; i < c.rank; ++i) {
    if (c.shape[i] < 0) {
      invalid(fmt::format("{}.shape[{}] is {}, but must be at least 0: give the number of elements.",
                          argument.text(), i, c.shape[i]));
    }
    view.shape[i] = c.shape[i];
    view.strides[i] = c.strides[i];
  }
  return view;
}

KvFormat to_cpp(const halftone_kv_format* in, const Name& argument) {
  const halftone_kv_format c = read_struct(in, argument);
  KvFormat format;
  format.dtype = to_dtype(c.dtype, argument("dtype"));
  format.granularity =
      to_enum(c.granularity, Granularity::kGroup, argument("granularity"), "halftone_granularity");
  format.asymmetric = to_bool(c.asymmetric, argument("asymmetric"));
  format.group_size = c.group_size;
  format.scale_dtype = to_dtype(c.scale_dtype, argument("scale_dtype"));
  return format;
}

KvCacheSpec to_cpp(const halftone_cache_spec* in, const Name& argument) {
  const halftone_cache_spec c = read_struct(in, argument);
  KvCacheSpec spec;
  if (c.k_format != nullptr) spec.k_format = to_cpp(c.k_format, argument("k_format"));
  spec.v_format = c.v_format != nullptr ? to_cpp(c.v_format, argument("v_format")) : spec.k_format;
  spec.kv_heads = c.kv_heads;
  spec.head_dim = c.head_dim;
  spec.v_head_dim = c.v_head_dim;
  spec.page_size = c.page_size;
  spec.rotate_k = to_bool(c.rotate_k, argument("rotate_k"));
  spec.rotate_v = to_bool(c.rotate_v, argument("rotate_v"));
  spec.rope_dim = c.rope_dim;
  spec.offset_k = to_bool(c.offset_k, argument("offset_k"));
  spec.scale_k = to_bool(c.scale_k, argument("scale_k"));
  return spec;
}

PagedKv to_cpp(const halftone_paged_kv* in, const Name& argument) {
  const halftone_paged_kv c = read_struct(in, argument);
  PagedKv cache;
  cache.spec = to_cpp(c.spec, argument("spec"));
  cache.pages = to_cpp(c.pages, argument("pages"));
  cache.block_table = to_cpp(c.block_table, argument("block_table"));
  cache.lengths = to_cpp(c.lengths, argument("lengths"));
  cache.k_scale.scale = to_cpp(c.k_scale, argument("k_scale"));
  cache.k_scale.min = to_cpp(c.k_min, argument("k_min"));
  cache.v_scale.scale = to_cpp(c.v_scale, argument("v_scale"));
  cache.v_scale.min = to_cpp(c.v_min, argument("v_min"));
  cache.k_channels.offset = to_cpp(c.k_offset, argument("k_offset"));
  cache.k_channels.scale = to_cpp(c.k_channel_scale, argument("k_channel_scale"));
  cache.table_mode =
      to_enum(c.table_mode, BlockTableMode::kClamped, argument("table_mode"), "halftone_block_table_mode");
  return cache;
}

NewTokens to_cpp(const halftone_new_tokens* in, const Name& argument) {
  const halftone_new_tokens c = read_struct(in, argument);
  check_reserved(c.reserved, argument);
  NewTokens tokens;
  tokens.k = to_cpp(c.k, argument("k"));
  tokens.v = to_cpp(c.v, argument("v"));
  tokens.slot_mapping = to_cpp(c.slot_mapping, argument("slot_mapping"));
  tokens.rope = to_rope(c, argument);
  tokens.advance = to_bool(c.advance, argument("advance"));
  return tokens;
}

AppendArgs to_cpp(const halftone_append_args* in, const Name& argument) {
  const halftone_append_args c = read_struct(in, argument);
  AppendArgs args;
  args.k = to_cpp(c.k, argument("k"));
  args.v = to_cpp(c.v, argument("v"));
  args.slot_mapping = to_cpp(c.slot_mapping, argument("slot_mapping"));
  args.cu_seqlens = to_cpp(c.cu_seqlens, argument("cu_seqlens"));
  args.rope = to_rope(c, argument);
  args.status = to_cpp(c.status, argument("status"));
  args.advance = to_bool(c.advance, argument("advance"));
  args.cache_settled = to_bool(c.cache_settled, argument("cache_settled"));
  return args;
}

KvTensors to_cpp(const halftone_kv_tensors* in, const Name& argument) {
  const halftone_kv_tensors c = read_struct(in, argument);
  check_reserved(c.reserved, argument);
  return {to_dtype(c.dtype, argument("dtype")), c.kv_heads, c.head_dim, c.v_head_dim};
}

AttentionProblem to_cpp(const halftone_attention_problem* in, const Name& argument) {
  const halftone_attention_problem c = read_struct(in, argument);
  AttentionProblem problem;
  problem.device = to_device(c.device_type, c.device_index, argument);
  problem.batch = c.batch;
  problem.q_heads = c.q_heads;
  if ((c.kv == nullptr) == (c.kv_tensors == nullptr)) {
    invalid(fmt::format(
        "{0}.kv and {0}.kv_tensors are both {1}, but K and V lie in one of the two: set either kv to a "
        "halftone_cache_spec or kv_tensors to a halftone_kv_tensors.",
        argument.text(), c.kv == nullptr ? "NULL" : "given"));
  }
  if (c.kv != nullptr) {
    problem.kv = to_cpp(c.kv, argument("kv"));
  } else {
    problem.kv = to_cpp(c.kv_tensors, argument("kv_tensors"));
  }
  problem.max_q_len = c.max_q_len;
  problem.max_kv_len = c.max_kv_len;
  problem.max_total_kv = c.max_total_kv;
  problem.max_prompt_kv = c.max_prompt_kv;
  problem.q_dtype = to_dtype(c.q_dtype, argument("q_dtype"));
  problem.out_dtype = to_dtype(c.out_dtype, argument("out_dtype"));
  problem.mask.causal = to_bool(c.causal, argument("causal"));
  problem.mask.window_left = c.window_left;
  problem.mask.window_right = c.window_right;
  problem.scale = c.scale;
  problem.softcap = c.softcap;
  problem.alibi = to_bool(c.alibi, argument("alibi"));
  problem.sinks = to_bool(c.sinks, argument("sinks"));
  problem.lse = to_bool(c.lse, argument("lse"));
  problem.policy =
      to_enum(c.policy, SplitPolicy::kBatchInvariant, argument("policy"), "halftone_split_policy");
  problem.workers = c.workers;
  problem.arithmetic = to_enum(c.arithmetic, Arithmetic::kFp8, argument("arithmetic"), "halftone_arithmetic");
  problem.listed.top_k = c.top_k;
  problem.listed.extra_top_k = c.extra_top_k;
  if (c.extra != nullptr) problem.listed.extra = to_cpp(c.extra, argument("extra"));
  if (c.min_q_len != 0) problem.min_q_len = c.min_q_len;
  problem.appends = to_bool(c.appends, argument("appends"));
  return problem;
}

SequenceLengths to_cpp(const halftone_sequence_lengths* in, const Name& argument) {
  if (in == nullptr) return {};
  const halftone_sequence_lengths c = read_struct(in, argument);
  check_reserved(c.reserved, argument);
  SequenceLengths lengths;
  lengths.cu_q = to_cpp(c.cu_q, argument("cu_q"));
  lengths.kv_lengths = to_cpp(c.kv_lengths, argument("kv_lengths"));
  lengths.cu_kv = to_cpp(c.cu_kv, argument("cu_kv"));
  lengths.counts = to_cpp(c.counts, argument("counts"));
  lengths.extra_counts = to_cpp(c.extra_counts, argument("extra_counts"));
  return lengths;
}

AttentionArgs to_cpp(const halftone_attention_args* in, const Name& argument) {
  const halftone_attention_args c = read_struct(in, argument);
  AttentionArgs args;
  args.cache_settled = to_bool(c.cache_settled, argument("cache_settled"));
  args.q = to_cpp(c.q, argument("q"));
  args.lengths = to_cpp(c.lengths, argument("lengths"));
  const bool tensors = c.k != nullptr || c.v != nullptr;
  if (c.cache != nullptr && tensors) {
    invalid(fmt::format("{}.cache is given beside {}, but one of the two is attended: set the other to NULL.",
                        argument.text(), c.k != nullptr ? "k" : "v"));
  }
  if (c.cache != nullptr) args.kv = to_cpp(c.cache, argument("cache"));
  if (tensors) args.kv = KvTensorViews{to_cpp(c.k, argument("k")), to_cpp(c.v, argument("v"))};
  args.alibi_slopes = to_cpp(c.alibi_slopes, argument("alibi_slopes"));
  args.sinks = to_cpp(c.sinks, argument("sinks"));
  args.out = to_cpp(c.out, argument("out"));
  args.lse = to_cpp(c.lse, argument("lse"));
  args.status = to_cpp(c.status, argument("status"));
  args.indices = to_cpp(c.indices, argument("indices"));
  args.extra_indices = to_cpp(c.extra_indices, argument("extra_indices"));
  if (c.extra_cache != nullptr) args.extra_kv = to_cpp(c.extra_cache, argument("extra_cache"));
  if (c.append != nullptr) args.append = to_cpp(c.append, argument("append"));
  check_reserved(c.reserved, argument);
  args.new_tokens_late = to_bool(c.new_tokens_late, argument("new_tokens_late"));
  return args;
}

halftone_kv_format to_c(const KvFormat& format) {
  halftone_kv_format c = StructTraits<halftone_kv_format>::defaults();
  c.dtype = static_cast<std::int32_t>(format.dtype);
  c.granularity = static_cast<std::int32_t>(format.granularity);
  c.asymmetric = format.asymmetric;
  c.group_size = format.group_size;
  c.scale_dtype = static_cast<std::int32_t>(format.scale_dtype);
  return c;
}

halftone_cache_spec to_c(const KvCacheSpec& spec) {
  halftone_cache_spec c = StructTraits<halftone_cache_spec>::defaults();
  c.kv_heads = spec.kv_heads;
  c.head_dim = spec.head_dim;
  c.v_head_dim = spec.v_head_dim;
  c.page_size = spec.page_size;
  c.rotate_k = spec.rotate_k;
  c.rotate_v = spec.rotate_v;
  c.rope_dim = spec.rope_dim;
  c.offset_k = spec.offset_k;
  c.scale_k = spec.scale_k;
  return c;
}

halftone_kv_tensors to_c(const KvTensors& tensors) {
  halftone_kv_tensors c = StructTraits<halftone_kv_tensors>::defaults();
  c.dtype = static_cast<std::int32_t>(tensors.dtype);
  c.kv_heads = tensors.kv_heads;
  c.head_dim = tensors.head_dim;
  c.v_head_dim = tensors.v_head_dim;
  return c;
}

halftone_attention_problem to_c(const AttentionProblem& problem) {
  halftone_attention_problem c = StructTraits<halftone_attention_problem>::defaults();
  c.batch = problem.batch;
  c.q_heads = problem.q_heads;
  c.max_kv_len = problem.max_kv_len;
  c.max_total_kv = problem.max_total_kv;
  c.max_prompt_kv = problem.max_prompt_kv;
  c.max_q_len = problem.max_q_len;
  c.min_q_len = problem.min_q_len;
  c.device_type = static_cast<std::int32_t>(problem.device.type);
  c.device_index = problem.device.index;
  c.q_dtype = static_cast<std::int32_t>(problem.q_dtype);
  c.out_dtype = static_cast<std::int32_t>(problem.out_dtype);
  c.causal = problem.mask.causal;
  c.window_left = problem.mask.window_left;
  c.window_right = problem.mask.window_right;
  c.scale = problem.scale;
  c.softcap = problem.softcap;
  c.alibi = problem.alibi;
  c.sinks = problem.sinks;
  c.lse = problem.lse;
  c.policy = static_cast<std::int32_t>(problem.policy);
  c.workers = problem.workers;
  c.arithmetic = static_cast<std::int32_t>(problem.arithmetic);
  c.top_k = problem.listed.top_k;
  c.extra_top_k = problem.listed.extra_top_k;
  c.appends = problem.appends;
  return c;
}

void copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* length) {
  if (length != nullptr) *length = text.size();
  if (buffer == nullptr && capacity == 0) return;
  if (buffer == nullptr)
    invalid(fmt::format("buffer is NULL, but capacity is {}: pass both or neither.", capacity));
  if (capacity < text.size() + 1) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("capacity is {}, but the text needs {} bytes with its NUL: pass a buffer of {} bytes.",
                    capacity, text.size() + 1, text.size() + 1));
  }
  std::memcpy(buffer, text.data(), text.size());
  buffer[text.size()] = '\0';
}

}  // namespace halftone::c_api
