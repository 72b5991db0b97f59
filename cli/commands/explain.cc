// `halftone explain`: the plan for a problem, and the least time that it can take.
#include <fmt/format.h>

#include "cli/commands/command.h"
#include "cli/options/problem.h"
#include "cli/terminal/text.h"
#include "plan/listed.h"
#include "plan/plan.h"

namespace halftone::cli {
namespace {

constexpr std::string_view kDefaultFormat = "int8-head", kDefaultLatent = "fp8-g128-f32";

struct ExplainOptions {
  ProblemShape shape;
  std::string format;  ///< empty: kDefaultFormat or kDefaultLatent
  bool latent = false;
  std::string policy = "reproducible", arithmetic = "16-bit";
  std::vector<int> lengths, q_lengths;
  double bandwidth = 0;  ///< GB/s
};

/// Prefix sums as cu_q.
std::vector<std::int32_t> cumulative(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> sums = {0};
  for (const std::int64_t n : lengths) sums.push_back(static_cast<std::int32_t>(sums.back() + n));
  return sums;
}

void print_floor(Terminal& terminal, const Floor& floor, double bandwidth) {
  print(terminal.out,
        "\nFloor: {} of cache and {} of Q and O must move; {:.3g} GFLOP, {:.1f} FLOP per byte.\n",
        human_bytes(static_cast<double>(floor.cache_bytes)), human_bytes(static_cast<double>(floor.io_bytes)),
        floor.flops / 1e9, floor.flops / static_cast<double>(std::max<std::int64_t>(1, floor.bytes())));
  if (bandwidth > 0) {
    print(terminal.out, "At {} GB/s that takes at least {}.\n", short_number(bandwidth),
          human_time(static_cast<double>(floor.bytes()) / bandwidth / 1e3));
  } else {
    print(terminal.out,
          "Give --bandwidth in GB/s to turn it into a time (`halftone bench` measures yours).\n");
  }
}

void run_explain(ExplainOptions& options, Terminal& terminal) {
  ProblemShape& shape = options.shape;
  const std::string_view default_format = options.latent ? kDefaultLatent : kDefaultFormat;
  shape.format = parse_choice(options.format.empty() ? default_format : options.format, "--format");
  check_lists(shape, options.latent);
  if (options.latent) make_latent(shape, "--format");
  shape.policy = parse_policy(options.policy);
  shape.arithmetic = parse_arithmetic_option(options.arithmetic);
  check_page_size(shape.page_size, "--page-size");
  if (!options.lengths.empty()) {
    shape.batch = static_cast<int>(options.lengths.size());
    shape.context = std::max(1, *std::max_element(options.lengths.begin(), options.lengths.end()));
  }
  if (!options.q_lengths.empty()) {
    if (static_cast<int>(options.q_lengths.size()) != shape.batch) {
      throw UsageError(fmt::format("--q-lengths has {} entries, but there are {} requests: give one each.",
                                   options.q_lengths.size(), shape.batch));
    }
    shape.q_len = std::max(1, *std::max_element(options.q_lengths.begin(), options.q_lengths.end()));
  }
  const auto requests = static_cast<std::size_t>(shape.batch);
  std::vector<std::int64_t> kv(requests, shape.context), q(requests, shape.q_len);
  if (!options.lengths.empty()) kv.assign(options.lengths.begin(), options.lengths.end());
  if (!options.q_lengths.empty()) q.assign(options.q_lengths.begin(), options.q_lengths.end());

  AttentionProblem problem = to_problem(shape);
  state_shortest(problem, q);
  const Plan plan = halftone::plan(problem);
  const std::vector<std::int32_t> cu_q = cumulative(q), kv32(kv.begin(), kv.end());
  SequenceLengths lengths;
  lengths.cu_q = TensorView::contiguous(cu_q.data(), DType::kInt32, {shape.batch + 1});
  if (!problem.is_listed()) {
    lengths.kv_lengths = TensorView::contiguous(kv32.data(), DType::kInt32, {shape.batch});
  }
  std::string text = planning::explain(plan, lengths);
  while (text.ends_with('\n')) text.pop_back();
  print(terminal.out, "{}\n", text);
  print_floor(terminal, floor_of(problem, q, kv), options.bandwidth);
}

}  // namespace

void add_explain(Command app, Terminal& terminal) {
  const Command command =
      app.add_subcommand("explain", "Show the plan and schedule for a problem, and its floor");
  auto options = std::make_shared<ExplainOptions>();
  ProblemShape& shape = options->shape;
  command->footer(
      "Attention is causal, Q and O are bf16; with --top-k a query attends to its list in place of its "
      "request's\n"
      "keys, and the schedule shares out the places of the lists. The floor is what any kernel must move and "
      "compute.\n\n"
      "Examples:\n"
      "  halftone explain --batch 8 --context 8192 --format int4-g32 --bandwidth 40\n"
      "  halftone explain --lengths 100,8000,31 --format int8-head --workers 16   how a ragged batch is "
      "shared out\n"
      "  halftone explain --q-len 1024 --context 1024 --batch 1                  prefill\n"
      "  halftone explain --latent --q-heads 128 --batch 128                     latent attention (MLA)\n"
      "  halftone explain --latent --q-heads 64 --top-k 2048                     the same, sparse\n");
  command
      ->add_option(
          "-f,--format", options->format,
          fmt::format("Format of K and V, or K:V ({}; --latent: {})", kDefaultFormat, kDefaultLatent))
      ->type_name("FORMAT");
  command->add_option("--batch", shape.batch, "Requests")->check(between(0, 1 << 20))->capture_default_str();
  command->add_option("--context", shape.context, "Keys of a request")
      ->check(between(1, 1 << 30))
      ->capture_default_str();
  command->add_option("--q-len", shape.q_len, "Queries of a request")
      ->check(between(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--lengths", options->lengths,
                   "Keys of each request: 100,8000,31 (sets --batch, --context)")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(between(0, 1 << 30));
  command->add_option("--q-lengths", options->q_lengths, "Queries of each request")
      ->type_name("N,...")
      ->delimiter(',')
      ->check(between(0, 1 << 24));
  command->add_option("--q-heads", shape.q_heads, "Query heads")->capture_default_str();
  const Option kv_heads = command->add_option("--kv-heads", shape.kv_heads, "KV heads");
  kv_heads->capture_default_str();
  const Option head_dim = command->add_option("--head-dim", shape.head_dim, "Head dimension");
  head_dim->capture_default_str();
  const Option v_head_dim =
      command->add_option("--v-head-dim", shape.v_dim, "Head dimension of V (default: --head-dim)");
  command->add_option("--page-size", shape.page_size, "Tokens per page")->capture_default_str();
  command
      ->add_flag("--latent", options->latent,
                 "K and V are one latent of 512 + 64 dims, which all query heads share (MLA)")
      ->excludes(kv_heads)
      ->excludes(head_dim)
      ->excludes(v_head_dim);
  const Option top_k = command->add_option("--top-k", shape.top_k,
                                           "With --latent: every query reads so many keys, from a list");
  top_k->check(between(1, planning::kMaxListed));
  command
      ->add_option("--extra-top-k", shape.extra_top_k,
                   "With --top-k: and so many of a second cache, from a second list")
      ->check(between(1, planning::kMaxListed));
  command->add_option("--window", shape.window, "Sliding window: keys to the left")
      ->check(between(0, 1 << 30))
      ->excludes(top_k);
  add_policy_option(command, options->policy);
  add_arithmetic_option(command, options->arithmetic);
  command->add_option("--workers", shape.workers, "Workers (default: one per thread)")
      ->check(between(1, 65536));
  command->add_option("--bandwidth", options->bandwidth, "Memory bandwidth in GB/s")->check(positive());
  command->callback([options, &terminal] { run_explain(*options, terminal); });
}

}  // namespace halftone::cli
