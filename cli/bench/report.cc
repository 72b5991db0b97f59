#include "cli/bench/report.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <algorithm>
#include <functional>

#include "cli/bench/cases.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

using Json = nlohmann::ordered_json;

Json row_json(const BenchRow& r) {
  const ProblemShape& s = r.setup.shape;
  Json row = {{"suite", suite_text(r.setup.suite)},
              {"format_k", format_name(s.format.k)},
              {"format_v", format_name(s.format.v)},
              {"rotate_k", s.format.rotate_k},
              {"rotate_v", s.format.rotate_v},
              {"batch", s.batch},
              {"context", s.context},
              {"q_heads", s.q_heads},
              {"kv_heads", s.kv_heads},
              {"head_dim", s.head_dim},
              {"q_len", s.q_len},
              {"page_size", s.page_size},
              {"policy", policy_text(s.policy)}};
  const bool ran = r.unsupported.empty();
  const auto figure = [&](const char* name, auto value) { row[name] = ran ? Json(value) : Json(nullptr); };
  figure("us", r.us);
  figure("bytes", r.bytes);
  figure("gbs", r.gbs);
  figure("ceiling_gbs", r.ceiling_gbs);
  if (!r.setup.table.empty()) row["table"] = r.setup.table;
  if (!r.setup.mixed.empty()) row["lengths"] = requests_text(r.setup.mixed);
  row["chain"] = r.setup.chain;
  row["with_schedule"] = r.setup.with_schedule;
  if (!ran) {
    row["unsupported"] = r.unsupported;
    return row;
  }
  if (!r.ceiling.empty()) row["ceiling"] = r.ceiling;
  if (r.setup.suite != Suite::kAppend) row["gflops"] = r.gflops;
  row["repeats"] = r.repeats;
  row["copies"] = r.copies;
  row["cold"] = r.cold;
  return row;
}

std::string note(const BenchRow& r) {
  std::string text;
  const auto add = [&](const std::string& piece) { text += (text.empty() ? "" : ", ") + piece; };
  if (!r.setup.mixed.empty()) add(requests_text(r.setup.mixed));
  if (r.setup.chain > 1) add(fmt::format("per layer of {}", r.setup.chain));
  if (r.setup.with_schedule) add("with schedule");
  if (!r.unsupported.empty()) {
    add("unsupported: " + r.unsupported);
  } else if (!r.cold) {
    add("warm caches");
  }
  return text;
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
      {"head_dim", [](const BenchRow& r) { return std::to_string(r.setup.shape.head_dim); }},
      {"page size", [](const BenchRow& r) { return std::to_string(r.setup.shape.page_size); }},
      {"splits", [](const BenchRow& r) { return std::string(policy_text(r.setup.shape.policy)); }},
  };
  return columns;
}

}  // namespace

nlohmann::ordered_json bench_json(nlohmann::ordered_json head, const std::vector<BenchRow>& rows) {
  head["notes"] =
      "us: median of one call, of a chain per layer; bytes: least traffic of one call; GB = 10^9 bytes; "
      "ceiling: plain reads of as many bytes (append on CUDA: a copy) measured in the same run; cold: no "
      "cache level holds what a call reads; null figures: not run, see unsupported";
  head["rows"] = Json::array();
  for (const BenchRow& r : rows) head["rows"].push_back(row_json(r));
  return head;
}

void print_bench(Terminal& terminal, const std::string& engine, const std::vector<BenchRow>& rows) {
  fmt::print(terminal.out, "{}", engine);
  std::vector<const Column*> varying;
  for (const Column& column : shape_columns()) {
    const std::string first = column.text(rows.front());
    if (std::ranges::all_of(rows, [&](const BenchRow& r) { return column.text(r) == first; })) {
      fmt::print(terminal.out, ", {} {}", column.name, first);
    } else {
      varying.push_back(&column);
    }
  }
  fmt::print(terminal.out, "\n\n");
  const bool flops =
      std::ranges::any_of(rows, [](const BenchRow& r) { return r.setup.suite != Suite::kAppend; });
  Table table;
  table.column("format", Table::Align::kLeft);
  for (const Column* column : varying) table.column(column->name);
  for (const char* name : {"batch", "context", "q_len", "time", "bytes", "GB/s", "ceiling", "of it"})
    table.column(name);
  if (flops) table.column("GFLOP/s");
  table.column("", Table::Align::kLeft);
  for (const BenchRow& r : rows) {
    const ProblemShape& s = r.setup.shape;
    std::vector<std::string> cells = {s.format.name};
    for (const Column* column : varying) cells.push_back(column->text(r));
    for (const int value : {s.batch, s.context, s.q_len}) cells.push_back(std::to_string(value));
    if (r.unsupported.empty()) {
      cells.push_back(human_time(r.us));
      cells.push_back(human_bytes(static_cast<double>(r.bytes)));
      cells.push_back(fmt::format("{:.1f}", r.gbs));
      cells.push_back(fmt::format("{:.1f}", r.ceiling_gbs));
      cells.push_back(fmt::format("{:.0f}%", 100 * r.gbs / r.ceiling_gbs));
    } else {
      cells.insert(cells.end(), 5, "-");
    }
    if (flops) {
      const bool has = r.unsupported.empty() && r.setup.suite != Suite::kAppend;
      cells.push_back(has ? fmt::format("{:.1f}", r.gflops) : "-");
    }
    cells.push_back(note(r));
    table.row(std::move(cells));
  }
  table.print(terminal);
}

}  // namespace halftone::cli
