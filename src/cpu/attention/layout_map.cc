#include "cpu/attention/layout_map.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "format/page.h"

namespace halftone::cpu {
namespace {

int bits_of(Element e) { return four_bits(e) ? 4 : 8; }

/// A run of adjacent units: one token's share of a K section, or one g's share of a V section.
struct Run {
  int offset;
  int length;
};

/// Runs of `strings` strings (4 of a K token, or the 4 of one g of V) for run index 0; run i of a section
/// follows at i * length. Sections come from the chunks that page::chunked() makes.
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

/// One slice of K before slices are sorted into segments.
struct Slice {
  std::int32_t offset;
  std::int32_t stride;
  std::vector<std::int16_t> dims;  // [plane][lane], -1: padding
};

std::vector<Slice> k_slices(Element element, int dim, int lanes) {
  std::vector<Slice> slices;
  if (row_order(element)) {
    for (int d = 0; d < dim; ++d) {
      if (d % lanes == 0) slices.push_back({d * unit_bytes(element), 0, {}});
      slices.back().dims.push_back(static_cast<std::int16_t>(d));
    }
    return slices;
  }
  for (const Run& run : sections(64, dim * bits_of(element) / 32)) {
    for (int unit = 0; unit < run.length; unit += lanes) {
      Slice slice{run.offset + unit, run.length, {}};
      for (int plane = 0; plane < planes_of(element); ++plane) {
        for (int lane = 0; lane < lanes; ++lane) {
          const bool inside = unit + lane < run.length;  // a short run ends within the slice
          const page::Place place{run.offset + unit + lane, plane};
          const int d = inside ? page::k_element(bits_of(element), place, dim).dim : -1;
          slice.dims.push_back(static_cast<std::int16_t>(d));
        }
      }
      slices.push_back(std::move(slice));
    }
  }
  return slices;
}

int first_group(const Slice& slice, int group_size) {
  return group_size == 0 ? 0 : slice.dims[0] / group_size;
}

/// Lane groups relative to the first lane's; padding lanes count as the first lane's group.
std::array<std::int32_t, kMaxLanes> relative_groups(const Slice& slice, int lanes, int group_size) {
  std::array<std::int32_t, kMaxLanes> groups{};
  if (group_size == 0) return groups;
  for (int i = 0; i < lanes; ++i) {
    groups[i] = slice.dims[i] < 0 ? 0 : slice.dims[i] / group_size - first_group(slice, group_size);
  }
  return groups;
}

/// Adds a slice to the last run if it continues it.
void append_slice(const Slice& slice, std::vector<KRun>& runs) {
  if (!runs.empty() && runs.back().stride == slice.stride) {
    KRun& run = runs.back();
    const std::int32_t step = slice.offset - (run.offset + (run.count - 1) * run.step);
    if (run.count == 1 || step == run.step) {
      run.step = step;
      ++run.count;
      return;
    }
  }
  runs.push_back({slice.offset, slice.stride, 0, 1});
}

/// KMap::groups; padding goes with the column before it.
std::vector<std::vector<KRange>> group_columns(const std::vector<std::int16_t>& dims, const MapKey& key) {
  const auto of = [&](int column) { return key.group_size == 0 ? 0 : dims[column] / key.group_size; };
  std::vector<std::vector<KRange>> groups(key.group_size == 0 ? 1 : key.dim / key.group_size);
  int group = 0;
  KRange range{0, 0};
  for (int i = 0; i < static_cast<int>(dims.size()); ++i) {
    const int next = dims[i] < 0 ? group : of(i);
    if (next != group) {
      if (range.count > 0) groups[group].push_back(range);
      range = {i, 0};
      group = next;
    }
    ++range.count;
  }
  groups[group].push_back(range);
  return groups;
}

}  // namespace

Element element_of(const KvFormat& f) {
  switch (f.dtype) {
    case DType::kFloat16:
      return Element::kF16;
    case DType::kFloat8E4M3:
      return Element::kE4M3;
    case DType::kInt8:
      return f.asymmetric ? Element::kU8 : Element::kI8;
    case DType::kInt4:
      return f.asymmetric ? Element::kU4 : Element::kI4;
    case DType::kFloat32:
      return Element::kF32;
    default:
      return Element::kBF16;
  }
}

DType dtype_of(Element e) {
  return four_bits(e) ? DType::kInt4 : e == Element::kE4M3 ? DType::kFloat8E4M3 : DType::kInt8;
}

KMap make_k_map(const MapKey& key, int lanes) {
  const Element element = key.element;
  const int dim = key.dim, group_size = key.group_size;
  KMap map;
  map.lanes = lanes;
  map.planes = planes_of(element);
  const std::vector<Slice> slices = k_slices(element, dim, lanes);
  std::vector<bool> taken(slices.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (taken[i]) continue;
    // A segment: this slice and all later ones with the same lane groups.
    KSegment segment{first_group(slices[i], group_size), relative_groups(slices[i], lanes, group_size), {}};
    for (std::size_t j = i; j < slices.size(); ++j) {
      const Slice& slice = slices[j];
      if (taken[j] || first_group(slice, group_size) != segment.first_group ||
          relative_groups(slice, lanes, group_size) != segment.lane_group) {
        continue;
      }
      taken[j] = true;
      append_slice(slice, segment.runs);
      map.dims.insert(map.dims.end(), slice.dims.begin(), slice.dims.end());
    }
    map.segments.push_back(std::move(segment));
  }
  map.groups = group_columns(map.dims, key);
  return map;
}

namespace {

/// The step that slice [byte, byte + lanes) of V data is, relative to `base`.
VStep make_step(Element element, int dim, int group_size, int lanes, int byte, int base) {
  VStep step{};
  step.offset = byte - base;
  std::array<int, kMaxLanes> source{};  // group * 16 + token
  for (int lane = 0; lane < lanes; ++lane) {
    const page::Element e = page::v_element(page::v_order(dtype_of(element)), {byte + lane, 0}, dim);
    source[lane] = (group_size == 0 ? 0 : e.dim / group_size) * kTileTokens + e.token;
  }
  const int first = source[0] / lanes;
  step.token_a = step.token_b = first * lanes % kTileTokens;
  for (int lane = 0; lane < lanes; ++lane) {
    const bool other = source[lane] / lanes != first;
    if (other) step.token_b = source[lane] / lanes * lanes % kTileTokens;
    step.use_b[lane] = other ? -1 : 0;
    step.pick[lane] = source[lane] % lanes;
  }
  return step;
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

}  // namespace

VMap make_v_map(const MapKey& key, int lanes) {
  const Element element = key.element;
  const int dim = key.dim, group_size = key.group_size;
  VMap map;
  map.lanes = lanes;
  map.planes = planes_of(element);
  if (row_order(element)) {
    map.classes.push_back({0, dim / lanes, false, 0, 0, {}});
    for (int d = 0; d < dim; ++d) {
      if (d % lanes == 0) map.base.push_back(d * unit_bytes(element));
      map.dims.push_back(static_cast<std::int16_t>(d));
    }
    return map;
  }
  const auto group = [&](std::int16_t d) { return group_size == 0 ? 0 : d / group_size; };
  std::vector<Accumulator> all = packed_accumulators(element, dim, group_size, lanes);
  while (!all.empty()) {
    const Accumulator& head = all.front();
    VClass cls{map.accumulators(),          0,         false, group(head.dims.front()),
               group(head.dims[lanes - 1]), head.steps};
    std::vector<Accumulator> rest;
    for (Accumulator& a : all) {
      if (group(a.dims.front()) != cls.group_a || group(a.dims[lanes - 1]) != cls.group_b ||
          a.steps != cls.steps) {
        rest.push_back(std::move(a));
        continue;
      }
      map.base.push_back(a.base);
      map.dims.insert(map.dims.end(), a.dims.begin(), a.dims.end());
      ++cls.count;
    }
    cls.steps_repeat = !map.classes.empty() && map.classes.back().steps == cls.steps;
    map.classes.push_back(std::move(cls));
    all = std::move(rest);
  }
  return map;
}

KColumns make_k_columns(const MapKey& key) {
  KColumns map;
  if (key.element < Element::kI8) return map;
  const int bits = bits_of(key.element), codes = 32 / bits;
  std::vector<std::vector<std::int16_t>> columns;
  for (const Run& run : sections(64, key.dim * bits / 32)) {
    map.sections.push_back({run.offset, run.length, run.length / 4});
    for (int byte = 0; byte < run.length; byte += 4) {
      auto& dims = columns.emplace_back();
      for (int k = 0; k < codes; ++k) {
        const page::Place place{run.offset + byte + k * bits / 8, bits == 4 ? k % 2 : 0};
        dims.push_back(static_cast<std::int16_t>(page::k_element(bits, place, key.dim).dim));
      }
    }
  }
  if (key.group_size != 0) map.groups = key.dim / key.group_size;
  for (int group = 0; group < map.groups; ++group) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      if (key.group_size != 0 && columns[c][0] / key.group_size != group) continue;
      map.order.push_back(static_cast<std::int32_t>(c));
      map.dims.insert(map.dims.end(), columns[c].begin(), columns[c].end());
    }
  }
  return map;
}

