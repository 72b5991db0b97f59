#include "cpu/layout_map.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "format/page.h"

namespace halftone::cpu {
namespace {

DType dtype_of(Element e) {
  return e == Element::kI4 ? DType::kInt4 : e == Element::kE4M3 ? DType::kFloat8E4M3 : DType::kInt8;
}

int bits_of(Element e) { return e == Element::kI4 ? 4 : 8; }

/// A run of adjacent units: one token's share of a K section, or one g's share of a V section.
struct Run {
  int offset;
  int length;
};

/// Runs of `strings` strings (4 of a K token, or the 4 of one g of V) for run index 0; run i of a section follows at
/// i * length. Sections come from the chunks that page::chunked() makes.
std::vector<Run> sections(int count, int length) {
  std::vector<Run> runs;
  for (int pos = 0; pos < length;) {
    const int rest = length - pos;
    const int chunk = rest >= 16 ? 16 : rest >= 8 ? 8 : rest >= 4 ? 4 : 2;
    runs.push_back({page::chunked(0, count, length, pos), 4 * chunk});
    pos += chunk;
  }
  return runs;
}

/// Lane groups relative to the first lane's; padding lanes (dim -1) count as the first lane's group.
std::array<std::int32_t, kMaxLanes> relative_groups(const std::int16_t* dims, int lanes, int group_size) {
  std::array<std::int32_t, kMaxLanes> groups{};
  if (group_size == 0) return groups;
  for (int i = 0; i < lanes; ++i) groups[i] = dims[i] < 0 ? 0 : dims[i] / group_size - dims[0] / group_size;
  return groups;
}

KMap build_k_map(Element element, int dim, int group_size, int lanes) {
  KMap map;
  map.lanes = lanes;
  map.planes = planes_of(element);
  std::vector<KSlice> slices;
  std::vector<std::int16_t> dims;
  if (row_order(element)) {
    for (int d = 0; d < dim; ++d) {
      if (d % lanes == 0) slices.push_back({d * unit_bytes(element), 0});
      dims.push_back(static_cast<std::int16_t>(d));
    }
  } else {
    for (const Run& run : sections(64, dim * bits_of(element) / 32)) {
      for (int unit = 0; unit < run.length; unit += lanes) {
        slices.push_back({run.offset + unit, run.length});
        for (int plane = 0; plane < map.planes; ++plane) {
          for (int lane = 0; lane < lanes; ++lane) {
            const bool inside = unit + lane < run.length;  // a short run ends within the slice
            const page::Place place{run.offset + unit + lane, plane};
            dims.push_back(inside ? static_cast<std::int16_t>(page::k_element(bits_of(element), place, dim).dim)
                                  : std::int16_t{-1});
          }
        }
      }
    }
  }
  // Slices with equal lane groups become neighbours.
  const int per_slice = map.planes * lanes;
  std::vector<bool> taken(slices.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (taken[i]) continue;
    const std::int16_t* head = dims.data() + i * per_slice;
    const int first = group_size == 0 ? 0 : head[0] / group_size;
    const auto groups = relative_groups(head, lanes, group_size);
    KSegment segment{static_cast<int>(map.slices.size()), 0, first, groups};
    for (std::size_t j = i; j < slices.size(); ++j) {
      const std::int16_t* other = dims.data() + j * per_slice;
      if (taken[j] || (group_size != 0 && other[0] / group_size != first) ||
          relative_groups(other, lanes, group_size) != groups) {
        continue;
      }
      taken[j] = true;
      map.slices.push_back(slices[j]);
      map.dims.insert(map.dims.end(), other, other + per_slice);
    }
    segment.end = static_cast<int>(map.slices.size());
    map.segments.push_back(segment);
  }
  return map;
}

/// The step that slice [byte, byte + lanes) of V data is, relative to `base`.
VStep make_step(Element element, int dim, int group_size, int lanes, int byte, int base) {
  VStep step{};
  step.offset = byte - base;
  std::array<int, kMaxLanes> source{};
  for (int lane = 0; lane < lanes; ++lane) {
    const page::Element e = page::v_element(page::v_order(dtype_of(element)), {byte + lane, 0}, dim);
    source[lane] = (group_size == 0 ? 0 : e.dim / group_size) * kTileTokens + e.token;
  }
  step.from_a = source[0] / lanes * lanes;
  step.from_b = step.from_a;
  for (int lane = 0; lane < lanes; ++lane) {
    const int from = source[lane] / lanes * lanes;
    if (from != step.from_a) step.from_b = from;
    step.use_b[lane] = from != step.from_a ? -1 : 0;
    step.pick[lane] = source[lane] % lanes;
  }
  return step;
}

bool same_step(const VStep& a, const VStep& b) {
  return a.offset == b.offset && a.from_a == b.from_a && a.from_b == b.from_b && a.pick == b.pick &&
         a.use_b == b.use_b;
}

/// One accumulator before accumulators are sorted into classes.
struct Accumulator {
  int base = 0;
  std::vector<std::int16_t> dims;  // [plane][lane]
  std::vector<VStep> steps;
};

std::vector<Accumulator> packed_accumulators(Element element, int dim, int group_size, int lanes) {
  const page::VOrder order = page::v_order(dtype_of(element));
  std::vector<Accumulator> all;
  for (const Run& run : sections(32, dim * bits_of(element) / 16)) {
    for (int g = 0; g < 8; ++g) {
      const std::size_t first = all.size();
      for (int unit = 0; unit < run.length; unit += lanes) {
        const int byte = run.offset + g * run.length + unit;
        std::vector<std::int16_t> dims;
        for (int plane = 0; plane < planes_of(element); ++plane) {
          for (int lane = 0; lane < lanes; ++lane) {
            dims.push_back(static_cast<std::int16_t>(page::v_element(order, {byte + lane, plane}, dim).dim));
          }
        }
        auto at = std::find_if(all.begin() + static_cast<std::ptrdiff_t>(first), all.end(),
                               [&](const Accumulator& a) { return a.dims == dims; });
        if (at == all.end()) at = all.insert(all.end(), Accumulator{byte, dims, {}});
        at->steps.push_back(make_step(element, dim, group_size, lanes, byte, at->base));
      }
    }
  }
  return all;
}

VMap build_v_map(Element element, int dim, int group_size, int lanes) {
  VMap map;
  map.lanes = lanes;
  map.planes = planes_of(element);
  if (row_order(element)) {
    map.classes.push_back({0, dim / lanes, {}});
    for (int d = 0; d < dim; ++d) {
      if (d % lanes == 0) map.base.push_back(d * unit_bytes(element));
      map.dims.push_back(static_cast<std::int16_t>(d));
    }
    return map;
  }
  std::vector<Accumulator> all = packed_accumulators(element, dim, group_size, lanes);
  while (!all.empty()) {
    VClass cls{map.accumulators(), 0, all.front().steps};
    std::vector<Accumulator> rest;
    for (Accumulator& a : all) {
      if (!std::equal(a.steps.begin(), a.steps.end(), cls.steps.begin(), cls.steps.end(), same_step)) {
        rest.push_back(std::move(a));
        continue;
      }
      map.base.push_back(a.base);
      map.dims.insert(map.dims.end(), a.dims.begin(), a.dims.end());
      ++cls.count;
    }
    map.classes.push_back(std::move(cls));
    all = std::move(rest);
  }
  return map;
}

std::vector<QuadClass> build_v_quads(Element element, int dim) {
  const auto address = [&](int token, int d) {
    if (row_order(element)) return token * dim + d;
    const page::Place place = page::v_place(page::v_order(dtype_of(element)), token, d, dim);
    return place.byte + place.nibble * kTileTokens * dim / 2;
  };
  std::vector<QuadClass> classes;
  for (int first = 0; first < dim; first += 4) {
    QuadClass quad;
    const int base = address(0, first);
    for (int t = 0; t < 16; ++t) quad.token[t] = address(t, first) - base;
    for (int d = 0; d < 4; ++d) quad.dim[d] = address(0, first + d) - base;
    auto at = std::find_if(classes.begin(), classes.end(),
                           [&](const QuadClass& c) { return c.token == quad.token && c.dim == quad.dim; });
    if (at == classes.end()) at = classes.insert(classes.end(), quad);
    at->base.push_back(base);
    at->first_dim.push_back(first);
  }
  return classes;
}

/// Built on first use, never removed: references stay valid.
template <class Map, class Build>
const Map& cached(Element element, int dim, int group_size, int lanes, Build build) {
  static std::mutex mutex;
  static auto& maps = *new std::map<std::tuple<Element, int, int, int>, Map>;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(element, dim, group_size, lanes);
  auto at = maps.find(key);
  if (at == maps.end()) at = maps.emplace(key, build()).first;
  return at->second;
}

}  // namespace

const KMap& k_map(Element element, int dim, int group_size, int lanes) {
  return cached<KMap>(element, dim, group_size, lanes,
                      [&] { return build_k_map(element, dim, group_size, lanes); });
}

const VMap& v_map(Element element, int dim, int group_size, int lanes) {
  return cached<VMap>(element, dim, group_size, lanes,
                      [&] { return build_v_map(element, dim, group_size, lanes); });
}

const std::vector<QuadClass>& v_quads(Element element, int dim) {
  return cached<std::vector<QuadClass>>(element, dim, 0, 0, [&] { return build_v_quads(element, dim); });
}

}  // namespace halftone::cpu
