// The gathering path: the blocked path over tokens that are read one by one, wherever they lie. K of a latent
// token is decoded once and serves as V, too.
#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/gathered.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/gather.h"
#include "cpu/attention/kernels.h"
#include "cpu/read_span.h"
#include "hwy/highway.h"
#include "plan/listed.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

/// `count` codes that lie in a row, with one scale (and min); what codec::Codec::decode() gives.
template <Element kElement>
HWY_INLINE void decode_group(const std::uint8_t* codes, int count, float scale, float min, float* out) {
  const F d;
  const VF scales = hn::Set(d, scale), mins = hn::Set(d, min);
  const auto value = [&](VF code) HWY_ATTR {
    if constexpr (row_order(kElement)) return code;
    if constexpr (asymmetric(kElement)) return hn::MulAdd(code, scales, mins);
    return hn::Mul(hn::Mul(code, hn::Set(d, code_unit(kElement))), scales);
  };
  for (int i = 0; i < count; i += planes_of(kElement) * kLanes) {
    VF code[planes_of(kElement)];
    Decoder<kElement>::load(codes + i * unit_bytes(kElement) / planes_of(kElement), code);
    if constexpr (four_bits(kElement)) {
      const VF odd = hn::Mul(code[1], hn::Set(d, plane_unit(1)));
      hn::StoreInterleaved2(value(code[0]), value(odd), d, out + i);
    } else {
      hn::StoreU(value(code[0]), d, out + i);
    }
  }
}

template <Element kElement>
void decode_row(const page::Part& part, const StaticScale& given, const std::uint8_t* tile, int offset,
                float* out) {
  const std::uint8_t* codes = tile + part.data_offset + std::int64_t{offset % kTileTokens} * part.row_bytes;
  const int groups = std::max(part.groups, 1), width = part.dim / groups;
  for (int g = 0; g < groups; ++g) {
    const codec::Params p = params_at(part, given, tile, offset, 0, g);
    decode_group<kElement>(codes + g * width * unit_bytes(kElement) / planes_of(kElement), width, p.scale,
                           p.min, out + g * width);
  }
}

using DecodeRow = void (*)(const page::Part&, const StaticScale&, const std::uint8_t*, int, float*);
constexpr DecodeRow kDecodeRow[kElements] = {decode_row<Element::kF32>,  decode_row<Element::kF16>,
                                             decode_row<Element::kBF16>, decode_row<Element::kE4M3>,
                                             decode_row<Element::kI8>,   decode_row<Element::kI4>,
                                             decode_row<Element::kU8>,   decode_row<Element::kU4>};

/// Tokens of one item, found by the block table or by lists.
class TokenSource : public ValueSource {
 public:
  TokenSource(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer), item_(item), s_(scratch), gather_(*layer.gather) {
    if (gather_.first_list != nullptr)
      second_ = planning::second_list_begin(gather_.first_list[item.request]);
  }

  int width() const { return layer_.head_dim; }
  static int dim(int column) { return column; }
  const std::vector<QuadClass>& quads() const { return gather_.quads; }
  int tile_floats() const { return kTileTokens * (gather_.v_in_k ? layer_.head_dim : layer_.v_dim); }
  static bool may_hold_nan() { return true; }
  bool excluded(int token) const { return data_[token] == nullptr; }
  const Chunk& chunk() const { return chunk_; }

  /// The chunk that begins at `begin`: to the next multiple of kGatheredTokens or the item's end.
  void find(int begin) {
    chunk_.begin = begin;
    chunk_.end = std::min(item_.kv_end, begin / kGatheredTokens * kGatheredTokens + kGatheredTokens);
    chunk_.tiles = (chunk_.end - begin + kTileTokens - 1) / kTileTokens;
    chunk_.excluded = false;
    static_assert(planning::kListTokens % kGatheredTokens == 0);  // a chunk has tokens of one cache
    cache_ = &gather_.caches[begin >= second_ ? 1 : 0];
    for (int t = 0; t < chunk_.tiles * kTileTokens; ++t) {
      const bool live = begin + t < chunk_.end;
      data_[t] = live ? locate(begin + t, within_[t]) : nullptr;
      chunk_.excluded |= live && data_[t] == nullptr;
    }
  }

