#include "cpu/append.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <variant>
#include <vector>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "cpu/quantise.h"
#include "cpu/slots.h"
#include "cpu/threads.h"
#include "format/channels.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/head_dim.h"
#include "format/part.h"
#include "format/place_table.h"
#include "format/rope.h"
#include "format/status.h"
#include "halftone/error.h"

namespace halftone::cpu {
namespace {

constexpr std::int64_t kParallelElements = 1 << 14;  // below, a parallel region costs more than it gains

// Bit patterns of magnitudes order as the magnitudes do, NaN last.
bool acceptable(const float* x, int count) {
  const std::uint32_t limit = codec::bits_of(codec::kMaxInput);
  std::uint32_t beyond = 0;  // bit 31 is set once a magnitude exceeds the limit
  for (int i = 0; i < count; ++i) beyond |= limit - (codec::bits_of(x[i]) & 0x7fffffffu);
  return beyond >> 31 == 0;
}

bool token_is_acceptable(const TensorView& x, std::int64_t token) {
  std::array<float, kMaxRowDims> row;
  const int dim = static_cast<int>(x.shape[2]);
  bool good = true;
  for (std::int64_t head = 0; head < x.shape[1]; ++head) {
    load_row(x.dtype, row_at(x, token, head), dim, row.data());
    good &= acceptable(row.data(), dim);
  }
  return good;
}

[[noreturn]] void refuse_value(const TensorView& x, const char* name, std::int64_t token) {
  std::array<float, kMaxRowDims> row;
  const int dim = static_cast<int>(x.shape[2]);
  for (std::int64_t head = 0; head < x.shape[1]; ++head) {
    load_row(x.dtype, row_at(x, token, head), dim, row.data());
    for (int d = 0; d < dim; ++d) {
      if (codec::ht_abs(row[d]) <= codec::kMaxInput) continue;
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{}[{}, {}, {}] is {}, but must be finite and at most 2^100 in magnitude: clean it, or "
                      "skip the token with slot -1.",
                      name, token, head, d, row[d]));
    }
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("{} changed while append read it: keep inputs constant.", name));
}

int threads_for(const TensorView& x) { return region_threads(x.numel() >= kParallelElements ? INT_MAX : 1); }

void check_values(const TensorView& x, const char* name, const std::vector<std::int64_t>& slots,
                  Interruption& interruption) {
  const auto tokens = static_cast<std::int64_t>(slots.size());
  std::int64_t first_bad = tokens;
  const int threads = threads_for(x);
#pragma omp parallel for schedule(static) reduction(min : first_bad) num_threads(threads) if (threads > 1)
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (interruption.poll(t)) continue;
    if (slots[t] != kNoSlot && !token_is_acceptable(x, t)) first_bad = std::min(first_bad, t);
  }
  interruption.check();
  if (first_bad < tokens) refuse_value(x, name, first_bad);
}

void check_rope_values(const Rope& rope, const std::vector<std::int64_t>& slots) {
  if (rope.pairing == RopePairing::kNone) return;
  const auto* positions = static_cast<const std::int32_t*>(rope.positions.data);
  const std::int64_t rows = rope.cos.shape[0], half = rope.cos.shape[1];
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] == kNoSlot) continue;
    if (positions[t] < 0 || positions[t] >= rows) {
      throw Error(ErrorCode::kOutOfRange,
                  fmt::format("rope.positions[{}] is {}, but rope.cos has rows 0 to {}: extend cos and sin.",
                              t, positions[t], rows - 1));
    }
    for (const TensorView* table : {&rope.cos, &rope.sin}) {
      const float* row = static_cast<const float*>(table->data) + positions[t] * half;
      for (std::int64_t i = 0; i < half; ++i) {
        if (codec::ht_abs(row[i]) <= codec::kMaxRotary) continue;
        throw Error(
            ErrorCode::kInvalidArgument,
            fmt::format("rope.{}[{}, {}] is {}, but must be finite and at most 65536 in magnitude: recompute "
                        "the table.",
                        table == &rope.cos ? "cos" : "sin", positions[t], i, row[i]));
      }
    }
  }
}

