// What the runners share, and that of the CPU.
#include "testing/runner.h"

#include <sys/mman.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <variant>

#include "halftone/error.h"
#include "testing/runners.h"

namespace halftone::testing {
namespace {

void require_intact(bool condition, const char* what) {
  if (!condition) throw std::logic_error(std::string("guard region written: ") + what);
}

/// The host's own memory.
class HostPlace final : public Place {
 public:
  ~HostPlace() override {
    for (const std::span<std::byte> room : reserved_) ::munmap(room.data(), room.size());
  }
  using Place::add;
  TensorView add(const TensorView& host) override { return host; }
  void* reserve(std::size_t bytes) override {  // addresses: what is not written takes no memory
    void* const room =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return nullptr;
    reserved_.emplace_back(static_cast<std::byte*>(room), bytes);
    return room;
  }
  void write(const TensorView& placed, const Tensor& host) const override {
    std::memmove(placed.data, host.bytes().data(), host.bytes().size());
  }
  void finish() const override {}
  void read(const TensorView& placed, const Tensor& host) const override {
    if (placed.present()) std::memmove(host.bytes().data(), placed.data, host.bytes().size());
  }

 private:
  std::vector<std::span<std::byte>> reserved_;
};

class CpuRunner final : public Runner {
 public:
  std::string_view name() const override { return "cpu"; }
  Device device() const override { return {}; }
  std::unique_ptr<Place> place() const override { return std::make_unique<HostPlace>(); }
  bool checks_values() const override { return true; }
  std::string judge(const Problem& p, const Outputs& outputs) const override {
    return testing::judge(p, make_reference(p), outputs);
  }
};

}  // namespace

const Runner& cpu_runner() {
  static const CpuRunner runner;
  return runner;
}

PagedKv Place::add(const PagedKv& host) {
  PagedKv placed = host;
  for (TensorView* t :
       {&placed.pages, &placed.block_table, &placed.lengths, &placed.k_scale.scale, &placed.k_scale.min,
        &placed.v_scale.scale, &placed.v_scale.min, &placed.k_channels.offset, &placed.k_channels.scale}) {
    *t = add(*t);
  }
  return placed;
}

AttentionArgs Place::add(const AttentionArgs& host) {
  AttentionArgs placed = host;
  if (auto* cache = std::get_if<PagedKv>(&placed.kv)) {
    *cache = add(*cache);
  } else {
    auto& [k, v] = std::get<KvTensorViews>(placed.kv);
    k = add(k), v = add(v);
  }
  placed.extra_kv = add(placed.extra_kv);
  for (TensorView* t :
       {&placed.q, &placed.append.k, &placed.append.v, &placed.append.slot_mapping, &placed.lengths.cu_q,
        &placed.lengths.kv_lengths, &placed.lengths.cu_kv, &placed.lengths.counts,
        &placed.lengths.extra_counts, &placed.indices, &placed.extra_indices, &placed.alibi_slopes,
        &placed.sinks, &placed.out, &placed.lse, &placed.status}) {
    *t = add(*t);
  }
  placed.append.rope = add(placed.append.rope);
  return placed;
}

Rope Place::add(const Rope& host) {
  return {host.pairing, add(host.cos), add(host.sin), add(host.positions)};
}

AppendArgs Place::add(const AppendArgs& host) {
  AppendArgs placed = host;
  for (TensorView* t : {&placed.k, &placed.v, &placed.slot_mapping, &placed.cu_seqlens, &placed.status}) {
    *t = add(*t);
  }
  placed.rope = add(placed.rope);
  return placed;
}

std::vector<TensorView> Place::add(const std::vector<Tensor>& host) {
  std::vector<TensorView> placed;
  placed.reserve(host.size());
  for (const Tensor& t : host) placed.push_back(add(t.view()));
  return placed;
}

Plan Runner::plan(AttentionProblem problem) const {
  problem.device = device();
  return halftone::plan(problem);
}

bool Runner::serves(const Problem& p) const {
  try {
    (void)plan(p);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

Outputs Runner::run(const Problem& p, const Plan& plan) const {
  const PlacedRun once(*this, p, plan);
  once.schedule();
  once.run();
  Outputs outputs = once.outputs();
  require_intact(p.guards_intact(), "an input");
  return outputs;
}

void Runner::append(const Cache& cache, const AppendArgs& args, const Tensor& status) const {
  const std::unique_ptr<Place> there = place();
  const PagedKv pages = there->add(cache.view());
  const AppendArgs placed = there->add(args);
  halftone::append(pages, placed);
  there->finish();
  there->read(pages.pages, cache.pages);
  there->read(pages.lengths, cache.lengths);
  if (status.present()) there->read(placed.status, status);
  require_intact(cache.guards_intact(), "the cache");
}

void Runner::dequantize(const Cache& cache, const Tensor& k_out, const Tensor& v_out) const {
  const std::unique_ptr<Place> there = place();
  const TensorView k = there->add(k_out.view()), v = there->add(v_out.view());
  halftone::dequantize(there->add(cache.view()), k, v);
  there->finish();
  there->read(k, k_out);
  there->read(v, v_out);
  require_intact(cache.guards_intact(), "the cache");
  require_intact(k_out.guards_intact() && v_out.guards_intact(), "an output");
}

void Runner::merge(const std::vector<Tensor>& parts, const std::vector<Tensor>& part_lse, const Tensor& out,
                   const Tensor& lse) const {
  const std::unique_ptr<Place> there = place();
  const TensorView placed_out = there->add(out.view()), placed_lse = there->add(lse.view());
  halftone::merge(there->add(parts), there->add(part_lse), placed_out, placed_lse);
  there->finish();
  there->read(placed_out, out);
  there->read(placed_lse, lse);
  require_intact(out.guards_intact() && lse.guards_intact(), "an output");
}

PlacedRun::PlacedRun(const Runner& runner, const Problem& p, const Plan& plan, int fill)
    : plan_(plan),
      host_(make_outputs(p)),
      workspace_(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())}),
      place_(runner.place()) {
  workspace_.fill_bytes(static_cast<std::uint8_t>(fill));
  space_ = place_->add(workspace_.view());
  args = place_->add(arguments(p, host_));
}

void PlacedRun::clear() const {
  for (const auto& [placed, host] : {std::pair{&args.out, &host_.out}, std::pair{&args.lse, &host_.lse}}) {
    if (!placed->present()) continue;
    host->fill_bytes(0xff);
    place_->write(*placed, *host);
  }
}

Outputs PlacedRun::outputs() const {
  place_->finish();
  place_->read(args.out, host_.out);
  place_->read(args.lse, host_.lse);
  place_->read(args.status, host_.status);
  require_intact(workspace_.guards_intact(), "the workspace");
  require_intact(host_.out.guards_intact() && host_.lse.guards_intact() && host_.status.guards_intact(),
                 "an output");
  return Outputs{host_.out.clone(), host_.lse.present() ? host_.lse.clone() : Tensor{}, host_.status.clone()};
}

}  // namespace halftone::testing
