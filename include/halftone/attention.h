// Attention over paged quantised caches and over plain K and V tensors: plan once per shape, schedule once
// per step, run once per layer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "halftone/cache.h"
#include "halftone/types.h"

namespace halftone {

/// Which keys a query sees. With kv_len keys and q_len queries, query i stands at position p = i + kv_len -
/// q_len (bottom-right alignment) and sees key j when j <= p (causal), j >= p - window_left and j <= p +
/// window_right.
struct Mask {
  bool causal = false;
  int window_left = -1;   ///< -1: unlimited
  int window_right = -1;  ///< -1: unlimited
  friend constexpr bool operator==(const Mask&, const Mask&) = default;
};

/// How the KV range of a request is split over workers. Partial results are always merged in a fixed order.
enum class SplitPolicy : std::uint8_t {
  kFast,            ///< balanced; work may move between workers at run time
  kReproducible,    ///< balanced; the same plan, lengths and input give the same bits
  kBatchInvariant,  ///< splits at absolute positions: a request's bits do not depend on its neighbours, nor
                    ///< on max_q_len, min_q_len, max_kv_len, max_total_kv and max_prompt_kv
};

/// In what precision the two matrix products, Q K^T and P V, take their operands. The caller's choice: a
/// lower one than k16Bit never comes of itself. Logits, softmax and sums are fp32 in each. A backend that
/// does not serve one refuses it (Unsupported). docs/arithmetic.md defines each bit by bit.
enum class Arithmetic : std::uint8_t {
  k16Bit,     ///< values of at least 16 bits; a backend may round what has more to 16
  kHalfInt8,  ///< Q K^T of 8-bit integers, Q and K with a scale per row (SageAttention, arXiv:2410.02367)
  kFullInt8,  ///< P V of 8-bit integers as well
  kFp8,       ///< both products of E4M3 (FlashAttention-3, arXiv:2407.08608)
};

/// "16-bit", "half_int8", "full_int8" or "fp8".
HALFTONE_API std::string_view arithmetic_name(Arithmetic arithmetic);
/// The arithmetic of such a name. Throws InvalidArgument.
HALFTONE_API Arithmetic parse_arithmetic(std::string_view name);

/// Plain K and V tensors, as a problem describes them where there is no cache. CUDA: f16 and bf16 with Q
/// alike, V of as many dims as K or 128 beside 192; in half_int8 and fp8 with Q of either type, K and V of
/// 128, 192, 256 or 512 dims, in fp8 also of 64, or K of 192 and V of 128 (else Unsupported).
struct KvTensors {
  DType dtype = DType::kBFloat16;  ///< of both: kFloat32, kFloat16 or kBFloat16
  int kv_heads = 0;                ///< >= 1
  int head_dim = 0;                ///< of K (and Q): 64, 80, 96, 128, 192, 256 or 512
  int v_head_dim = 0;              ///< of V (and O): the same choices; 0 means head_dim

  friend constexpr bool operator==(const KvTensors&, const KvTensors&) = default;
  constexpr int v_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
};

/// Sparse attention: each query attends to the keys that a list of its own names, in place of all keys of its
/// request. A second list may name keys of a second cache: extra tokens, or a window beside a selection from
/// the whole context. Both are part of one softmax.
struct ListedKeys {
  int top_k = 0;        ///< places of a query's list, up to 65,536; 0: no lists, all keys of the request
  int extra_top_k = 0;  ///< places of its second list, up to 65,536; 0: there is none
  KvCacheSpec extra{};  ///< of the second cache: kv_heads, head_dim and v_dim() as the first one's

