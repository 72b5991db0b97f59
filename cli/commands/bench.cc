// `halftone bench`: options, cases and the backend that runs them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "cli/bench/cases.h"
#include "cli/bench/cpu.h"
#include "cli/bench/gpu.h"
#include "cli/bench/report.h"
#include "cli/commands/command.h"
#include "cli/cuda/gemm_kernel.h"
#include "cli/files/outputs.h"
#include "cli/host/host.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "plan/listed.h"

namespace halftone::cli {
namespace {

constexpr const char* kDefaultFormats = "bf16,fp8,int8-head,int4-g32";

struct Options {
  std::string suite = "decode";
  std::string backend = "auto";
  std::string formats;  ///< empty: kDefaultFormats, kLatentFormats or the table's own
  std::string policy = "reproducible", arithmetic = "16-bit", dtype = "bf16";
  std::string tables, mix;
  std::vector<int> batch, context;
  int q_len = 0;
  ProblemShape shape;
  int chain = 1;
  bool with_schedule = false, full = false, latent = false, gemm = false, cold_code = false;
  int threads = 0, repeat = 0;
  std::string json;
};

/// Batches as lists of request groups, in the order of the options.
std::vector<std::vector<RequestGroup>> make_requests(const Options& options, bool prefill) {
  if (!options.mix.empty()) return {parse_requests(options.mix, "--contexts-mix")};
  const std::vector<int> batches = !options.batch.empty() ? options.batch : std::vector<int>{prefill ? 1 : 8};
  const std::vector<int> contexts =
      !options.context.empty() ? options.context : std::vector<int>{prefill ? 2048 : 8192};
  std::vector<std::vector<RequestGroup>> requests;
  for (const int batch : batches) {
    for (const int context : contexts) requests.push_back({{context, batch}});
  }
  return requests;
}

void check_suite(const Options& options, Suite suite) {
  const auto refuse = [&](std::string_view option, std::string_view what) {
    throw UsageError(
        fmt::format("{} is for {}, but --suite is {}: leave it out.", option, what, suite_text(suite)));
  };
  if (suite == Suite::kAppend) {
    if (options.chain > 1) refuse("--chain", "attention");
    if (options.with_schedule) refuse("--with-schedule", "attention");
    if (options.arithmetic != "16-bit") refuse("--arithmetic", "attention");
  }
  const bool appends = suite == Suite::kAppend || suite == Suite::kLayer;
  if (appends && options.shape.top_k > 0) refuse("--top-k", "decode and prefill");
  if (options.gemm && suite != Suite::kLayer) refuse("--gemm", "a layer");
  if (suite == Suite::kPrefill) return;
  if (options.shape.plain) refuse("--plain", "prefill");
  if (options.full) refuse("--no-causal", "prefill");
}

/// Refuses what does not exist on any backend before the first measurement.
void check_case(const BenchCase& setup) {
  const std::vector<std::int64_t> contexts = kv_lengths(setup), queries = q_lengths(setup);
  const bool own = std::ranges::any_of(setup.mixed, [](const RequestGroup& g) { return g.q_len > 0; });
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    if (queries[i] <= contexts[i]) continue;
    throw UsageError(fmt::format("{} {}, but {} is {}: queries are the last tokens of the context.",
                                 own ? "queries of a group of --contexts-mix are" : "--q-len is", queries[i],
                                 setup.mixed.empty() ? "--context" : "a context of --contexts-mix",
                                 contexts[i]));
  }
  if (own && (setup.suite == Suite::kAppend || setup.suite == Suite::kLayer)) {
    throw UsageError(
        fmt::format("--contexts-mix is {}, but groups with queries of their own are for --suite decode and "
                    "prefill: leave "
                    "the queries out.",
                    requests_text(setup.mixed)));
  }
  if (setup.gemm && setup.shape.dtype != DType::kBFloat16) {
    throw UsageError("--dtype is f16, but --gemm is in bf16: leave one of the two out.");
  }
  if (setup.gemm && gemm_width(setup.shape) % cuda::kGemmDepth != 0) {
    throw UsageError(fmt::format(
        "--q-heads times --head-dim is {}, but --gemm needs a multiple of {}: use other --q-heads.",
        gemm_width(setup.shape), cuda::kGemmDepth));
  }
  if (!setup.shape.plain) page_layout(cache_spec(setup.shape));
  if (setup.suite != Suite::kAppend) halftone::plan(to_problem(setup.shape));
}

std::vector<BenchCase> make_cases(const Options& options) {
  const SplitPolicy policy = parse_policy(options.policy);
  const Arithmetic arithmetic = parse_arithmetic_option(options.arithmetic);
  std::vector<BenchCase> cases;
  if (!options.tables.empty()) {
    cases = table_cases(options.tables, options.formats, policy);
  } else {
    const Suite suite = parse_suite(options.suite);
    check_suite(options, suite);
    check_lists(options.shape, options.latent);
    const std::string_view formats = options.shape.plain ? "bf16"
                                     : options.latent    ? kLatentFormats
                                                         : kDefaultFormats;
    const bool prefill = suite == Suite::kPrefill;
    for (const auto& groups : make_requests(options, prefill)) {
      for (FormatChoice& format :
           parse_choices(options.formats.empty() ? formats : options.formats, "--formats")) {
        if (options.shape.plain && format.name != "bf16") {
          throw UsageError(fmt::format(
              "--formats has {}, but --plain is for tensors in bf16 or f16: leave one of the two out.",
              format.name));
        }
        BenchCase c;
        c.suite = suite;
        c.shape = options.shape;
        c.shape.dtype = options.dtype == "f16" ? DType::kFloat16 : DType::kBFloat16;
        c.chain = options.chain;
        c.with_schedule = options.with_schedule;
        c.gemm = options.gemm;
        c.shape.format = std::move(format);
        if (options.latent) make_latent(c.shape, "--formats");
        set_requests(c, groups, options.q_len > 0 || prefill ? options.q_len : 1);
        c.shape.policy = policy;
        c.shape.causal = !options.full;
        for (BenchCase& each : with_appends(c)) cases.push_back(std::move(each));
      }
    }
  }
  for (BenchCase& c : cases) {
    if (options.with_schedule && c.suite != Suite::kAppend) c.with_schedule = true;
    if (arithmetic != Arithmetic::k16Bit) c.shape.arithmetic = arithmetic;
    check_case(c);
  }
  return cases;
}

/// The CUDA device to use, or none for the CPU.
std::optional<int> choose_device(const std::string& backend) {
  if (backend == "cpu") return std::nullopt;
  const BackendChoice choice = choose_backend(cpu_info(), gpu_info());
  if (choice.missing.empty()) return choice.device;
  if (backend == "auto") return std::nullopt;
  throw Error(ErrorCode::kUnsupported, fmt::format("--backend is cuda, but this needs {}: use --backend cpu.",
                                                   fmt::join(choice.missing, "; ")));
}

/// Why a case cannot be measured on the CPU, or "".
std::string cuda_only(const BenchCase& c) {
  std::string what;
  if (c.chain > 1 && c.suite != Suite::kLayer) what = fmt::format("a chain of {} layers is", c.chain);
  if (!c.mixed.empty()) what = fmt::format("the mixture {} is", requests_text(c.mixed));
  if (c.with_schedule) what = "schedule with run is";
  if (c.gemm) what = "a GEMM before each layer is";
  if (what.empty()) return what;
  return fmt::format(
      "{} measured on CUDA only, but this run is on the CPU: leave it out, or use --backend cuda.", what);
}

/// Rows of all cases. What a backend or its memory cannot do is a row that says so, unless nothing else runs.
std::vector<BenchRow> run_all(const std::vector<BenchCase>& cases, Progress& progress,
                              const std::function<BenchRow(const BenchCase&)>& run) {
  std::vector<BenchRow> rows;
  std::optional<Error> refusal;
  bool ran = false;
  for (const BenchCase& c : cases) {
    progress.step(c.shape.format.name);
    try {
      rows.push_back(run(c));
      ran = true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported && error.code() != ErrorCode::kResourceExhausted) throw;
      if (!refusal) refusal = error;
      BenchRow row;
      row.setup = c;
      row.unsupported = error.what();
      rows.push_back(std::move(row));
    }
  }
  if (!ran && refusal) throw Error(*refusal);
  return rows;
}

