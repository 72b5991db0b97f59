// How a vector unit of N fp32 lanes walks a tile: which bytes one load brings, and which token, dim and scale
// each lane then holds. Computed from format/page.h, the only description of the layout, once per (element,
// dim, group size, lanes), and kept.
//
// A slice is N adjacent units: N bytes of a packed format, N elements otherwise. A 4-bit slice widens to two
// planes of N codes, the low and the high nibbles; all others to one.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "halftone/cache.h"

namespace halftone::cpu {

inline constexpr int kMaxLanes = 16;

/// What a unit of K or V holds. kI8 and kI4 are symmetric codes, kU8 and kU4 asymmetric ones, which have a
/// min.
enum class Element : std::uint8_t { kF32, kF16, kBF16, kE4M3, kI8, kI4, kU8, kU4 };
inline constexpr int kElements = 8;

/// Of codes in a cache.
Element element_of(const KvFormat& f);
/// The other way round, of a packed element.
DType dtype_of(Element e);

constexpr bool row_order(Element e) { return e <= Element::kBF16; }
constexpr int unit_bytes(Element e) {
  return e == Element::kF32 ? 4 : e == Element::kF16 || e == Element::kBF16 ? 2 : 1;
}
constexpr bool four_bits(Element e) { return e == Element::kI4 || e == Element::kU4; }
constexpr bool asymmetric(Element e) { return e >= Element::kU8; }
constexpr int planes_of(Element e) { return four_bits(e) ? 2 : 1; }

/// K: `count` slices, `step` bytes apart, whose lanes belong to the same scale groups. The first slice of
/// token t begins at byte offset + t * stride of the tile's K data; formats in row order take the stride from
/// the tile instead.
struct KRun {
  std::int32_t offset;
  std::int32_t stride;
  std::int32_t step;
  std::int32_t count;
};

/// Runs whose lanes belong to the same scale groups: lane i to group `first_group + lane_group[i]`.
struct KSegment {
  int first_group;
  std::array<std::int32_t, kMaxLanes> lane_group;
  std::vector<KRun> runs;
};

/// Columns [first, first + count) of a decoded token, both multiples of four unless lanes are fewer.
struct KRange {
  int first;
  int count;
};

struct KMap {
  int lanes = 0;
  int planes = 1;
  std::vector<KSegment> segments;  ///< one if the whole token shares a scale
  std::vector<std::int16_t>
      dims;  ///< [slice][plane][lane], slices in the order of segments and runs; -1: padding
  std::vector<std::vector<KRange>> groups;  ///< where the dims of each scale group are among the columns

  int width() const { return static_cast<int>(dims.size()); }
};

/// K of integer codes, dword by dword, for kernels whose lanes are tokens: a token's row of `columns` dwords
/// lies at offset + token * stride of the tile's K data; sections follow each other in the column numbers.
struct KSection {
  std::int32_t offset;
  std::int32_t stride;
  std::int32_t columns;
};

struct KColumns {
  std::vector<KSection> sections;   ///< empty for other elements
  int groups = 1;                   ///< that have scales of their own, equally many columns each
  std::vector<std::int32_t> order;  ///< column numbers, group after group
  std::vector<std::int16_t> dims;   ///< [column of `order`][code from low bits to high]: what it holds

  int columns() const { return static_cast<int>(order.size()); }
};

/// V, packed: one slice of an accumulator. What belongs to a token reaches the lanes from two arrays of 16
/// values, one per group of the class: lane i takes element `pick[i]` of the N values at array_b[token_b]
/// where use_b[i] is -1, of those at array_a[token_a] where it is 0.
struct VStep {
  std::int32_t offset;  ///< bytes, from the accumulator's base
  std::int32_t token_a;
  std::int32_t token_b;
  std::array<std::int32_t, kMaxLanes> pick;
  std::array<std::int32_t, kMaxLanes> use_b;
  bool operator==(const VStep&) const = default;
};

/// Accumulators [first, first + count) that are filled by the same steps. One accumulator has N lanes per
/// plane, each a partial sum of one dim over some of the tokens.
struct VClass {
  int first;
  int count;
  bool steps_repeat;  ///< they are those of the class before
  int group_a;        ///< scale groups of the lanes
  int group_b;
  std::vector<VStep> steps;  ///< empty in row order, where a step is a token
};

struct VMap {
  int lanes = 0;
  int planes = 1;
  std::vector<VClass> classes;
  std::vector<std::int32_t>
      base;  ///< [accumulator] byte offset in the tile's V data (in row order: in the row)
  std::vector<std::int16_t> dims;  ///< [accumulator][plane][lane]

