#include "plan/check_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdlib>

#include "plan/fail.h"

namespace halftone::planning {
namespace {

std::string rule_shape_text(const TensorRule& rule) {
  std::string text;
  for (const std::int64_t size : rule.shape) {
    text += (text.empty() ? "" : ", ") + (size == kAnySize ? std::string("n") : fmt::format("{}", size));
  }
  return "[" + text + "]";
}

std::string dtypes_text(std::initializer_list<DType> dtypes) {
  std::string text;
  std::size_t i = 0;
  for (const DType t : dtypes) {
    text += i == 0 ? "" : i + 1 == dtypes.size() ? " or " : ", ";
    text += dtype_name(t);
    ++i;
  }
  return text;
}

/// Of the widest pointers in use: x86-64 with five levels of page tables.
constexpr int kAddressBits = 57;

struct Span {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

Span span_of(const TensorView& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {base, base};
    const std::int64_t reach = (t.shape[i] - 1) * t.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t size = dtype_bits(t.dtype) / 8;
  return {base + static_cast<std::uintptr_t>(low * size),
          base + static_cast<std::uintptr_t>((high + 1) * size)};
}

void check_shape(const TensorView& t, const TensorRule& rule) {
  if (t.rank != static_cast<int>(rule.shape.size())) {
    invalid("{} has rank {}, but must have shape {}: pass a view of rank {}.", rule.name, t.rank,
            rule_shape_text(rule), rule.shape.size());
  }
  std::int64_t bytes = 8;
  int i = 0;
  for (const std::int64_t wanted : rule.shape) {
    const std::int64_t size = t.shape[i++];
    if (size < 0 || (wanted != kAnySize && size != wanted)) {
      invalid("{} has shape {}, but must have shape {}: dimension {} is {}, pass {}.", rule.name,
              shape_text(t), rule_shape_text(rule), i - 1, size,
              wanted == kAnySize ? "0 or more" : fmt::format("{}", wanted));
    }
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) {
      invalid("{} has shape {}, but its bytes must fit into 63 bits: pass the real shape.", rule.name,
              shape_text(t));
    }
  }
}

void check_strides(const TensorView& t, const TensorRule& rule) {
  std::int64_t dense = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    const bool free = rule.strides == Strides::kLastContiguous && i < t.rank - 1;
    if (!free && t.shape[i] > 1 && t.strides[i] != dense) {
      invalid("{} has stride {} in dimension {}, but must be {} to be contiguous: pass a {} copy.", rule.name,
              t.strides[i], i, dense,
              rule.strides == Strides::kContiguous ? "contiguous" : "last-dim-contiguous");
    }
    dense *= t.shape[i];
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(t.strides[i], std::int64_t{64} * std::max<std::int64_t>(t.shape[i], 1),
                               &reach)) {
      invalid("{} has stride {} in dimension {}, but its bytes must fit into 57 bits: pass the real strides.",
              rule.name, t.strides[i], i);
    }
  }
  const Span span = span_of(t);
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  if (span.begin > base || span.end < base || span.end >> kAddressBits != 0) {
    invalid("{} has shape {} with strides [{}], but must lie within {}-bit addresses: pass the real strides.",
            rule.name, shape_text(t), fmt::join(t.strides.begin(), t.strides.begin() + t.rank, ", "),
            kAddressBits);
  }
}

}  // namespace

std::string shape_text(const TensorView& t) {
  std::string text;
  for (int i = 0; i < std::clamp(t.rank, 0, TensorView::kMaxRank); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", t.shape[i]);
  }
  return "[" + text + "]";
}

void check_tensor(const TensorView& t, const TensorRule& rule) {
  if (!given(t)) {
    invalid("{} is absent, but must have shape {}: pass it.", rule.name, rule_shape_text(rule));
  }
  check_shape(t, rule);
  if (std::ranges::find(rule.dtypes, t.dtype) == rule.dtypes.end()) {
    invalid("{} is {}, but must be {}: convert it.", rule.name,
            t.dtype <= DType::kInt64 ? dtype_name(t.dtype) : "of an unknown dtype", dtypes_text(rule.dtypes));
  }
  if (t.device != rule.device) {
    invalid("{} is on {}, but must be on {} like the rest: copy it there.", rule.name, device_name(t.device),
            device_name(rule.device));
  }
  if (t.numel() == 0) return;  // some libraries state strides of 0 then
  check_strides(t, rule);
  if (t.data == nullptr) {
    invalid("{} has a null address, but its shape is {}: pass its data.", rule.name, shape_text(t));
  }
  const auto align = static_cast<std::uintptr_t>(dtype_bits(t.dtype) / 8);
  if (const auto rest = reinterpret_cast<std::uintptr_t>(t.data) % align; rest != 0) {
    invalid(
        "{} starts {} bytes past a multiple of {}, but must be aligned to its element size: use {}-byte "
        "aligned memory.",
        rule.name, rest, align, align);
  }
}

void check_absent(const TensorView& t, std::string_view name, std::string_view reason) {
  if (given(t)) invalid("{} is present, but {}: leave it out.", name, reason);
}

void check_disjoint(const TensorView& out, std::string_view out_name, const TensorView& in,
                    std::string_view in_name) {
  const NamedTensor outputs[] = {{out, out_name}}, inputs[] = {{in, in_name}};
  check_disjoint(outputs, inputs);
}

void check_disjoint(std::span<const NamedTensor> outputs, std::span<const NamedTensor> inputs) {
  std::array<Span, 4> spans;  // an absent tensor overlaps nothing
  assert(outputs.size() <= spans.size());
  const auto check = [&](const NamedTensor& in, std::size_t count) {
    if (!in.view.present()) return Span{};
    const Span b = span_of(in.view);
    for (std::size_t i = 0; i < count; ++i) {
      if (spans[i].begin < b.end && b.begin < spans[i].end) {
        invalid("{} overlaps {}, but an output must not alias an input: use separate memory.",
                outputs[i].name, in.name);
      }
    }
    return b;
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) spans[i] = check(outputs[i], i);
  for (const NamedTensor& in : inputs) check(in, outputs.size());
}

void check_no_self_overlap(const TensorView& out, std::string_view name) {
  if (out.numel() == 0) return;
  std::int64_t reach = 0;  // of the dims with smaller strides
  std::array<bool, TensorView::kMaxRank> seen{};
  for (int round = 0; round < out.rank; ++round) {
    int next = -1;
    for (int i = 0; i < out.rank; ++i) {
      if (seen[i] || out.shape[i] <= 1) continue;
      if (next < 0 || std::abs(out.strides[i]) < std::abs(out.strides[next])) next = i;
    }
    if (next < 0) return;
    seen[next] = true;
    const std::int64_t stride = std::abs(out.strides[next]);
    if (stride <= reach) {
      invalid(
          "{} has stride {} in dimension {}, but must be at least {} so that no two elements share memory: "
          "pass "
          "a contiguous view.",
          name, out.strides[next], next, reach + 1);
    }
    reach += (out.shape[next] - 1) * stride;
  }
}

}  // namespace halftone::planning