// Everything that writing a span of a call's tokens needs.
struct PartJob {
  const PagedKv& cache;
  const PageLayout& layout;
  page::Part part;
  TensorView input;   // the span's dims
  const Rope* rope;   // null for all but the span that it begins in
  Channels channels;  // of K
  const StaticScale& static_scale;
  const std::vector<std::int64_t>& slots;
  Interruption& interruption;
};

// RoPE, treatment of channels and Hadamard rotation of one token and head, in fp32.
void load_transformed(const PartJob& job, std::int64_t token, std::int64_t head, float* x) {
  load_row(job.input.dtype, row_at(job.input, token, head), job.part.dim, x);
  if (job.rope != nullptr && job.rope->pairing != RopePairing::kNone) {
    const std::int64_t half = job.rope->cos.shape[1];
    const std::int64_t row = static_cast<const std::int32_t*>(job.rope->positions.data)[token] * half;
    rope::rotate(job.rope->pairing, x, static_cast<const float*>(job.rope->cos.data) + row,
                 static_cast<const float*>(job.rope->sin.data) + row, static_cast<int>(half));
  }
  if (job.channels.any()) {
    for (int d = 0; d < job.part.dim; ++d) x[d] = job.channels.taken(x[d], head * job.part.dim + d);
  }
  if (job.part.rotated) hadamard::rotate(x, job.part.dim);
}

template <class T>
void store(std::uint8_t* address, T value) {
  std::memcpy(address, &value, sizeof(value));
}

void store_param(DType dtype, std::uint8_t* address, float value) {
  if (dtype == DType::kFloat16) {
    store(address, codec::f16_from_f32(value));  // exact: the value was rounded to f16 before
  } else if (dtype == DType::kFloat8E8M0) {
    store(address, codec::e8m0_from_f32(value));  // likewise
  } else {
    store(address, value);
  }
}

codec::Params static_params_of(const PartJob& job, int head) {
  const int i = job.part.format.granularity == Granularity::kHead ? head : 0;
  const auto* scale = static_cast<const float*>(job.static_scale.scale.data);
  const auto* min = static_cast<const float*>(job.static_scale.min.data);
  return codec::static_params(scale[i], job.part.format.asymmetric ? min[i] : 0.0f);
}

// Quantises one token of one head and writes its params; `codes` gets dim codes. `offset`: of the token
// within its page.
template <class Code>
void quantise(const PartJob& job, const codec::Params* given, int offset, std::uint8_t* tile, const float* x,
              Code* codes) {
  const int before = offset / kTileTokens, token = offset % kTileTokens;
  const page::Part& part = job.part;
  const int groups = std::max(part.groups, 1), width = part.dim / groups;
  for (int g = 0; g < groups; ++g) {
    const float* values = x + g * width;
    const codec::Params params =
        given != nullptr ? *given : codec::params_of(part.format, row_range(values, width));
    encode_row(part.format.dtype, part.format.asymmetric, params, values, width, codes + g * width);
    if (part.groups == 0) continue;
    store_param(part.format.scale_dtype, tile + part.scale_offset(before, token, g), params.scale);
    if (part.format.asymmetric) {
      store_param(part.format.scale_dtype, tile + part.min_offset(token, g), params.min);
    }
  }
}

// Writes one token's codes to their places: those of `table`, or a row.
template <class Code>
void scatter(const page::Part& part, const page::PlaceTable* table, int token, const Code* codes,
             std::uint8_t* tile) {
  std::uint8_t* data = tile + part.data_offset;
  if constexpr (sizeof(Code) == 2) {
    std::memcpy(data + token * part.row_bytes, codes, static_cast<std::size_t>(part.dim) * 2);
  } else if (table == nullptr) {
    std::uint8_t* row = data + token * part.row_bytes;
    if (part.format.dtype == DType::kInt4) {
      for (int d = 0; d < part.dim; d += 2)
        row[d / 2] = static_cast<std::uint8_t>(codes[d] | codes[d + 1] << 4);
    } else {
      std::memcpy(row, codes, static_cast<std::size_t>(part.dim));
    }
  } else {
    const std::uint16_t* bytes = table->token(token);
    if (part.format.dtype == DType::kInt4) {
      for (int u = 0; u < table->units; ++u) {
        data[bytes[u]] = static_cast<std::uint8_t>(codes[2 * u] | codes[2 * u + 1] << 4);
      }
    } else {
      for (int u = 0; u < table->units; ++u) data[bytes[u]] = codes[u];
    }
  }
}

