#include "cli/commands/kernel_matrix.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>

#include "cli/terminal/table.h"
#include "format/head_dim.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

using planning::Backend;
using planning::Kernel;

constexpr int kPairDim = 128;

/// Decode of a paged cache, 8 query heads over 1 KV head. Q in f16 over K in f16, else in bf16.
AttentionProblem decode_of(const KvFormat& k, const KvFormat& v, int head_dim = 128, int v_head_dim = 0) {
  AttentionProblem problem;
  problem.batch = 1;
  problem.q_heads = 8;
  problem.kv = KvCacheSpec::separate(k, v, 1, head_dim, v_head_dim);
  problem.max_kv_len = 8192;
  if (k.dtype == DType::kFloat16) problem.q_dtype = DType::kFloat16;
  return problem;
}

struct Case {
  std::string_view name;
  AttentionProblem problem;
};

/// What users ask first, with head_dim 128 where it is not latent.
std::vector<Case> cases() {
  const auto decode = [](std::string_view k, std::string_view v) {
    return decode_of(parse_format(k), parse_format(v));
  };
  AttentionProblem drafts = decode("int4-g32", "int4-g32");
  drafts.max_q_len = 4;
  AttentionProblem prompt = decode("int4-g32", "int4-g32");
  prompt.max_q_len = 1024;
  AttentionProblem prompt16 = decode("bf16", "bf16");
  prompt16.max_q_len = 1024;
  AttentionProblem f32 = decode("int4-g32", "int4-g32");
  f32.q_dtype = f32.out_dtype = DType::kFloat32;
  AttentionProblem plain = decode("bf16", "bf16");
  plain.kv = KvTensors{DType::kBFloat16, 1, 128};
  AttentionProblem latent = decode("bf16", "bf16");
  latent.q_heads = 16;
  latent.kv = KvCacheSpec::latent(parse_format("fp8-g128-f32"));
  AttentionProblem listed = latent;
  listed.listed.top_k = 2048;
  AttentionProblem many_heads = listed;
  many_heads.q_heads = 128;
  many_heads.batch = 8;
  AttentionProblem latent16 = latent;
  latent16.kv = KvCacheSpec::latent(parse_format("bf16"));
  AttentionProblem more_heads = latent16;
  more_heads.q_heads = 32;
  more_heads.batch = 8;
  AttentionProblem latent8 = latent, latent4 = latent, rotary_v = latent;
  latent8.kv = KvCacheSpec::latent(parse_format("int8-g64"));
  latent4.kv = KvCacheSpec::latent(parse_format("int4-g64"));
  rotary_v.kv = KvCacheSpec::latent(parse_format("fp8-g64-e8m0"), 448, 64, 64, true);
  return {
      {"one query, int4-g32", decode("int4-g32", "int4-g32")},
      {"four queries (drafts), int4-g32", drafts},
      {"a prompt of 1024 queries, int4-g32", prompt},
      {"a prompt of 1024 queries, bf16", prompt16},
      {"K int8-head, V int4-g32", decode("int8-head", "int4-g32")},
      {"K int4-g32, V bf16", decode("int4-g32", "bf16")},
      {"scales in f32: int8-head-f32", decode("int8-token-head-f32", "int8-token-head-f32")},
      {"V of 64 dims, bf16", decode_of(parse_format("bf16"), parse_format("bf16"), 128, 64)},
      {"Q and O in f32, int4-g32", f32},
      {"plain tensors in bf16, no cache", plain},
      {"latent fp8-g128-f32, 16 heads", latent},
      {"the same, 2048 listed keys", listed},
      {"the same, 128 heads, 8 requests", many_heads},
      {"latent bf16, 16 heads", latent16},
      {"the same, 32 heads, 8 requests", more_heads},
      {"latent fp8-g64-e8m0, 16 heads", rotary_v},
      {"latent int8-g64, 16 heads", latent8},
      {"latent int4-g64, 16 heads", latent4},
  };
}

struct Operation {
  std::string_view name;
  bool offered;
};

/// What a backend does besides attention.
std::array<Operation, 3> operations(const Backend& b) {
  return {{{"append", b.append != nullptr},
           {"dequantize", b.dequantize != nullptr},
           {"merge", b.merge != nullptr}}};
}

bool has_universal(const Backend& backend) {
  return std::any_of(backend.kernels.begin(), backend.kernels.end(),
                     [](const Kernel& k) { return k.universal; });
}

/// Packed rows of the largest unit for which a backend has a kernel of these formats' own; 0: none.
int largest_unit(const Backend& backend, const AttentionProblem& problem) {
  int rows = 0;
  for (const Kernel& kernel : backend.kernels) {
    if (!kernel.universal && backend.variant(problem, kernel) >= 0) rows = std::max(rows, kernel.row_block);
  }
  return rows;
}

/// The same for one named format of K and V; nothing where head_dim cannot have it.
std::optional<int> largest_unit(const Backend& backend, const KvFormat& format, int head_dim) {
  try {
    check_format(format, head_dim, "format");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) throw;
    return std::nullopt;
  }
  return largest_unit(backend, decode_of(format, format, head_dim));
}

/// Names of the formats of V, other than K's own, that have kernels beside it.
std::vector<std::string> partners(const Backend& backend, const NamedFormat& k) {
  std::vector<std::string> names;
  for (const NamedFormat& v : named_formats()) {
    if (v.name != k.name && largest_unit(backend, decode_of(k.format, v.format, kPairDim)) > 0) {
      names.emplace_back(v.name);
    }
  }
  return names;
}