  void decode_k(float* out) const { decode(KvPart::kK, width(), out); }
  const float* decode_v(float* out) const {
    if (gather_.v_in_k) return s_.decoded;  // where decode_k() left it
    decode(KvPart::kV, layer_.v_dim, out);
    return out;
  }

 private:
  /// The tile of a token, its place in the page in `within`; null if it does not count.
  const std::uint8_t* locate(int token, std::uint8_t& within) {
    const int log2 = cache_->page_log2;
    std::int64_t page = 0;
    int offset = 0;
    if (cache_->indices == nullptr) {
      page = layer_.table[item_.request * layer_.table_stride + (token >> log2)];
      offset = token & ((1 << log2) - 1);
    } else {
      const bool second = token >= second_;
      if (!second && gather_.first_list != nullptr && token >= gather_.first_list[item_.request])
        return nullptr;
      const std::int32_t slot =
          cache_->indices[item_.request * cache_->index_stride + (second ? token - second_ : token)];
      if (slot < 0) return nullptr;
      page = slot >> log2;
      offset = slot & ((1 << log2) - 1);
    }
    if (page < 0 || page >= cache_->num_pages) {
      s_.excluded = true;
      return nullptr;
    }
    within = static_cast<std::uint8_t>(offset);
    return cache_->pages + page * cache_->page_stride +
           page::tile_offset(cache_->layout, item_.kv_head, offset);
  }

  /// K or V of the chunk, [token][row]; zeros where a token does not count.
  void decode(KvPart which, int row, float* out) const {
    constexpr int kAhead = 4;  // tokens
    const int tokens = chunk_.tiles * kTileTokens;
    for (int t = 0; t < tokens; ++t, out += row) {
      if (which == KvPart::kK && t + kAhead < tokens) prefetch(t + kAhead);
      if (data_[t] == nullptr) {
        std::fill_n(out, row, 0.0f);
        continue;
      }
      for (int i = 0; i < cache_->parts.count; ++i) {
        const page::Part& part = cache_->parts.part[i];
        if (part.first_in(which) >= 0) decode_span(i, data_[t], within_[t], out + part.first_in(which));
      }
    }
  }

  void decode_span(int index, const std::uint8_t* tile, int offset, float* out) const {
    const page::Part& part = cache_->parts.part[index];
    const page::PlaceTable* table = cache_->tables[index];
    const StaticScale& scale = cache_->scales[index];
    if (table == nullptr)
      return kDecodeRow[static_cast<int>(cache_->elements[index])](part, scale, tile, offset, out);
    codec::with_codec(part.format, [&](auto codec) {
      read_span<decltype(codec)>(part, table, scale, tile, offset, item_.kv_head, out);
    });
  }

  /// The record of a token of a latent cache; hardware finds its way within others.
  void prefetch(int t) const {
    if (data_[t] == nullptr) return;
    const std::int64_t bytes = cache_->layout.row_bytes;
    const std::uint8_t* record = data_[t] + within_[t] % kTileTokens * bytes;
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(record + i);
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  const Gather& gather_;
  const GatherCache* cache_ = nullptr;
  int second_ = INT32_MAX;  ///< where the second list begins
  Chunk chunk_;
  const std::uint8_t* data_[kGatheredTokens];  ///< the token's tile; null: it does not count
  std::uint8_t within_[kGatheredTokens];
};

void Gathered(const Layer& layer, const Item& item, Scratch& scratch) {
  BlockedItem<TokenSource>(layer, item, scratch).run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(Gathered);

void gathered_item(const Layer& layer, const Item& item, Scratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Gathered)(layer, item, scratch);
}

}  // namespace halftone::cpu
#endif  // HWY_ONCE
