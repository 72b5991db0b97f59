// The blocked path: attention of many packed rows. Lanes are rows. Each chunk of K, then of V, is decoded to
// fp32 once; its elements are broadcast against vectors of rows, so no layout needs reordering:
//   S^T[token][row] = K[token][:] Q^T[:][row],   O^T[dim][row] += V^T[dim][token] P^T[token][row].
// A row's arithmetic does not depend on which other rows share its vector.
#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/blocked.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/code_sources-inl.h"
#include "cpu/attention/coded_keys-inl.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/key_pairs-inl.h"
#include "cpu/attention/rotated_keys-inl.h"
#include "cpu/attention/tile_source-inl.h"
#include "cpu/attention/tiled-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

/// In 16 bits: in pairs where both are values of bf16, unless one of them is too small for that.
template <class Source>
void run_values(const Layer& layer, const Item& item, Scratch& scratch) {
#if HWY_TARGET == HWY_AVX3_DL
  if (takes_key_pairs(layer) && BlockedItem<KeyPairs<Source>>(layer, item, scratch).run()) return;
#endif
  BlockedItem<Source>(layer, item, scratch).run();
}

/// By tiles, if they take the item.
bool run_tiled([[maybe_unused]] const Layer& layer, [[maybe_unused]] const Item& item,
               [[maybe_unused]] Scratch& scratch) {
#if HWY_TARGET == HWY_AVX3_DL
  if (!takes_tiles(layer, item)) return false;
  if (layer.arithmetic == Arithmetic::kHalfInt8) return TiledItem<HalfInt8Source>(layer, item, scratch).run();
  if (has_one_scale(layer.k)) return TiledItem<CodedKeys>(layer, item, scratch).run();
  return TiledItem<TileSource>(layer, item, scratch).run();
#else
  return false;
#endif
}

void Blocked(const Layer& layer, const Item& item, Scratch& scratch) {
  if (run_tiled(layer, item, scratch)) return;
  switch (layer.arithmetic) {
    case Arithmetic::kHalfInt8:
      if (layer.bf16_weights) {
        BlockedItem<HalfBf16Source>(layer, item, scratch).run();
      } else {
        BlockedItem<HalfInt8Source>(layer, item, scratch).run();
      }
      return;
    case Arithmetic::kFullInt8:
      BlockedItem<FullInt8Source>(layer, item, scratch).run();
      return;
    case Arithmetic::kFp8:
      BlockedItem<Fp8Source>(layer, item, scratch).run();
      return;
    default:
#if HWY_TARGET == HWY_AVX3_DL
      if (takes_digits(layer)) {
        BlockedItem<RotatedKeys>(layer, item, scratch).run();
        return;
      }
#endif
      if (layer.stored_k) {
        run_values<CodedKeys>(layer, item, scratch);
      } else if (layer.grouped_k) {
        run_values<GroupedKeys>(layer, item, scratch);
      } else {
        run_values<TileSource>(layer, item, scratch);
      }
  }
}

void Rotate(float* x, int dim) { rotate_row(x, dim); }

int Lanes() { return kLanes; }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(Blocked);
HWY_EXPORT(Rotate);
HWY_EXPORT(Lanes);

void blocked_item(const Layer& layer, const Item& item, Scratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Blocked)(layer, item, scratch);
}

void rotate_row(float* x, int dim) { HWY_DYNAMIC_DISPATCH(Rotate)(x, dim); }

int vector_lanes() { return HWY_DYNAMIC_DISPATCH(Lanes)(); }

}  // namespace halftone::cpu
#endif  // HWY_ONCE