/// Whose rows a kernel is made for: limits rise, then come the kernels without one.
std::string rows_text(std::span<const Kernel> table, std::size_t row) {
  const Kernel& kernel = table[row];
  if (kernel.universal) return fmt::format("any, {} at a time", kernel.row_block);
  int from = 1;
  for (const Kernel& before : table.first(row)) {
    if (before.latent == kernel.latent) from = std::max(from, before.max_rows + 1);
  }
  return kernel.max_rows == 0 ? fmt::format("{} and more", from)
                              : fmt::format("{} to {}", from, kernel.max_rows);
}

std::string chosen(const NamedBackend& b, const AttentionProblem& problem) {
  if (!b.built()) return "not built";
  const std::vector<planning::Choice> choices = planning::choose_kernels(*b.backend, problem);
  if (choices.empty()) return "-";
  return std::string(b.backend->kernels[static_cast<std::size_t>(choices.back().index)].name);
}

void print_formats(Terminal& terminal, const NamedBackend& b) {
  print(terminal.out,
        "\n{}, K and V in one format (Q in f16 over fp16, else bf16): most packed rows that share a read of "
        "the cache, by head_dim.\n\n",
        b.name);
  Table table;
  table.column("format", Table::Align::kLeft);
  for (const int dim : kHeadDims) table.column(fmt::format("{}", dim));
  for (const NamedFormat& named : named_formats()) {
    std::vector<std::string> cells = {std::string(named.name)};
    for (const int dim : kHeadDims) {
      const std::optional<int> rows = largest_unit(*b.backend, named.format, dim);
      cells.push_back(!rows ? "-" : *rows == 0 ? "universal" : fmt::format("{}", *rows));
    }
    table.row(cells);
  }
  table.print(terminal);
  print(terminal.out, "\n{}, K and V in different formats at head_dim {}:\n\n", b.name, kPairDim);
  Table pairs;
  pairs.column("K", Table::Align::kLeft);
  pairs.column("V", Table::Align::kLeft);
  for (const NamedFormat& k : named_formats()) {
    const std::vector<std::string> names = partners(*b.backend, k);
    if (!names.empty()) pairs.row({std::string(k.name), fmt::format("{}", fmt::join(names, ", "))});
  }
  pairs.print(terminal);
}

}  // namespace

std::vector<NamedBackend> all_backends() {
  return {{"cpu", planning::find_backend(DeviceType::kCpu)},
          {"cuda", planning::find_backend(DeviceType::kCuda)}};
}

nlohmann::ordered_json kernel_matrix(const std::vector<NamedBackend>& backends) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const NamedBackend& b : backends) {
    nlohmann::ordered_json& entry = json[std::string(b.name)];
    entry["built"] = b.built();
    if (!b.built()) continue;
    for (const Operation& o : operations(*b.backend)) entry["operations"][std::string(o.name)] = o.offered;
    for (const Case& c : cases()) {
      const std::string name = chosen(b, c.problem);
      entry["cases"][std::string(c.name)] =
          name == "-" ? nlohmann::ordered_json() : nlohmann::ordered_json(name);
    }
    for (std::size_t row = 0; row < b.backend->kernels.size(); ++row) {
      const Kernel& kernel = b.backend->kernels[row];
      entry["kernels"].push_back(
          {{"name", kernel.name}, {"rows", rows_text(b.backend->kernels, row)}, {"use", kernel.use}});
    }
    if (!has_universal(*b.backend)) continue;
    for (const NamedFormat& named : named_formats()) {
      const std::string name(named.name);
      for (const int dim : kHeadDims) {
        const std::optional<int> rows = largest_unit(*b.backend, named.format, dim);
        entry["formats"][name][fmt::format("{}", dim)] =
            rows ? nlohmann::ordered_json(*rows) : nlohmann::ordered_json();
      }
      entry["pairs"][name] = partners(*b.backend, named);
    }
  }
  return json;
}

void print_kernel_matrix(Terminal& terminal, const std::vector<NamedBackend>& backends) {
  Table table;
  table.column("what runs where", Table::Align::kLeft);
  for (const NamedBackend& b : backends) table.column(std::string(b.name), Table::Align::kLeft);
  const auto row = [&](std::string_view name, const auto& cell) {
    std::vector<std::string> cells = {std::string(name)};
    for (const NamedBackend& b : backends) cells.push_back(cell(b));
    table.row(cells);
  };
  for (std::size_t i = 0; i < operations({}).size(); ++i) {
    row(operations({})[i].name, [i](const NamedBackend& b) {
      return !b.built() ? "not built" : operations(*b.backend)[i].offered ? "yes" : "-";
    });
  }
  for (const Case& c : cases()) row(c.name, [&](const NamedBackend& b) { return chosen(b, c.problem); });
  table.print(terminal);

  print(terminal.out, "\nKernels, by packed rows (queries of a request times query heads of a KV head):\n\n");
  Table kernels;
  for (const char* heading : {"kernel", "rows", "made for"}) kernels.column(heading, Table::Align::kLeft);
  for (const NamedBackend& b : backends) {
    for (std::size_t i = 0; b.built() && i < b.backend->kernels.size(); ++i) {
      const Kernel& kernel = b.backend->kernels[i];
      kernels.row({std::string(kernel.name), rows_text(b.backend->kernels, i), std::string(kernel.use)});
    }
  }
  kernels.print(terminal);
  print(terminal.out,
        "\nFormats, dims and types that lack the kernel of their rows meet the next larger one that they "
        "have,\nelse their largest, as many rows at a time as it holds.\n");
  for (const NamedBackend& b : backends) {
    if (b.built() && has_universal(*b.backend)) print_formats(terminal, b);
    if (!b.built()) {
      print(terminal.out,
            "\nThis build has no {} backend: configure it with -DHALFTONE_CUDA=ON, as `make cuda` does.\n",
            b.name);
    }
  }
}

}  // namespace halftone::cli
