#include "cli/bench/cpu.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>

#include "cli/figures/metrics.h"
#include "cli/files/owned_cache.h"
#include "cli/host/host.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "reference/random.h"

namespace halftone::cli {
namespace {

using reference::Tensor;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kUnknownCache = std::int64_t{64} << 20;  // assumed when the system does not tell
constexpr std::int64_t kMaxCopies = 64;

std::int64_t last_level_cache() {
  static const std::int64_t bytes = cpu_info().last_level_cache;
  return bytes > 0 ? bytes : kUnknownCache;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Tensor random_activations(reference::Random& random, DType dtype, std::int64_t tokens, int heads, int dim) {
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * dim));
  reference::fill(random, reference::Data::kOutlierChannels, values, heads, dim);
  return Tensor::of(dtype, {tokens, heads, dim}, values);
}

/// Refuses a case before it makes the machine swap or the kernel kill the process.
void require_memory(std::int64_t bytes) {
  const std::int64_t available = cpu_info().memory_available;
  if (available > 0 && bytes > available / 10 * 9) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("the case needs {}, but {} are available: use less --batch, --context or --q-len.",
                    human_bytes(static_cast<double>(bytes)), human_bytes(static_cast<double>(available))));
  }
}

/// Copies of a cache big enough to push each other out of the last-level cache.
std::int64_t copies_for(std::int64_t bytes) {
  return std::clamp<std::int64_t>((4 * last_level_cache() + bytes - 1) / std::max<std::int64_t>(1, bytes), 1,
                                  kMaxCopies);
}