struct Measured {
  std::vector<BenchRow> rows;
  std::string engine;
  nlohmann::ordered_json head;
};

Measured run_on_cpu(const std::vector<BenchCase>& cases, int repeat, Terminal& terminal) {
  if (std::ranges::none_of(cases, [](const BenchCase& c) { return cuda_only(c).empty(); })) {
    throw UsageError(cuda_only(cases.front()));
  }
  Measured m;
  // Arithmetic bounds prefill.
  const auto has_ceiling = [](const BenchCase& c) { return c.suite != Suite::kPrefill; };
  const bool reads = std::ranges::any_of(cases, has_ceiling);
  double ceiling = 0;
  Progress progress(terminal, static_cast<std::int64_t>(cases.size()) + (reads ? 2 : 0));
  const auto measure_ceiling = [&] {
    progress.step("read bandwidth");
    ceiling = std::max(ceiling, measure_read_bandwidth());
  };
  if (reads) measure_ceiling();
  m.rows = run_all(cases, progress, [&](const BenchCase& c) {
    if (const std::string why = cuda_only(c); !why.empty()) throw Error(ErrorCode::kUnsupported, why);
    return run_case(c, repeat);
  });
  if (reads) measure_ceiling();  // again: other load on the machine moves it
  for (BenchRow& row : m.rows) {
    if (has_ceiling(row.setup)) row.ceiling_gbs = ceiling;
  }
  m.engine = "CPU, " + thread_count(omp_get_max_threads());
  m.head = provenance();
  return m;
}