  friend constexpr bool operator==(const ListedKeys&, const ListedKeys&) = default;
};

/// Shapes, options and bounds: everything that a plan depends on. Never the values of lengths.
struct AttentionProblem {
  Device device{};
  int batch = 0;                              ///< requests; 0 is a no-op
  int q_heads = 0;                            ///< a multiple of kv_heads()
  std::variant<KvCacheSpec, KvTensors> kv{};  ///< where K and V lie: in the pages of a cache, or in tensors
  int max_q_len = 1;                          ///< upper bound of a request's queries
  int max_kv_len = 0;                         ///< upper bound of a request's keys; unused with lists
  /// Queries of the shortest of the requests that have any, as the caller expects them: 1 to max_q_len (1 if
  /// that is 0). A hint for the choice of kernels, not a limit: where no request is expected that a kernel
  /// for few queries would serve sooner, run() does not launch one; requests of fewer queries, or none, are
  /// served all the same, if maybe more slowly. Unused with lists and, on CUDA, with kBatchInvariant or where
  /// prompts are staged and max_prompt_kv is stated and less than max_total_kv.
  int min_q_len = 1;
  /// Upper bound of all requests' keys, each counted where it is shared; 0: batch * max_kv_len. It sizes
  /// PassInfo::staged_bytes; unused with lists.
  std::int64_t max_total_kv = 0;
  /// Upper bound of the keys of all requests of more than one query, each counted where it is shared; 0:
  /// max_total_kv, in whose place it sizes PassInfo::staged_bytes where no single query is staged. Prompts
  /// beside many single queries are staged faster, in less workspace. Unused with lists.
  std::int64_t max_prompt_kv = 0;
  ListedKeys listed{};  ///< a cache only, without mask and ALiBi
  /// run() appends: every query brings K and V of its token (AttentionArgs::append), the last keys of its
  /// request. kv_lengths then say what the cache holds before the step, and schedule() counts the new tokens
  /// itself: request i has kv_lengths[i] + q_len keys, which max_kv_len, max_total_kv and max_prompt_kv
  /// bound. A cache only, without lists (else Unsupported).
  bool appends = false;
  DType q_dtype = DType::kBFloat16;    ///< kFloat32, kFloat16 or kBFloat16
  DType out_dtype = DType::kBFloat16;  ///< kFloat32, kFloat16 or kBFloat16
  Mask mask{};
  float scale = 0;     ///< logit = scale * q.k; 0 means 1/sqrt(head_dim)
  float softcap = 0;   ///< > 0: logit = softcap * tanh(logit / softcap), before ALiBi
  bool alibi = false;  ///< add -slope[head] * |p - j| (arXiv:2108.12409)
  bool sinks = false;  ///< a per-head logit joins the softmax denominator (arXiv:2309.17453)
  bool lse = false;    ///< write the natural-log sum of exponentials, sink included
  SplitPolicy policy = SplitPolicy::kReproducible;
  Arithmetic arithmetic = Arithmetic::k16Bit;
  int workers = 0;  ///< 0: one per SM (CUDA) or per OpenMP thread (CPU); else 1 to 65536

  constexpr bool is_paged() const { return std::holds_alternative<KvCacheSpec>(kv); }
  constexpr bool is_listed() const { return listed.top_k != 0; }
  /// Whether K and V are one latent cache.
  constexpr bool is_latent() const { return is_paged() && std::get<KvCacheSpec>(kv).is_latent(); }
  constexpr int kv_heads() const {
    return std::visit([](const auto& place) { return place.kv_heads; }, kv);
  }
  /// Of K and Q.
  constexpr int head_dim() const {
    return std::visit([](const auto& place) { return place.head_dim; }, kv);
  }
  /// Of V and O.
  constexpr int v_dim() const {
    return std::visit([](const auto& place) { return place.v_dim(); }, kv);
  }
};

/// A kernel of a plan and the requests that it serves: run() passes over the batch once for each. A request
/// belongs to the pass whose range has its packed rows (queries times query heads per KV head), whatever the
/// other requests are.
struct PassInfo {
  std::string config{};           ///< name of the row of the configuration table
  std::string reason{};           ///< why this row
  int min_rows = 0;               ///< packed rows of a request, at the bounds
  int max_rows = 0;               ///< likewise
  int row_block = 0;              ///< packed query rows of one work unit
  int kv_tile = 0;                ///< tokens: the granularity of splits
  int split_tokens = 0;           ///< batch_invariant: distance of the split boundaries; else 0
  std::int64_t max_units = 0;     ///< (request, KV head, row block) triples at the bounds
  std::int64_t max_partials = 0;  ///< partial results that fit into the workspace
  bool fuses_append = false;  ///< the kernel appends. CUDA: unless every pass of a plan with `appends` does,
                              ///< run() launches append's kernel before them
  std::int64_t staged_bytes = 0;  ///< of the workspace, for K and V that run() dequantises, or K of which it
                                  ///< makes codes, before the kernel reads them: max_prompt_kv keys
                                  ///< (max_total_kv, if single queries are staged, too, and of tensors) of as
                                  ///< many KV heads as fit into 512 MiB, at least one, then of the next ones;
                                  ///< 0: it reads them where they are
};

/// What a plan decided; `describe()` prints it. Fields that PassInfo has, too, are those of the last pass,
/// which serves the longest requests.
struct PlanInfo {
  std::vector<PassInfo> passes{};  ///< one or two, that of few packed rows first
  std::string config{};            ///< name of the row of the configuration table
  std::string reason{};            ///< why this row
  int workers = 0;
  int group = 0;                    ///< query heads per KV head
  int row_block = 0;                ///< packed query rows of one work unit
  int kv_tile = 0;                  ///< tokens: the granularity of splits
  int split_tokens = 0;             ///< batch_invariant: distance of the split boundaries; else 0
  std::int64_t max_units = 0;       ///< (request, KV head, row block) triples at the bounds
  std::int64_t max_partials = 0;    ///< partial results that fit into the workspace
  bool fuses_append = false;        ///< every pass's kernel appends. Else, where `appends` is set, run() does
                                    ///< so before them, on CUDA in a launch of its own
  std::int64_t staged_bytes = 0;    ///< part of the workspace for staged K and V, see PassInfo
  std::int64_t schedule_bytes = 0;  ///< part of the workspace that schedule() fills
  std::int64_t workspace_bytes = 0;  ///< the whole workspace, 256-byte aligned parts
};

/// Immutable; copies share state. Valid for any lengths within the problem's bounds.
class HALFTONE_API Plan {
 public:
  Plan() = default;
  const AttentionProblem& problem() const;
  const PlanInfo& info() const;
  std::size_t workspace_bytes() const;
  std::string describe() const;