  int accumulators() const { return static_cast<int>(base.size()); }
};

/// Vectors of V that get their bytes' weights from the same groups: dwords of `second` from group_b, others
/// from group_a.
struct VByteClass {
  int first;
  int count;
  int group_a;
  int group_b;
  std::uint16_t second;
  bool same_groups(const VByteClass& o) const {
    return group_a == o.group_a && group_b == o.group_b && second == o.second;
  }
};

/// V of integer codes, 64 bytes at a time, for kernels that multiply bytes and add up four products:
/// `shuffle`, which moves bytes within their 16, makes each dword four tokens of one dim (4 bits: of one dim
/// in the low nibbles and one in the high ones), and byte i of every vector then belongs to token `token[i]`
/// of the tile.
struct VBytes {
  std::array<std::uint8_t, 64> shuffle{};
  std::array<std::uint8_t, 64> token{};
  std::vector<VByteClass> classes;   ///< empty if V has no such order (short strings of odd head sizes)
  std::vector<std::int32_t> offset;  ///< [vector] bytes in the tile's V data
  std::vector<std::int16_t> dims;    ///< [vector][plane][16 dwords]
};

/// Where a decoded V tile of 16 * dim floats, codes in the order of their bytes (4 bits: all low nibbles,
/// then all high ones), keeps four adjacent dims: value (token, d) of quad q is at base[q] + token[token] +
/// dim[d].
struct QuadClass {
  std::array<std::int32_t, 16> token;
  std::array<std::int32_t, 4> dim;
  std::vector<std::int32_t> base;
  std::vector<std::int32_t> first_dim;
  std::int32_t pair = 0;  ///< distance of tokens 2 i and 2 i + 1; 0: pair_at() does not hold
  /// Where the 16 values of four_tokens(i) lie, two times eight next to each other: [i] from the base, and
  /// `second` beyond that; value t of dim d is the shuffle[4 d + t]-th of them. -1: they lie otherwise.
  std::array<std::int32_t, 4> word{-1, -1, -1, -1};
  std::int32_t second = 0;
  std::array<std::uint8_t, 16> shuffle{};

  /// Where a dword of tokens 2 i and 2 i + 1 lies, if each takes the place of two values; `at`: of the first.
  std::int32_t pair_at(std::int32_t at) const { return at / (2 * pair) * pair + at % pair; }
};

/// The tokens of a tile whose codes kernels of 8-bit operands multiply at a time: those which a packed 8-bit
/// V keeps together.
constexpr std::array<int, 4> four_tokens(int i) { return {2 * i, 2 * i + 1, 2 * i + 8, 2 * i + 9}; }

/// K or V of a layer as far as its maps depend on it. group_size 0: one scale for all dims of a token.
struct MapKey {
  Element element;
  int dim;
  int group_size;
  friend constexpr auto operator<=>(const MapKey&, const MapKey&) = default;
};

KMap make_k_map(const MapKey& key, int lanes);
VMap make_v_map(const MapKey& key, int lanes);
std::vector<QuadClass> make_v_quads(const MapKey& key);
/// Per 32 values of a decoded V tile the `pair` of all of them, 1 or 2. Empty in row order, or if they are
/// not those of whole pairs.
std::vector<std::uint8_t> make_v_pairs(const MapKey& key, const std::vector<QuadClass>& quads);
KColumns make_k_columns(const MapKey& key);
VBytes make_v_bytes(const MapKey& key);

/// What the kernels need for one pair of K and V. Built on first use; the reference lives until the process
/// ends. Thread-safe; throws std::bad_alloc.
struct LayerMaps {
  KMap k;
  VMap v;
  std::vector<QuadClass> v_quads;
  KColumns k_columns;
  VBytes v_bytes;
  std::vector<std::uint8_t> v_pairs;
};
const LayerMaps& layer_maps(const MapKey& k, const MapKey& v, int lanes);

}  // namespace halftone::cpu
