#include "cli/bench/report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>

#include "cli/bench/cases.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string gemm_text(const BenchRow& r) { return fmt::format("gemm-{}", gemm_width(r.setup.shape)); }

Json row_json(const BenchRow& r) {
  const ProblemShape& s = r.setup.shape;
  Json row = {{"suite", s.rope_dim != 0 ? "mla" : suite_text(r.setup.suite)},
              {"format_k", s.plain ? "plain" : format_name(s.format.k)},
              {"format_v", s.plain ? "plain" : format_name(s.format.v)},
              {"rotate_k", s.format.rotate_k},
              {"rotate_v", s.format.rotate_v},
              {"batch", s.batch},
              {"context", s.context},
              {"q_heads", s.q_heads},
              {"kv_heads", s.kv_heads},
              {"head_dim", s.head_dim},
              {"q_len", s.q_len},
              {"dtype", dtype_name(s.dtype)},
              {"page_size", s.plain ? Json() : Json(s.page_size)},
              {"policy", policy_text(s.policy)}};
  const bool ran = r.unsupported.empty();
  const auto figure = [&](const char* name, auto value) { row[name] = ran ? Json(value) : Json(nullptr); };
  figure("us", r.us);
  figure("bytes", r.bytes);
  figure("gbs", r.gbs);
  row["ceiling_gbs"] = r.ceiling_gbs > 0 ? Json(r.ceiling_gbs) : Json();
  const bool lower = s.arithmetic != Arithmetic::k16Bit, latent = s.rope_dim != 0;
  if (lower || (r.setup.suite == Suite::kPrefill && !latent)) {
    row["arithmetic"] = lower                  ? Json(arithmetic_name(s.arithmetic))
                        : r.arithmetic.empty() ? Json()
                                               : Json(r.arithmetic);
  }
  if (latent) {
    row["format"] = row["format_k"];  // of K and V in one; all rows have the other two
    row["kind"] = kind_text(r.setup);
    row["top_k"] = s.top_k > 0 ? Json(s.top_k) : Json();
    if (s.extra_top_k > 0) row["extra_top_k"] = s.extra_top_k;
    if (kind_text(r.setup) == "sparse_decode")
      row["gather_us"] = r.gather_us > 0 ? Json(r.gather_us) : Json();
    figure("tflops", r.gflops / 1e3);
    row["mhz"] = r.mhz > 0 ? Json(r.mhz) : Json();
  } else if (r.setup.suite == Suite::kPrefill) {
    row["causal"] = s.causal;
    row["scales"] = Json();  // of Q, K and V as tensors with scales of their own
    figure("tflops", r.gflops / 1e3);
    row["mhz"] = r.mhz > 0 ? Json(r.mhz) : Json();
  }
  if (s.v_dim != 0 && s.v_dim != s.head_dim) row["v_head_dim"] = s.v_dim;
  if (!r.setup.table.empty()) row["table"] = r.setup.table;
  if (!r.setup.mixed.empty()) row["lengths"] = requests_text(r.setup.mixed);
  if (r.setup.suite == Suite::kLayer) row["append"] = layer_append_text(r.setup.append);
  if (r.setup.gemm) {
    row["before"] = gemm_text(r);
    row["early"] = r.setup.early;
    figure("gemm_us", r.gemm_us);
  }
  row["chain"] = r.setup.chain;
  row["with_schedule"] = r.setup.with_schedule;
  if (!ran) {
    row["unsupported"] = r.unsupported;
    return row;
  }
  if (!r.ceiling.empty()) row["ceiling"] = r.ceiling;
  if (r.setup.suite != Suite::kAppend) row["gflops"] = r.gflops;
  if (!r.kernel.empty()) row["kernel"] = r.kernel;
  row["repeats"] = r.repeats;
  row["copies"] = r.copies;
  row["cold"] = r.cold;
  return row;
}

std::string note(const BenchRow& r) {
  std::string text;
  const auto add = [&](const std::string& piece) { text += (text.empty() ? "" : ", ") + piece; };
  if (!r.setup.mixed.empty()) add(requests_text(r.setup.mixed));
  if (r.setup.shape.rope_dim != 0) add(std::string(kind_text(r.setup)));
  if (r.setup.shape.top_k > 0) add(fmt::format("top_k {}", r.setup.shape.top_k));
  if (r.setup.shape.extra_top_k > 0) add(fmt::format("{} of a second cache", r.setup.shape.extra_top_k));
  if (r.setup.suite == Suite::kLayer) add(fmt::format("append {}", layer_append_text(r.setup.append)));
  if (r.setup.gemm) {
    add(fmt::format("behind {}{}, {}", gemm_text(r),
                    r.gemm_us > 0 ? fmt::format(" of {}", human_time(r.gemm_us)) : "",
                    r.setup.early ? "early" : "late"));
  }
  if (r.setup.chain > 1) add(fmt::format("per layer of {}", r.setup.chain));
  if (r.setup.with_schedule) add("with schedule");
  if (!r.unsupported.empty()) {
    add("unsupported: " + r.unsupported);
  } else if (!r.cold) {
    add("warm caches");
  }
  return text;
}

std::string teraflops(double gflops) {
  return gflops < 1e4 ? fmt::format("{:.3f}", gflops / 1e3) : fmt::format("{:.0f}", gflops / 1e3);
}

/// A column that is printed when its values differ, and stated above the table when they do not.
struct Column {
  const char* name;
  std::function<std::string(const BenchRow&)> text;
};