  struct Impl;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl* impl() const { return impl_.get(); }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Validates the whole problem and chooses a configuration. Allocates only the Plan.
/// Throws InvalidArgument, Unsupported or ResourceExhausted.
HALFTONE_API Plan plan(const AttentionProblem& problem);

/// The lengths of one step, on the plan's device.
struct SequenceLengths {
  TensorView cu_q{};  ///< int32 [batch + 1], cu_q[0] = 0, non-decreasing; absent: max_q_len queries each
  TensorView kv_lengths{};  ///< int32 [batch], tokens in the cache at this time (see also
                            ///< AttentionProblem::appends); plain K and V have cu_kv instead, lists need none
  TensorView cu_kv{};       ///< int32 [batch + 1]: plain K and V only
  /// Lists only, and optional: int32 [total_q], places of each query's list that count. Places behind them
  /// are not read. Absent: top_k (extra_top_k) of each.
  TensorView counts{};
  TensorView extra_counts{};
};

/// Turns lengths into a work list at the start of `workspace` (uint8 [>= workspace_bytes], 256-byte aligned:
/// an AlignedBuffer of PlanInfo::workspace_bytes, or what cudaMalloc gives). One schedule serves every layer
/// of a step, one run() after another: the workspace also holds partial results, so it serves one call at a
/// time. Threads, and CUDA streams whose work may overlap, need a workspace each, with its own schedule; they
/// can share a plan. Never allocates; on CUDA never synchronises. CPU: throws OutOfRange or InvalidArgument
/// on lengths beyond the plan's bounds, and InvalidArgument while another call has the workspace. On CUDA
/// nobody sees that.
HALFTONE_API void schedule(const Plan& plan, const SequenceLengths& lengths, const TensorView& workspace,
                           Stream stream = nullptr);

/// Plain K and V, request after request; the last dim contiguous. CUDA: rows at multiples of 16 bytes, with
/// positive strides; k and v may have more rows than the schedule has keys, and keys beyond their rows are
/// left out. K and V of live tokens must be finite there: a row may meet V of a token that a mask hides.
struct KvTensorViews {
  TensorView k{};  ///< KvTensors::dtype [total_kv, kv_heads, head_dim]
  TensorView v{};  ///< the same dtype [total_kv, kv_heads, v_dim]
};

/// The new tokens of a layer, where run() appends: token t belongs to query t of Q. Request i's go to
/// positions kv_len - q_len, ..., kv_len - 1 of the schedule, through cache.block_table: lengths that change
/// between schedule() and run() move nothing. The bytes are those that append() writes, and attention is over
/// them: O is, bit for bit, that of append() and then run(). Values, RoPE and errors are append()'s, too; the
/// status is AttentionArgs::status, which CUDA needs here. A page may have one request that appends to it
/// (SequenceTable::reserve() sees to that); other requests may share it for the tokens before this step.
struct NewTokens {
  TensorView k{};  ///< as AppendArgs::k, [total_q, kv_heads, head_dim]: as many rows as Q
  TensorView v{};  ///< as AppendArgs::v, [total_q, kv_heads, v_dim]; absent for a latent cache
  /// Optional int64 [total_q]: a negative entry skips its token, which is not written; what the cache has at
  /// its position remains a key. Another one is the slot of the token's position by the block table: the CPU
  /// throws InvalidArgument where the two differ, CUDA goes by the table.
  TensorView slot_mapping{};
  Rope rope{};  ///< positions int32 [total_q]
  /// cache.lengths then become the schedule's: each grows by its q_len, also for tokens that are skipped or
  /// that a bad block-table entry drops. Any runs of a step may do it, the first, the last or all, since they
  /// write the same values and no run reads them. The next schedule() then counts on.
  bool advance = false;
};

/// One layer's tensors.
struct AttentionArgs {
  TensorView q{};  ///< q_dtype [total_q, q_heads, head_dim]; last dim contiguous. total_q is what
                   ///< schedule() saw; on CUDA, where cu_q lies on the device, q may have more rows,
                   ///< whose outputs are not written, and queries beyond its rows are left out
  SequenceLengths lengths{};  ///< the same values that schedule() saw; kv_lengths defaults to the cache's
  /// A cache of the problem's spec, or its tensors. With lists the cache needs neither block_table nor
  /// lengths.
  std::variant<PagedKv, KvTensorViews> kv{};
  NewTokens append{};  ///< present (its k) exactly when problem.appends
  /// Lists only: int32 [total_q, top_k], last dim contiguous. Each names a slot of the cache, page *
  /// page_size + offset; a negative one names nothing. A slot named twice counts twice. One that the cache
  /// lacks: kClamped skips it and sets bit 0 of the status, kTrusted throws OutOfRange on the CPU and does on
  /// CUDA as kClamped.
  TensorView indices{};
  TensorView extra_indices{};  ///< int32 [total_q, extra_top_k], slots of extra_kv: exactly with extra_top_k
  PagedKv extra_kv{};          ///< a cache of ListedKeys::extra: exactly with extra_top_k
  TensorView alibi_slopes{};   ///< f32 [q_heads], present exactly when problem.alibi
  TensorView sinks{};          ///< f32 [q_heads], present exactly when problem.sinks
  TensorView out{};            ///< out_dtype [total_q, q_heads, v_dim]; every element is written
  TensorView lse{};  ///< f32 [total_q, q_heads], natural log, -inf for an empty row; exactly when problem.lse
  /// Optional int32 [1], sticky. Bit 0: a block-table entry or a listed slot was out of bounds (kClamped; on
  /// CUDA always), or, on CUDA, a length beyond the table: those tokens were left out. Bit 2 (CUDA): the
  /// schedule has more queries than q has rows. Bit 3 (CUDA): a static scale of the cache is not finite and
  /// positive. Bit 5 (CUDA): the schedule has more keys than k and v have rows, or stages more than
  /// max_total_kv or max_prompt_kv. Where run() appends also what AppendArgs::status says, and bit 0 (CUDA)
  /// for a request whose new tokens do not fit below max_kv_len: none is written, its outputs are zeros, its
  /// length stays.
  TensorView status{};
  /// A promise, of use in a chain of layers on a CUDA stream: what wrote the cache, its block table, the
  /// status and the schedule had ended before the previous kernel of the stream began. run() then reads them
  /// while that kernel ends (programmatic dependent launch). Breaking it gives wrong results. Q may come from
  /// the previous kernel, and so may K and V of new tokens: of the cache the promise is about older ones.
  bool cache_settled = false;
  /// With cache_settled, and for a plan without `appends`: each request's last q_len tokens are left out of
  /// the promise, which lets append() come right before. Where that append() has made its own promise
  /// (AppendArgs::cache_settled), "the previous kernel" is the one before it. Kernels that cannot tell these
  /// tokens from older ones wait as if nothing was promised.
  bool new_tokens_late = false;
};

/// Computes attention, in one pass or two over the batch (PlanInfo::passes). `workspace` must hold a schedule
/// of this plan and serves one run() at a time, see schedule(). A row that sees no key gives zeros and LSE
/// -inf. Where it appends, all of append()'s errors are found before any byte is written; it advances last,
/// and after a failure it may be called again. Method: online softmax (arXiv:1805.02867) over tiles
/// (FlashAttention, arXiv:2205.14135), split-KV merge as in Flash-Decoding; logits, softmax and accumulation
/// in fp32. CPU: on as many of OpenMP's threads as the system starts; on one, with the same bits, in a
/// process forked after calls on several.
HALFTONE_API void run(const Plan& plan, const AttentionArgs& args, const TensorView& workspace,
                      Stream stream = nullptr);

/// plan + schedule + run with a workspace of its own: CPU only, for scripts and tests.
HALFTONE_API void attend(const AttentionProblem& problem, const AttentionArgs& args);

/// Merges partial attention results over disjoint keys: out = sum_i w_i out_i with w_i = exp(lse_i - lse).
/// parts: n views f32, f16 or bf16 [rows, heads, dim]; part_lse: n views f32 [rows, heads], natural log.
/// out: any of these dtypes; lse (f32 [rows, heads]) may be absent. Parts with LSE -inf contribute nothing.
/// On CUDA at most 512 parts (Unsupported); there it never allocates or synchronises.
/// Write `halftone::merge`: std::vector arguments make a plain `merge` find std::merge as well.
HALFTONE_API void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
                        const TensorView& out, const TensorView& lse, Stream stream = nullptr);

}  // namespace halftone
