// One interface to every backend: what runs a problem of the case table, and any other call, on the CPU or on
// a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

/// Where a backend finds the tensors of a call: the host's own memory, or copies in that of a device.
class Place {
 public:
  Place() = default;
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  virtual ~Place() = default;

  /// The same view for the backend; absent stays absent. The host's tensor must outlive the place.
  virtual TensorView add(const TensorView& host) = 0;
  PagedKv add(const PagedKv& host);
  AttentionArgs add(const AttentionArgs& host);
  AppendArgs add(const AppendArgs& host);
  Rope add(const Rope& host);
  std::vector<TensorView> add(const std::vector<Tensor>& host);

  /// Room for so many bytes, which may hold anything; null where the backend has not so many.
  virtual void* reserve(std::size_t bytes) = 0;

  /// Overwrites `placed`, as add() gave it, with the bytes of `host`.
  virtual void write(const TensorView& placed, const Tensor& host) const = 0;
  /// Waits for the calls. Throws std::logic_error if a guard region of a copy was written.
  virtual void finish() const = 0;
  /// Overwrites `host` with what finished calls have written to `placed`, unless that is absent.
  virtual void read(const TensorView& placed, const Tensor& host) const = 0;
};

/// A backend on this machine.
class Runner {
 public:
  Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  virtual ~Runner() = default;

  virtual std::string_view name() const = 0;
  virtual Device device() const = 0;
  virtual std::unique_ptr<Place> place() const = 0;
  /// Whether lengths, tables and values are checked before any work. Where they lie on a device they are
  /// limited there, and the status word reports them.
  virtual bool checks_values() const = 0;
  /// judge() with the limits of what serves the problem.
  virtual std::string judge(const Problem& p, const Outputs& outputs) const = 0;

  /// For this device. Throws what halftone::plan() throws.
  Plan plan(AttentionProblem problem) const;
  Plan plan(const Problem& p) const { return plan(p.problem); }
  /// False where plan() throws ErrorCode::kUnsupported.
  bool serves(const Problem& p) const;

  /// plan + schedule + run on a workspace of exactly the stated size, of bytes 0xFF. Throws std::logic_error
  /// if a guard region was written.
  Outputs run(const Problem& p, const Plan& plan) const;
  Outputs run(const Problem& p) const { return run(p, plan(p)); }
  /// append() of the host's tensors; pages, lengths and status end up in theirs.
  void append(const Cache& cache, const AppendArgs& args, const Tensor& status = {}) const;
  /// dequantize() of the host's tensors; absent outputs stay absent.
  void dequantize(const Cache& cache, const Tensor& k_out, const Tensor& v_out) const;
  /// merge() of the host's tensors; an absent `lse` stays absent.
  void merge(const std::vector<Tensor>& parts, const std::vector<Tensor>& part_lse, const Tensor& out,
             const Tensor& lse) const;
};

/// Those that this machine can run: the CPU first, then, in CUDA builds, a GPU of compute capability 9.0.
const std::vector<const Runner*>& runners();

/// A problem's tensors and a workspace where a backend finds them, for any number of calls.
class PlacedRun {
 public:
  /// Bytes of the workspace are `fill` at first.
  PlacedRun(const Runner& runner, const Problem& p, const Plan& plan, int fill = 0xff);
  PlacedRun(const Runner& runner, const Problem& p) : PlacedRun(runner, p, runner.plan(p)) {}

  void schedule(Stream stream = nullptr) const { halftone::schedule(plan_, args.lengths, space(), stream); }
  void run(Stream stream = nullptr) const { halftone::run(plan_, args, space(), stream); }
  /// See Place; the tensor may be one of `args`.
  void write(const TensorView& placed, const Tensor& host) const { place_->write(placed, host); }

  /// See Place.
  void read(const TensorView& placed, const Tensor& host) const { place_->read(placed, host); }

  /// Outputs become bytes 0xFF again.
  void clear() const;
  /// The outputs so far. Throws std::logic_error if a guard region was written.
  Outputs outputs() const;
  TensorView space() const { return space_; }

 private:
  Plan plan_;
  Outputs host_;
  Tensor workspace_;
  std::unique_ptr<Place> place_;
  TensorView space_;

 public:
  AttentionArgs args;  ///< of the calls; a test may change them
};

}  // namespace halftone::testing