template <class Code>
void write_part(const PartJob& job) {
  const page::Part& part = job.part;
  const page::PlaceTable* table = page::table_of(part);
  const int heads = job.cache.spec.kv_heads;
  const bool per_token = part.format.granularity == Granularity::kToken;
  const auto row = static_cast<std::size_t>(per_token ? heads : 1) * part.dim;
  const int threads = threads_for(job.input);
  std::vector<float> values(row * static_cast<std::size_t>(threads));
  const auto tokens = static_cast<std::int64_t>(job.slots.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = job.slots[t];
    if (slot == kNoSlot || job.interruption.poll(t)) continue;
    float* x = values.data() + row * omp_get_thread_num();
    const int offset = static_cast<int>(slot % job.cache.spec.page_size), token = offset % kTileTokens;
    codec::Params shared;
    if (per_token) {
      for (int head = 0; head < heads; ++head) load_transformed(job, t, head, x + head * part.dim);
      shared = codec::params_of(part.format, row_range(x, heads * part.dim));
    }
    std::array<Code, kMaxSpanDims> codes;
    for (int head = 0; head < heads; ++head) {
      float* head_values = per_token ? x + head * part.dim : x;
      if (!per_token) load_transformed(job, t, head, head_values);
      if (part.format.static_scale()) shared = static_params_of(job, head);
      const bool fixed = per_token || !part.format.dynamic_scale();
      std::uint8_t* tile = tile_of(job.cache, job.layout, slot, head);
      quantise(job, fixed ? &shared : nullptr, offset, tile, head_values, codes.data());
      scatter(part, table, token, codes.data(), tile);
    }
  }
}

/// Checks all values, then writes the tokens to their slots.
void write(const PagedKv& cache, const AppendArgs& args, const Slots& slots) {
  const PageLayout layout = page_layout(cache.spec);
  Interruption interruption;
  check_values(args.k, "k", slots.of_token, interruption);
  if (args.v.present()) check_values(args.v, "v", slots.of_token, interruption);
  check_rope_values(args.rope, slots.of_token);

  const int rope_first = cache.spec.head_dim - cache.spec.rotary_dims();
  for (const page::Part& part : page::parts_of(cache.spec, layout)) {
    const bool of_k = part.which == KvPart::kK;
    const TensorView input =
        of_k ? dims_of(args.k, part.k_first, part.dim) : dims_of(args.v, part.v_first, part.dim);
    const PartJob job{cache,
                      layout,
                      part,
                      input,
                      part.k_first == rope_first ? &args.rope : nullptr,
                      of_k ? channels_of(cache.k_channels) : Channels{},
                      of_k ? cache.k_scale : cache.v_scale,
                      slots.of_token,
                      interruption};
    if (dtype_bits(job.part.format.dtype) == 16) {
      write_part<std::uint16_t>(job);
    } else {
      write_part<std::uint8_t>(job);
    }
    interruption.check();
  }
  if (slots.bad_page && args.status.present())
    *static_cast<std::int32_t*>(args.status.data) |= kStatusBadPage;
}

}  // namespace

void append(const PagedKv& cache, const AppendArgs& args) {
  write(cache, args, append_slots(cache, args));
  if (!args.advance) return;
  auto* lengths = static_cast<std::int32_t*>(cache.lengths.data);
  const auto* cu = static_cast<const std::int32_t*>(args.cu_seqlens.data);
  for (std::int64_t i = 0; i < cache.lengths.shape[0]; ++i) lengths[i] += cu[i + 1] - cu[i];
}

void append_step(const AttentionArgs& args, const planning::Schedule& schedule) {
  const auto& cache = std::get<PagedKv>(args.kv);
  const NewTokens& tokens = args.append;
  write(cache, {.k = tokens.k, .v = tokens.v, .rope = tokens.rope, .status = args.status},
        step_slots(cache, tokens, schedule));
}

}  // namespace halftone::cpu
