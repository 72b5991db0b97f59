// Participant of compare_cpu.py: halftone through its public headers, pages in shuffled order.
// Arguments: the shape (worker.h), data=DIR, format=NAME, page_size=N. Its first line also tells how far the
// resident memory of the process rose over the filled caches, q and the output while it planned, scheduled
// and ran.
#include <halftone/attention.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <random>

#include "bench/peers/worker.h"

namespace {

using halftone::DType;
using halftone::TensorView;

std::uint16_t to_bf16(float x) {  // finite values, to nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// A line of /proc/self/status such as VmRSS, in bytes.
std::int64_t process_status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  throw std::runtime_error(name + " is not in /proc/self/status");
}

/// Every layer of every request in one pool of pages.
class Caches {
 public:
  Caches(const peers::Shape& s, const halftone::KvCacheSpec& spec, const std::vector<float>& k,
         const std::vector<float>& v)
      : shape_(s),
        request_pages_((s.context + spec.page_size - 1) / spec.page_size),
        page_bytes_(halftone::page_layout(spec).page_bytes),
        pages_(static_cast<std::size_t>(s.layers * s.batch * request_pages_ * page_bytes_)),
        table_(static_cast<std::size_t>(s.layers * s.batch * request_pages_)),
        lengths_(static_cast<std::size_t>(s.batch), static_cast<std::int32_t>(s.context)) {
    const std::int64_t page_count = s.layers * s.batch * request_pages_;
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(1));
    view_.spec = spec;
    view_.pages = TensorView::contiguous(pages_.data(), DType::kUInt8, {page_count, page_bytes_});
    halftone::AppendArgs tokens;
    tokens.k = TensorView::contiguous(k.data(), DType::kFloat32, {s.context, s.kv_heads, s.head_dim});
    tokens.v = TensorView::contiguous(v.data(), DType::kFloat32, {s.context, s.kv_heads, s.head_dim});
    if (spec.k_format.static_scale()) view_.k_scale = calibrate(tokens.k, spec.k_format, k_scale_);
    if (spec.v_format.static_scale()) view_.v_scale = calibrate(tokens.v, spec.v_format, v_scale_);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(s.context));
    tokens.slot_mapping = TensorView::contiguous(slots.data(), DType::kInt64, {s.context});
    for (std::int64_t request = 0; request < s.layers * s.batch; ++request) {
      for (std::int64_t t = 0; t < s.context; ++t) {
        const std::int64_t entry = request * request_pages_ + t / spec.page_size;
        slots[static_cast<std::size_t>(t)] =
            std::int64_t{table_[static_cast<std::size_t>(entry)]} * spec.page_size + t % spec.page_size;
      }
      halftone::append(view_, tokens);
    }
  }

  halftone::PagedKv layer(std::int64_t index) const {
    halftone::PagedKv view = view_;
    view.block_table = TensorView::contiguous(table_.data() + index * shape_.batch * request_pages_,
                                              DType::kInt32, {shape_.batch, request_pages_});
    view.lengths = TensorView::contiguous(lengths_.data(), DType::kInt32, {shape_.batch});
    return view;
  }

 private:
  static halftone::StaticScale calibrate(const TensorView& x, const halftone::KvFormat& format,
                                         halftone::StaticScaleValues& values) {
    values = halftone::calibrate(x, format);
    const auto view = [](const std::vector<float>& v) {
      if (v.empty()) return TensorView{};
      return TensorView::contiguous(v.data(), DType::kFloat32, {static_cast<std::int64_t>(v.size())});
    };
    return {view(values.scale), view(values.min)};
  }

  peers::Shape shape_;
  std::int64_t request_pages_, page_bytes_;
  peers::Buffer pages_;
  std::vector<std::int32_t> table_, lengths_;
  halftone::StaticScaleValues k_scale_, v_scale_;
  halftone::PagedKv view_;
};

void decode(const peers::Arguments& arguments) {
  const peers::Shape s(arguments);
  const std::string data = arguments.text("data");
  halftone::AttentionProblem problem;
  problem.batch = static_cast<int>(s.batch);
  problem.q_heads = static_cast<int>(s.q_heads);
  const halftone::KvFormat format = halftone::parse_format(arguments.text("format"));
  const auto spec = halftone::KvCacheSpec::separate(format, format, static_cast<int>(s.kv_heads),
                                                    static_cast<int>(s.head_dim), 0,
                                                    static_cast<int>(arguments.integer("page_size")));
  problem.kv = spec;
  problem.max_kv_len = static_cast<int>(s.context);
  problem.workers = s.threads;
  const Caches caches(s, spec, peers::read_floats(data + "/k.f32", s.request_values()),
                      peers::read_floats(data + "/v.f32", s.request_values()));
  std::vector<std::uint16_t> q, out(static_cast<std::size_t>(s.output_values()));
  const std::vector<float> one = peers::read_floats(data + "/q.f32", s.q_heads * s.head_dim);
  for (std::int64_t b = 0; b < s.batch; ++b)
    std::transform(one.begin(), one.end(), std::back_inserter(q), to_bf16);
  halftone::AttentionArgs args;
  args.q = TensorView::contiguous(q.data(), DType::kBFloat16, {s.batch, s.q_heads, s.head_dim});
  args.out = TensorView::contiguous(out.data(), DType::kBFloat16, {s.batch, s.q_heads, s.head_dim});

  std::ofstream("/proc/self/clear_refs") << 5;  // the peak of the resident memory starts here
  const std::int64_t before = process_status("VmRSS");
  const halftone::Plan plan = halftone::plan(problem);
  const peers::Buffer workspace(plan.workspace_bytes());
  const TensorView work =
      TensorView::contiguous(workspace.data(), DType::kUInt8, {static_cast<std::int64_t>(workspace.bytes())});
  const auto step = [&](std::int64_t layer) {
    const halftone::PagedKv cache = caches.layer(layer);
    args.kv = cache;
    if (layer == 0) {  // once per token, as a server would
      halftone::SequenceLengths lengths;
      lengths.kv_lengths = cache.lengths;
      halftone::schedule(plan, lengths, work);
    }
    halftone::run(plan, args, work);
  };
  for (std::int64_t layer = 0; layer < s.layers; ++layer) step(layer);
  const std::int64_t growth = process_status("VmHWM") - before;

  const double bytes = halftone::bytes_per_token(spec) * static_cast<double>(s.batch * s.context);
  std::cout << "{\"bytes\": " << static_cast<std::int64_t>(bytes) << ", \"config\": \"" << plan.info().config
            << "\", \"workspace_bytes\": " << plan.workspace_bytes()
            << ", \"resident_growth_bytes\": " << growth << "}" << std::endl;
  peers::serve(s.layers, step, [&] {
    std::vector<float> values;
    std::transform(out.begin(), out.end(), std::back_inserter(values), from_bf16);
    return values;
  });
}

}  // namespace

int main(int argc, char** argv) { return peers::participant(argc, argv, decode); }