Measured run_on_cuda(const std::vector<BenchCase>& cases, int device, const Options& options,
                     Terminal& terminal) {
  Measured m;
  const std::unique_ptr<GpuBench> bench = gpu_bench(device, options.repeat, options.cold_code);
  Progress progress(terminal, static_cast<std::int64_t>(cases.size()));
  m.rows = run_all(cases, progress, [&](const BenchCase& c) { return bench->run(c); });
  m.head = provenance();
  m.head["host"] = m.head["device"];
  m.head["device"] = bench->describe();
  m.engine = fmt::format("CUDA on {}", m.head["device"]["name"].get<std::string>());
  return m;
}

Measured measure(const std::vector<BenchCase>& cases, const Options& options, Terminal& terminal) {
  const std::optional<int> device = choose_device(options.backend);
  if (device) return run_on_cuda(cases, *device, options, terminal);
  if (options.cold_code) {
    throw UsageError(
        "--cold-code is for CUDA, but this run is on the CPU: leave it out, or use --backend cuda.");
  }
  return run_on_cpu(cases, options.repeat, terminal);
}

void run_bench(const Options& options, Terminal& terminal) {
  check_page_size(options.shape.page_size, "--page-size");
  if (options.threads > 0) omp_set_num_threads(options.threads);
  const std::vector<BenchCase> cases = make_cases(options);
  Measured m = measure(cases, options, terminal);
  if (!options.json.empty()) {
    write_output(terminal, options.json, bench_json(std::move(m.head), m.rows).dump(1) + "\n");
  }
  if (options.json != "-") print_bench(terminal, m.engine, m.rows);
}

void add_shape_options(Command command, Options& options, Option table) {
  ProblemShape& shape = options.shape;
  const auto shape_option = [table](Option option) { return option->excludes(table); };
  shape_option(command->add_option("--suite", options.suite, "decode, prefill, append or layer"))
      ->type_name("NAME")
      ->capture_default_str();
  const Option batch = shape_option(
      command->add_option("--batch", options.batch, "Requests, comma-separated (8; prefill: 1)"));
  batch->type_name("N,...")->delimiter(',')->check(between(1, 65536));
  const Option context = shape_option(command->add_option(
      "--context", options.context, "Keys of a request, comma-separated (8192; prefill: 2048)"));
  context->type_name("N,...")->delimiter(',')->check(between(1, 1 << 24));
  shape_option(
      command->add_option("--contexts-mix", options.mix,
                          "CUDA: one batch of different lengths, [QUERIES/]CONTEXTxCOUNT comma-separated"))
      ->type_name("[Q/]NxM,...")
      ->excludes(batch)
      ->excludes(context);
  shape_option(command->add_option("--q-len", options.q_len,
                                   "Queries or appended tokens of a request (1; prefill: --context)"))
      ->check(between(1, 1 << 24));
  shape_option(command->add_option("--q-heads", shape.q_heads, "Query heads"))
      ->check(between(1, 65536))
      ->capture_default_str();
  const Option kv_heads = shape_option(command->add_option("--kv-heads", shape.kv_heads, "KV heads"));
  kv_heads->check(between(1, 65536))->capture_default_str();
  const Option head_dim = shape_option(command->add_option("--head-dim", shape.head_dim, "Head dimension"));
  head_dim->capture_default_str();
  const Option v_head_dim = shape_option(
      command->add_option("--v-head-dim", shape.v_dim, "Head dimension of V (default: --head-dim)"));
  shape_option(command->add_option("--page-size", shape.page_size, "Tokens per page"))->capture_default_str();
  shape_option(command->add_option("--dtype", options.dtype, "Of Q, O, new tokens and --plain: bf16 or f16"))
      ->type_name("NAME")
      ->check(one_of({"bf16", "f16"}))
      ->capture_default_str();
  const Option plain = shape_option(
      command->add_flag("--plain", shape.plain, "Prefill: K and V are tensors in --dtype, not pages"));
  shape_option(
      command->add_flag("--latent", options.latent,
                        "K and V are one latent of 512 + 64 dims, which all query heads share (MLA)"))
      ->excludes(kv_heads)
      ->excludes(head_dim)
      ->excludes(v_head_dim)
      ->excludes(plain);
  shape_option(command->add_option("--top-k", shape.top_k,
                                   "With --latent: every query reads so many random keys, from a list"))
      ->check(between(1, planning::kMaxListed));
  shape_option(command->add_option("--extra-top-k", shape.extra_top_k,
                                   "With --top-k: and so many of a second cache, from a second list"))
      ->check(between(1, planning::kMaxListed));
  shape_option(command->add_flag("--gemm", options.gemm,
                                 "CUDA, layers: a bf16 GEMM before each writes Q; time that the layer adds"));
  shape_option(command->add_flag("--no-causal", options.full, "Prefill: every query sees every key"));
  shape_option(command->add_option("--chain", options.chain,
                                   "CUDA: layers with caches of their own in one graph; time per layer"))
      ->check(between(1, 4096))
      ->capture_default_str();
}

}  // namespace