/// A cache whose requests are full: a random stretch of pages, repeated, in shuffled order.
OwnedCache full_cache(const ProblemShape& shape, std::int64_t copies, reference::Random& random) {
  const KvCacheSpec spec = cache_spec(shape);
  const std::int64_t request_pages = (shape.context + spec.page_size - 1) / spec.page_size;
  require_memory(copies * shape.batch * request_pages * page_layout(spec).page_bytes);
  OwnedCache cache(spec, static_cast<int>(shape.batch * copies), shape.context);
  const std::int64_t pages = cache.pages.shape()[0], page_bytes = cache.pages.shape()[1];
  const std::int64_t source_pages = std::min<std::int64_t>(pages, std::max(1, 512 / spec.page_size));
  const std::int64_t tokens = source_pages * spec.page_size;
  const Tensor k = random_activations(random, DType::kBFloat16, tokens, spec.kv_heads, spec.head_dim);
  const Tensor v = random_activations(random, DType::kBFloat16, tokens, spec.kv_heads, spec.v_dim());
  cache.calibrate(k.view(), v.view());
  AppendArgs args;
  args.k = k.view();
  if (!spec.is_latent()) args.v = v.view();
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  std::iota(slots.begin(), slots.end(), 0);
  args.slot_mapping = TensorView::contiguous(slots.data(), DType::kInt64, {tokens});
  append(cache.view(), args);
  std::uint8_t* bytes = cache.pages.bytes().data();
#pragma omp parallel for
  for (std::int64_t p = source_pages; p < pages; ++p) {
    std::memcpy(bytes + p * page_bytes, bytes + p % source_pages * page_bytes,
                static_cast<std::size_t>(page_bytes));
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(order);
  std::copy(order.begin(), order.end(), cache.block_table.as<std::int32_t>().begin());
  std::ranges::fill(cache.lengths.as<std::int32_t>(), shape.context);
  return cache;
}

/// A tensor [tokens, heads, dim] of a random stretch, repeated.
Tensor repeated_activations(reference::Random& random, DType dtype, std::int64_t tokens, int heads, int dim) {
  const Tensor pattern = random_activations(random, dtype, std::min<std::int64_t>(tokens, 512), heads, dim);
  Tensor all(dtype, {tokens, heads, dim});
  const std::span<const std::uint8_t> from = pattern.bytes();
  const std::span<std::uint8_t> to = all.bytes();
  const std::int64_t step = std::ssize(from), parts = (std::ssize(to) + step - 1) / step;
#pragma omp parallel for
  for (std::int64_t i = 0; i < parts; ++i) {
    std::memcpy(to.data() + i * step, from.data(),
                static_cast<std::size_t>(std::min(step, std::ssize(to) - i * step)));
  }
  return all;
}

/// What a case attends over: `copies` caches, or K and V in tensors.
class Keys {
 public:
  Keys(const ProblemShape& shape, std::int64_t copies, reference::Random& random) : shape_(shape) {
    if (!shape.plain) {
      cache_.emplace(full_cache(shape, copies, random));
      if (shape.top_k > 0) indices_ = lists_of(*cache_, shape.top_k, copies, kFirstLists);
      if (shape.extra_top_k > 0) {
        extra_.emplace(full_cache(shape, copies, random));
        extra_indices_ = lists_of(*extra_, shape.extra_top_k, copies, kSecondLists);
      }
      return;
    }
    const std::int64_t tokens = std::int64_t{shape.batch} * shape.context;
    const int v_dim = shape.v_dim == 0 ? shape.head_dim : shape.v_dim;
    require_memory(copies * tokens * shape.kv_heads * (shape.head_dim + v_dim) * 2);
    k_ = repeated_activations(random, shape.dtype, copies * tokens, shape.kv_heads, shape.head_dim);
    v_ = repeated_activations(random, shape.dtype, copies * tokens, shape.kv_heads, v_dim);
    cu_kv_ = Tensor(DType::kInt32, {shape.batch + 1});
    for (int r = 0; r <= shape.batch; ++r) {
      cu_kv_.as<std::int32_t>()[static_cast<std::size_t>(r)] = r * shape.context;
    }
  }

  void select(std::int64_t copy, AttentionArgs& args) const {
    const auto part = [&](const TensorView& whole, std::int64_t rows) {
      return token_range(whole, copy * rows, rows);
    };
    if (cache_) {
      const auto part_of = [&](const OwnedCache& whole) {
        PagedKv cache = whole.view();
        cache.block_table = part(cache.block_table, shape_.batch);
        cache.lengths = part(cache.lengths, shape_.batch);
        return cache;
      };
      const PagedKv cache = part_of(*cache_);
      args.kv = cache;
      const std::int64_t queries = std::int64_t{shape_.batch} * shape_.q_len;
      if (extra_) {
        args.extra_kv = part_of(*extra_);
        args.extra_indices = part(extra_indices_.view(), queries);
      }
      if (shape_.top_k > 0) {
        args.indices = part(indices_.view(), queries);
        return;
      }
      args.lengths.kv_lengths = cache.lengths;
    } else {
      const std::int64_t tokens = std::int64_t{shape_.batch} * shape_.context;
      args.kv = KvTensorViews{part(k_.view(), tokens), part(v_.view(), tokens)};
      args.lengths.cu_kv = cu_kv_.view();
    }
  }

 private:
  Tensor lists_of(const OwnedCache& cache, int top_k, std::int64_t copies, std::uint64_t seed) const {
    const int page_size = cache.spec.page_size;
    const std::int64_t width = cache.block_table.shape()[1];
    std::vector<std::vector<std::int32_t>> slots(static_cast<std::size_t>(copies * shape_.batch));
    for (std::size_t r = 0; r < slots.size(); ++r) {
      for (int t = 0; t < shape_.context; ++t) {
        const std::size_t entry =
            r * static_cast<std::size_t>(width) + static_cast<std::size_t>(t / page_size);
        slots[r].push_back(cache.block_table.as<std::int32_t>()[entry] * page_size + t % page_size);
      }
    }
    const std::vector<std::int64_t> q_lengths(slots.size(), shape_.q_len);
    return Tensor::of({copies * shape_.batch * shape_.q_len, top_k},
                      random_lists(top_k, q_lengths, slots, seed));
  }

  const ProblemShape& shape_;
  std::optional<OwnedCache> cache_, extra_;
  Tensor k_, v_, cu_kv_, indices_, extra_indices_;
};

/// Calls `call(copy)` in turn over the copies and returns the median time.
double time_calls(const std::function<void(std::int64_t)>& call, std::int64_t copies, int repeats,
                  int& done) {
  call(0);  // pages in the code and the outputs
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  for (done = 0; repeats > 0 ? done < repeats : done < 5 || (seconds_since(start) < 0.5 && done < 1000);
       ++done) {
    const Clock::time_point begin = Clock::now();
    call((done + 1) % copies);
    times.push_back(seconds_since(begin) * 1e6);
  }
  return median(std::move(times));
}

/// The new tokens of a step, which end where the context does.
struct StepTokens {
  Tensor k, v, before, cu_seqlens;

  StepTokens(const ProblemShape& shape, reference::Random& random)
      : before(DType::kInt32, {shape.batch}), cu_seqlens(DType::kInt32, {shape.batch + 1}) {
    const KvCacheSpec spec = cache_spec(shape);
    const std::int64_t tokens = std::int64_t{shape.batch} * shape.q_len;
    k = random_activations(random, shape.dtype, tokens, spec.kv_heads, spec.head_dim);
    if (!spec.is_latent()) v = random_activations(random, shape.dtype, tokens, spec.kv_heads, spec.v_dim());
    std::ranges::fill(before.as<std::int32_t>(), shape.context - shape.q_len);
    for (int r = 0; r <= shape.batch; ++r)
      cu_seqlens.as<std::int32_t>()[static_cast<std::size_t>(r)] = r * shape.q_len;
  }

  void append_to(const AttentionArgs& args) const {
    PagedKv cache = std::get<PagedKv>(args.kv);
    cache.lengths = before.view();
    append(cache, {.k = k.view(), .v = v.view(), .cu_seqlens = cu_seqlens.view()});
  }
};

BenchRow time_attention(const BenchCase& setup, int repeats) {
  const ProblemShape& shape = setup.shape;
  const bool separate = setup.append == LayerAppend::kSeparate, fused = setup.append == LayerAppend::kFused;
  AttentionProblem problem = to_problem(shape);
  problem.min_q_len = shape.q_len;  // here a case has requests of one kind
  problem.appends = fused;
  const Plan plan = halftone::plan(problem);
  const auto requests = static_cast<std::size_t>(shape.batch);
  const Floor floor = floor_of(problem, std::vector<std::int64_t>(requests, shape.q_len),
                               std::vector<std::int64_t>(requests, shape.context));
  BenchRow row;
  row.setup = setup;
  row.setup.chain = 1;  // the copies are the layers
  row.kernel = plan.info().config;
  row.bytes = floor.bytes();
  if (separate || fused) row.bytes += append_traffic(setup).bytes;
  const std::int64_t copies = copies_for(floor.cache_bytes);
  row.copies = static_cast<int>(copies);
  row.cold = copies * floor.cache_bytes > 2 * last_level_cache();
  reference::Random random(1);
  const Keys keys(shape, copies, random);
  const std::int64_t queries = std::int64_t{shape.batch} * shape.q_len;
  const Tensor q = random_activations(random, shape.dtype, queries, shape.q_heads, shape.head_dim);
  const Tensor out(shape.dtype, {queries, shape.q_heads, problem.v_dim()});
  const Tensor workspace(DType::kUInt8,
                         {std::max<std::int64_t>(1, static_cast<std::int64_t>(plan.workspace_bytes()))});
  AttentionArgs args;
  args.q = q.view();
  args.out = out.view();
  keys.select(0, args);
  std::optional<StepTokens> tokens;
  if (separate || fused) tokens.emplace(shape, random);
  if (fused) {
    args.append = {.k = tokens->k.view(), .v = tokens->v.view()};
    args.lengths.kv_lengths = tokens->before.view();
  }
  schedule(plan, args.lengths, workspace.view());
  row.us = time_calls(
      [&](std::int64_t copy) {
        keys.select(copy, args);
        if (separate) tokens->append_to(args);
        halftone::run(plan, args, workspace.view());
      },
      copies, repeats, row.repeats);
  row.gflops = floor.flops / row.us / 1e3;
  return row;
}

/// Appends q_len tokens to every request. Only the pages of these tokens exist; the first starts where a
/// context of this length ends in its page.
BenchRow time_append(const BenchCase& setup, int repeats) {
  const ProblemShape& shape = setup.shape;
  const KvCacheSpec spec = cache_spec(shape);
  const AppendTraffic traffic = append_traffic(setup);
  const std::int64_t tokens = traffic.tokens;
  BenchRow row;
  row.setup = setup;
  row.bytes = traffic.bytes;
  const std::int64_t copies = copies_for(row.bytes);
  row.copies = static_cast<int>(copies);
  row.cold = copies * row.bytes > 2 * last_level_cache();
  const std::int64_t offset = (shape.context - shape.q_len) % spec.page_size;
  require_memory(2 * copies * row.bytes);
  reference::Random random(1);
  const Tensor k = random_activations(random, shape.dtype, tokens, spec.kv_heads, spec.head_dim);
  const Tensor v = random_activations(random, shape.dtype, tokens, spec.kv_heads, spec.v_dim());
  OwnedCache cache(spec, static_cast<int>(shape.batch * copies), offset + shape.q_len);
  cache.calibrate(k.view(), v.view());
  std::vector<Tensor> inputs;  // K and V of each copy
  for (std::int64_t c = 0; c < copies; ++c) {
    inputs.push_back(k.clone());
    inputs.push_back(v.clone());
  }
  const std::int64_t request_tokens = cache.block_table.shape()[1] * spec.page_size;
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  AppendArgs args;
  args.slot_mapping = TensorView::contiguous(slots.data(), DType::kInt64, {tokens});
  const PagedKv view = cache.view();
  row.us = time_calls(
      [&](std::int64_t copy) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t request = copy * shape.batch + t / shape.q_len;
          slots[static_cast<std::size_t>(t)] = request * request_tokens + offset + t % shape.q_len;
        }
        args.k = inputs[static_cast<std::size_t>(2 * copy)].view();
        if (!spec.is_latent()) args.v = inputs[static_cast<std::size_t>(2 * copy + 1)].view();
        append(view, args);
      },
      copies, repeats, row.repeats);
  return row;
}

