// `halftone bench`: options, table and JSON.
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <omp.h>

#include "cli/bench.h"
#include "cli/command.h"
#include "cli/host.h"
#include "cli/table.h"
#include "cli/text.h"

namespace halftone::cli {
namespace {

struct Options {
  std::string suite = "decode";
  std::string formats = "bf16,fp8,int8-head,int4-g32";
  std::string policy = "reproducible";
  std::vector<int> batch, context;
  int q_len = 0;
  ProblemShape shape;
  int threads = 0, repeat = 0;
  std::string json;
};

Suite parse_suite(const std::string& text) {
  if (text == "decode") return Suite::kDecode;
  if (text == "prefill") return Suite::kPrefill;
  if (text == "append") return Suite::kAppend;
  throw UsageError(
      fmt::format("--suite is '{}', but must be decode, prefill or append: use decode.", printable(text)));
}

const char* suite_text(Suite suite) {
  return suite == Suite::kDecode ? "decode" : suite == Suite::kPrefill ? "prefill" : "append";
}

std::vector<BenchCase> make_cases(const Options& options) {
  const Suite suite = parse_suite(options.suite);
  const bool prefill = suite == Suite::kPrefill;
  const std::vector<int> batches = !options.batch.empty() ? options.batch : std::vector<int>{prefill ? 1 : 8};
  const std::vector<int> contexts =
      !options.context.empty() ? options.context : std::vector<int>{prefill ? 2048 : 8192};
  std::vector<BenchCase> cases;
  for (const int batch : batches) {
    for (const int context : contexts) {
      for (FormatChoice& format : parse_choices(options.formats, "--formats")) {
        BenchCase c{suite, options.shape};
        c.shape.format = std::move(format);
        c.shape.batch = batch;
        c.shape.context = context;
        c.shape.q_len = options.q_len > 0 ? options.q_len : prefill ? context : 1;
        c.shape.policy = parse_policy(options.policy);
        c.shape.workers = 0;
        if (c.shape.q_len > context) {
          throw UsageError(
              fmt::format("--q-len is {}, but --context is {}: queries are the last tokens of the context.",
                          c.shape.q_len, context));
        }
        page_layout(to_problem(c.shape).kv);  // refuse what does not exist before the first measurement
        if (suite != Suite::kAppend) halftone::plan(to_problem(c.shape));
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

nlohmann::ordered_json to_json(const std::vector<BenchRow>& rows, double ceiling) {
  nlohmann::ordered_json json = provenance();
  json["notes"] =
      "us: median of one call; bytes: least traffic of one call; GB = 10^9 bytes; ceiling: reading memory "
      "on the same threads in the same run; cold: calls go through distinct caches larger than the LLC";
  json["rows"] = nlohmann::ordered_json::array();
  for (const BenchRow& r : rows) {
    const ProblemShape& s = r.setup.shape;
    nlohmann::ordered_json row = {{"suite", suite_text(r.setup.suite)},
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
                                  {"policy", policy_text(s.policy)},
                                  {"us", r.us},
                                  {"bytes", r.bytes},
                                  {"gbs", r.gbs},
                                  {"ceiling_gbs", ceiling}};
    if (r.setup.suite != Suite::kAppend) row["gflops"] = r.gflops;
    row["repeats"] = r.repeats;
    row["copies"] = r.copies;
    row["cold"] = r.cold;
    json["rows"].push_back(std::move(row));
  }
  return json;
}

void print(Terminal& terminal, const std::vector<BenchRow>& rows, double ceiling) {
  const ProblemShape& s = rows.front().setup.shape;
  const bool append = rows.front().setup.suite == Suite::kAppend;
  fmt::print(terminal.out,
             "{}: {} query heads, {} KV heads, head_dim {}, page size {}, {} splits, {} threads\n",
             suite_text(rows.front().setup.suite), s.q_heads, s.kv_heads, s.head_dim, s.page_size,
             policy_text(s.policy), omp_get_max_threads());
  fmt::print(terminal.out, "Reading memory on these threads: {:.1f} GB/s\n\n", ceiling);
  Table table;
  table.column("format", Table::Align::kLeft);
  table.column("batch");
  table.column("context");
  table.column("q_len");
  table.column("time");
  table.column("bytes");
  table.column("GB/s");
  table.column("of read");
  if (!append) table.column("GFLOP/s");
  table.column("", Table::Align::kLeft);
  for (const BenchRow& r : rows) {
    std::vector<std::string> row = {r.setup.shape.format.name,
                                    std::to_string(r.setup.shape.batch),
                                    std::to_string(r.setup.shape.context),
                                    std::to_string(r.setup.shape.q_len),
                                    human_time(r.us),
                                    human_bytes(static_cast<double>(r.bytes)),
                                    fmt::format("{:.1f}", r.gbs),
                                    fmt::format("{:.0f}%", 100 * r.gbs / ceiling)};
    if (!append) row.push_back(fmt::format("{:.1f}", r.gflops));
    row.push_back(r.cold ? "" : "warm caches");
    table.row(std::move(row));
  }
  table.print(terminal);
}

void run_bench(Options& options, Terminal& terminal) {
  check_page_size(options.shape.page_size, "--page-size");
  if (options.threads > 0) omp_set_num_threads(options.threads);
  const std::vector<BenchCase> cases = make_cases(options);
  std::vector<BenchRow> rows;
  double ceiling = 0;
  {
    Progress progress(terminal, static_cast<std::int64_t>(cases.size()) + 2);
    progress.step("read bandwidth");
    ceiling = measure_read_bandwidth();
    for (const BenchCase& c : cases) {
      progress.step(c.shape.format.name);
      rows.push_back(run_case(c, options.repeat));
    }
    progress.step("read bandwidth");  // again: other load on the machine moves it
    ceiling = std::max(ceiling, measure_read_bandwidth());
  }
  if (!options.json.empty()) write_output(terminal, options.json, to_json(rows, ceiling).dump(1) + "\n");
  if (options.json != "-") print(terminal, rows, ceiling);
}

}  // namespace

void add_bench(CLI::App& app, Terminal& terminal) {
  CLI::App* command = app.add_subcommand("bench", "Time decode, prefill or append on this machine");
  auto options = std::make_shared<Options>();
  ProblemShape& shape = options->shape;
  command->footer(
      "Every call reads a cache that the calls before it pushed out of the CPU's caches. GB/s counts the "
      "least\n"
      "traffic that the call needs, and is compared with reading memory on the same threads in the same "
      "run.\n\n"
      "Examples:\n"
      "  halftone bench\n"
      "  halftone bench --formats int8-head,int4-g32 --batch 1,8 --context 1024,8192 --json bench.json\n"
      "  halftone bench --suite prefill --context 1024 --threads 4\n"
      "  halftone bench --suite append --q-len 64\n");
  command->add_option("--suite", options->suite, "decode, prefill or append")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("-f,--formats", options->formats, "Comma-separated formats, K:V and +rot allowed")
      ->type_name("FORMATS")
      ->capture_default_str();
  command->add_option("--batch", options->batch, "Requests, comma-separated (8; prefill: 1)")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(between(1, 65536));
  command
      ->add_option("--context", options->context, "Keys of a request, comma-separated (8192; prefill: 2048)")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(between(1, 1 << 24));
  command
      ->add_option("--q-len", options->q_len,
                   "Queries or appended tokens of a request (1; prefill: --context)")
      ->check(between(1, 1 << 24));
  command->add_option("--q-heads", shape.q_heads, "Query heads")
      ->check(between(1, 65536))
      ->capture_default_str();
  command->add_option("--kv-heads", shape.kv_heads, "KV heads")
      ->check(between(1, 65536))
      ->capture_default_str();
  command->add_option("--head-dim", shape.head_dim, "Head dimension")->capture_default_str();
  command->add_option("--page-size", shape.page_size, "Tokens per page")->capture_default_str();
  command->add_option("--policy", options->policy, "fast, reproducible or batch_invariant")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "CPU threads (default: OMP_NUM_THREADS or all)")
      ->check(between(1, 1024));
  command->add_option("--repeat", options->repeat, "Calls per case (default: half a second, at least 5)")
      ->check(between(1, 1000000));
  command->add_option("--json", options->json, "Write the figures as JSON (- for stdout)")->type_name("FILE");
  command->callback([options, &terminal] { run_bench(*options, terminal); });
}

}  // namespace halftone::cli