VBytes make_v_bytes(const MapKey& key) {
  if (key.element < Element::kI8) return {};
  const page::VOrder order = page::v_order(dtype_of(key.element));
  const auto group = [&](int dim) { return key.group_size == 0 ? 0 : dim / key.group_size; };
  struct Vector {
    VByteClass cls;
    std::int32_t offset;
    std::vector<std::int16_t> dims;
  };
  std::vector<Vector> vectors;
  VBytes map;
  const int bytes = kTileTokens * key.dim * bits_of(key.element) / 8;
  if (bytes % 64 != 0) return {};
  for (int base = 0; base < bytes; base += 64) {
    std::array<std::uint8_t, 64> shuffle{}, token{};
    std::array<int, 16> dim{};
    for (int lane = 0; lane < 64; lane += 16) {
      const auto element = [&](int i) { return page::v_element(order, {base + lane + i, 0}, key.dim); };
      std::array<int, 16> byte{};
      for (int i = 0; i < 16; ++i) byte[i] = i;
      std::sort(byte.begin(), byte.end(), [&](int a, int b) {
        return std::pair(element(a).dim, element(a).token) < std::pair(element(b).dim, element(b).token);
      });
      for (int i = 0; i < 16; ++i) {
        shuffle[lane + i] = static_cast<std::uint8_t>(byte[i]);
        token[lane + i] = static_cast<std::uint8_t>(element(byte[i]).token);
        if (i % 4 == 0) dim[(lane + i) / 4] = element(byte[i]).dim;
        if (element(byte[i]).dim != dim[(lane + i) / 4]) return {};
      }
    }
    if (base == 0) {
      map.shuffle = shuffle;
      map.token = token;
    } else if (shuffle != map.shuffle || token != map.token) {
      return {};
    }
    Vector vector{{0, 0, group(dim[0]), group(dim[0]), 0}, base, {}};
    for (int i = 0; i < 16; ++i) {
      if (group(dim[i]) == vector.cls.group_a) continue;
      if (vector.cls.second != 0 && group(dim[i]) != vector.cls.group_b) return {};
      vector.cls.group_b = group(dim[i]);
      vector.cls.second |= static_cast<std::uint16_t>(1 << i);
    }
    for (int plane = 0; plane < planes_of(key.element); ++plane) {
      for (int i = 0; i < 16; ++i) {
        const page::Place place{base + i * 4 / 16 * 16 + map.shuffle[i * 4], plane};
        vector.dims.push_back(static_cast<std::int16_t>(page::v_element(order, place, key.dim).dim));
      }
    }
    vectors.push_back(std::move(vector));
  }
  while (!vectors.empty()) {
    VByteClass cls = vectors.front().cls;
    cls.first = static_cast<int>(map.offset.size());
    std::vector<Vector> rest;
    for (Vector& v : vectors) {
      if (!v.cls.same_groups(cls)) {
        rest.push_back(std::move(v));
        continue;
      }
      map.offset.push_back(v.offset);
      map.dims.insert(map.dims.end(), v.dims.begin(), v.dims.end());
      ++cls.count;
    }
    map.classes.push_back(cls);
    vectors = std::move(rest);
  }
  return map;
}

const LayerMaps& layer_maps(const MapKey& k, const MapKey& v, int lanes) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::tuple<MapKey, MapKey, int>, LayerMaps>;  // never destroyed
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(k, v, lanes);
  auto at = all.find(key);
  if (at == all.end()) {
    LayerMaps maps{make_k_map(k, lanes), make_v_map(v, lanes), make_v_quads(v),
                   make_k_columns(k),    make_v_bytes(v),      {}};
    maps.v_pairs = make_v_pairs(v, maps.v_quads);
    at = all.emplace(key, std::move(maps)).first;
  }
  return at->second;
}

}  // namespace halftone::cpu