/// Checks of a sanitizer would take several times as long as the reads.
#ifdef __clang__
__attribute__((no_sanitize("address", "thread", "undefined")))
#endif
std::uint64_t
sum_of(const std::uint64_t* words, std::int64_t count) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

}  // namespace

double beyond_gemm(double both_us, double gemm_us) {
  const double us = both_us - gemm_us;
  if (us > 0) return us;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("layers behind GEMMs took {:.2f} us and the GEMMs alone {:.2f}, which leaves "
                          "nothing: not measured; use a longer --context, or more --batch.",
                          both_us, gemm_us));
}

AppendTraffic append_traffic(const BenchCase& setup) {
  const KvCacheSpec spec = cache_spec(setup.shape);
  AppendTraffic traffic;
  traffic.tokens = std::int64_t{setup.shape.batch} * setup.shape.q_len;
  const int dims = spec.is_latent() ? spec.head_dim : spec.head_dim + spec.v_dim();
  traffic.in_bytes = traffic.tokens * spec.kv_heads * dims * 2;
  traffic.bytes =
      traffic.in_bytes + std::llround(static_cast<double>(traffic.tokens) * bytes_per_token(spec));
  return traffic;
}

double measure_read_bandwidth() {
  const std::int64_t bytes = std::max<std::int64_t>(4 * last_level_cache(), std::int64_t{256} << 20);
  const std::vector<std::uint64_t> memory(static_cast<std::size_t>(bytes / 8), 1);
  constexpr std::int64_t kPiece = 1 << 13;  // small enough for equal shares of many threads
  const std::int64_t pieces = bytes / 8 / kPiece;
  double best = 0;
  volatile std::uint64_t sink = 0;
  for (int pass = 0; pass < 6; ++pass) {
    std::uint64_t sum = 0;
    const Clock::time_point start = Clock::now();
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (std::int64_t i = 0; i < pieces; ++i) sum += sum_of(memory.data() + i * kPiece, kPiece);
    best = std::max(best, static_cast<double>(pieces * kPiece * 8) / seconds_since(start) / 1e9);
    sink = sink + sum;
  }
  return best;
}

double share_of_ceiling(const BenchRow& row) {
  return row.gather_us > 0 ? row.gather_us / row.us : row.gbs / row.ceiling_gbs;
}

BenchRow run_case(const BenchCase& setup, int repeats) {
  BenchRow row = setup.suite == Suite::kAppend ? time_append(setup, repeats) : time_attention(setup, repeats);
  row.gbs = static_cast<double>(row.bytes) / row.us / 1e3;
  return row;
}

}  // namespace halftone::cli