const std::vector<Column>& shape_columns() {
  static const std::vector<Column> columns = {
      {"suite", [](const BenchRow& r) { return std::string(suite_text(r.setup.suite)); }},
      {"query heads", [](const BenchRow& r) { return std::to_string(r.setup.shape.q_heads); }},
      {"KV heads", [](const BenchRow& r) { return std::to_string(r.setup.shape.kv_heads); }},
      {"head_dim",
       [](const BenchRow& r) {
         const ProblemShape& s = r.setup.shape;
         return s.v_dim == 0 || s.v_dim == s.head_dim ? std::to_string(s.head_dim)
                                                      : fmt::format("{}, {} of V", s.head_dim, s.v_dim);
       }},
      {"page size",
       [](const BenchRow& r) { return r.setup.shape.plain ? "-" : std::to_string(r.setup.shape.page_size); }},
      {"mask", [](const BenchRow& r) { return std::string(r.setup.shape.causal ? "causal" : "none"); }},
      {"arithmetic",
       [](const BenchRow& r) { return std::string(arithmetic_name(r.setup.shape.arithmetic)); }},
      {"splits", [](const BenchRow& r) { return std::string(policy_text(r.setup.shape.policy)); }},
  };
  return columns;
}

}  // namespace

nlohmann::ordered_json bench_json(nlohmann::ordered_json head, const std::vector<BenchRow>& rows) {
  head["notes"] =
      "us: median of one call, of a chain per layer; with before (a GEMM of bf16 with as many channels in "
      "and out, which writes Q) what the layer adds to the GEMM alone, gemm_us: a chain of both less one "
      "of GEMMs; early: the layer begins to read its cache while the GEMM is at work; bytes: least traffic "
      "of one call; GB = 10^9 bytes; ceiling: plain reads of as many bytes (append on CUDA: a copy; sparse "
      "decode on CUDA: a gather, which only reads the listed records, in gather_us, and of which a row "
      "reaches gather_us / us) measured in the same run; cold: no cache level holds what a call reads; "
      "tflops: 2 x (query, visible key) pairs x (head_dim + dims of V, v_head_dim where it differs) x "
      "query heads; mhz: clock of the SMs on CUDA, in prefill during the timed calls, which begin after 40 "
      "ms of calls, elsewhere over latent caches during as many calls right behind them; null figures: not "
      "measured, or not run, see unsupported";
  head["rows"] = Json::array();
  for (const BenchRow& r : rows) head["rows"].push_back(row_json(r));
  return head;
}

void print_bench(Terminal& terminal, const std::string& engine, const std::vector<BenchRow>& rows) {
  print(terminal.out, "{}", engine);
  std::vector<const Column*> varying;
  for (const Column& column : shape_columns()) {
    const std::string first = column.text(rows.front());
    if (std::ranges::all_of(rows, [&](const BenchRow& r) { return column.text(r) == first; })) {
      print(terminal.out, ", {} {}", column.name, first);
    } else {
      varying.push_back(&column);
    }
  }
  print(terminal.out, "\n\n");
  const bool flops =
      std::ranges::any_of(rows, [](const BenchRow& r) { return r.setup.suite != Suite::kAppend; });
  const bool memory =
      std::ranges::any_of(rows, [](const BenchRow& r) { return r.setup.suite != Suite::kPrefill; });
  const bool gather = std::ranges::any_of(rows, [](const BenchRow& r) { return r.gather_us > 0; });
  const bool clock = std::ranges::any_of(rows, [](const BenchRow& r) { return r.mhz > 0; });
  Table table;
  table.column("format", Table::Align::kLeft);
  for (const Column* column : varying) table.column(column->name);
  for (const char* name : {"batch", "context", "q_len", "time"}) table.column(name);
  if (memory) {
    for (const char* name : {"bytes", "GB/s", "ceiling", "of it"}) table.column(name);
    if (gather) table.column("gather");
  }
  if (flops) table.column(memory ? "GFLOP/s" : "TFLOP/s");
  if (clock) table.column("MHz");
  table.column("", Table::Align::kLeft);
  for (const BenchRow& r : rows) {
    const ProblemShape& s = r.setup.shape;
    std::vector<std::string> cells = {s.plain ? fmt::format("{} tensors", dtype_name(s.dtype))
                                              : s.format.name};
    for (const Column* column : varying) cells.push_back(column->text(r));
    for (const int value : {s.batch, s.context, s.q_len}) cells.push_back(std::to_string(value));
    const bool ran = r.unsupported.empty();
    const auto figure = [&](bool has, const std::string& text) { cells.push_back(ran && has ? text : "-"); };
    figure(true, human_time(r.us));
    if (memory) {
      figure(true, human_bytes(static_cast<double>(r.bytes)));
      figure(true, fmt::format("{:.1f}", r.gbs));
      figure(r.ceiling_gbs > 0, fmt::format("{:.1f}", r.ceiling_gbs));
      figure(r.ceiling_gbs > 0, fmt::format("{:.0f}%", 100 * share_of_ceiling(r)));
      if (gather) figure(r.gather_us > 0, human_time(r.gather_us));
    }
    if (flops) {
      figure(r.setup.suite != Suite::kAppend, memory ? fmt::format("{:.1f}", r.gflops) : teraflops(r.gflops));
    }
    if (clock) figure(r.mhz > 0, fmt::format("{:.0f}", r.mhz));
    cells.push_back(note(r));
    table.row(std::move(cells));
  }
  table.print(terminal);
}

}  // namespace halftone::cli
