#include "cpu/dequantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "cpu/read_span.h"
#include "cpu/slots.h"
#include "cpu/threads.h"
#include "format/channels.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/head_dim.h"
#include "format/part.h"
#include "format/place_table.h"
#include "halftone/error.h"
#include "plan/check_tensor.h"

namespace halftone::cpu {
namespace {

// Reading a span of all live tokens.
struct ReadJob {
  const PagedKv& cache;
  const PageLayout& layout;
  page::Part part;
  TensorView output;  // the span's dims of K or V
  const StaticScale& static_scale;
  Channels channels;  // of K
  const std::vector<std::int64_t>& slots;
  Interruption& interruption;
};

using ReadSpan = void(const page::Part&, const page::PlaceTable*, const StaticScale&, const std::uint8_t*,
                      int, int, float*);

/// `read`: read_span() of the part's codec.
void read_part(const ReadJob& job, ReadSpan* read) {
  const page::Part& part = job.part;
  const page::PlaceTable* table = page::table_of(part);
  const int heads = job.cache.spec.kv_heads;
  const auto tokens = static_cast<std::int64_t>(job.slots.size());
  const int threads = region_threads(tokens);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (job.interruption.poll(t)) continue;
    const std::int64_t slot = job.slots[t];
    const int offset = static_cast<int>(slot % job.cache.spec.page_size);
    std::array<float, kMaxSpanDims> x{};
    for (int head = 0; head < heads; ++head) {
      if (slot != kNoSlot) {
        const std::uint8_t* tile = tile_of(job.cache, job.layout, slot, head);
        read(part, table, job.static_scale, tile, offset, head, x.data());
        if (part.rotated) hadamard::rotate(x.data(), part.dim);
        for (int d = 0; job.channels.any() && d < part.dim; ++d) {
          x[d] = job.channels.restored(x[d], std::int64_t{head} * part.dim + d);
        }
      }
      store_row(job.output.dtype, x.data(), part.dim, row_at(job.output, t, head));
    }
  }
}

void check_tokens(const TensorView& out, const char* name, std::size_t tokens) {
  if (!planning::given(out) || out.shape[0] == static_cast<std::int64_t>(tokens)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}.shape[0] is {}, but must be sum(cache.lengths) = {}: allocate {} rows.", name,
                          out.shape[0], tokens, tokens));
}

}  // namespace

void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out) {
  const PageLayout layout = page_layout(cache.spec);
  const Slots slots = live_slots(cache);
  check_tokens(k_out, "k_out", slots.of_token.size());
  check_tokens(v_out, "v_out", slots.of_token.size());
  const page::Parts parts = page::parts_of(cache.spec, layout);
  Interruption interruption;
  for (const KvPart which : {KvPart::kK, KvPart::kV}) {
    const bool of_k = which == KvPart::kK;
    const TensorView& out = of_k ? k_out : v_out;
    if (!planning::given(out)) continue;
    for (const page::Part& part : parts) {
      const int first = part.first_in(which);
      if (first < 0) continue;
      const StaticScale& scale = of_k ? cache.k_scale : cache.v_scale;
      const Channels channels = of_k ? channels_of(cache.k_channels) : Channels{};
      const ReadJob job{cache, layout,   part,           dims_of(out, first, part.dim),
                        scale, channels, slots.of_token, interruption};
      codec::with_codec(part.format, [&](auto codec) { read_part(job, read_span<decltype(codec)>); });
      interruption.check();
    }
  }
}

}  // namespace halftone::cpu