void add_bench(Command app, Terminal& terminal) {
  const Command command =
      app.add_subcommand("bench", "Time decode, prefill, append or a layer of all on this machine");
  auto options = std::make_shared<Options>();
  command->footer(
      "Every call reads a cache that no cache level of the processor holds. GB/s counts the least traffic "
      "that\n"
      "the call needs. The ceiling is what plain reads reach in the same run: of memory on the CPU, of as "
      "many\n"
      "bytes on a GPU (append: a copy; decode with --top-k: a gather, which only reads the listed records,\n"
      "by its time; prefill, which arithmetic bounds: none). Prefill on a GPU is timed\n"
      "after 40 ms of calls, so that clocks have settled; MHz is what the SMs counted during the timed "
      "ones.\n\n"
      "Examples:\n"
      "  halftone bench\n"
      "  halftone bench --formats int8-head,int4-g32 --batch 1,8 --context 1024,8192 --json bench.json\n"
      "  halftone bench --suite prefill --context 1024 --threads 4\n"
      "  halftone bench --suite prefill --plain --no-causal --q-heads 16 --kv-heads 16\n"
      "  halftone bench --suite append --q-len 64\n"
      "  halftone bench --suite layer --formats int8-head --batch 1,8\n"
      "  halftone bench --backend cuda --suite layer --gemm --chain 16 --q-heads 64\n"
      "  halftone bench --latent --q-heads 16 --top-k 512 --extra-top-k 128\n"
      "  halftone bench --backend cuda --table headline,speculative --json decode.json\n"
      "  halftone bench --backend cuda --contexts-mix 131072x1,4096x31 --with-schedule\n");
  command->add_option("--backend", options->backend, "auto (CUDA where it works), cpu or cuda")
      ->type_name("NAME")
      ->check(one_of({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  const Option table =
      command
          ->add_option("--table", options->tables,
                       fmt::format("The project's own tables, comma-separated: {} or all", table_names()))
          ->type_name("NAME,...");
  command
      ->add_option(
          "-f,--formats", options->formats,
          fmt::format("Comma-separated formats, K:V and +rot allowed ({}; --latent, --table: their own)",
                      kDefaultFormats))
      ->type_name("FORMATS");
  add_shape_options(command, *options, table);
  add_policy_option(command, options->policy);
  add_arithmetic_option(command, options->arithmetic);
  command->add_flag("--with-schedule", options->with_schedule, "CUDA: schedule() is part of the timed call");
  command->add_flag(
      "--cold-code", options->cold_code,
      "CUDA: no cache holds a timed call's instructions either (of a chain, its first layer's)");
  command->add_option("--threads", options->threads, "CPU threads (default: OMP_NUM_THREADS or all)")
      ->check(between(1, 1024));
  command
      ->add_option("--repeat", options->repeat,
                   "Calls per case (default: half a second, at least 5; CUDA: 25)")
      ->check(between(1, 1000000));
  command->add_option("--json", options->json, "Write the figures as JSON (- for stdout)")->type_name("FILE");
  command->callback([options, &terminal] { run_bench(*options, terminal); });
}

}  // namespace halftone::cli
