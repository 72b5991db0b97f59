#include "cpu/attention/gather.h"

#include <variant>

namespace halftone::cpu {
namespace {

GatherCache gather_cache(const PagedKv& cache, const PageLayout& layout, const TensorView& indices) {
  GatherCache g;
  g.layout = layout;
  g.parts = page::parts_of(cache.spec, layout);
  for (int i = 0; i < g.parts.count; ++i) {
    const page::Part& part = g.parts.part[i];
    g.elements[i] = element_of(part.format);
    g.tables[i] = page::table_of(part);
    g.scales[i] = part.which == KvPart::kK ? cache.k_scale : cache.v_scale;
  }
  g.pages = static_cast<const std::uint8_t*>(cache.pages.data);
  g.page_stride = cache.pages.strides[0];
  g.num_pages = cache.pages.shape[0];
  while ((1 << g.page_log2) < cache.spec.page_size) ++g.page_log2;
  g.indices = static_cast<const std::int32_t*>(indices.data);
  g.index_stride = indices.strides[0];
  return g;
}

}  // namespace

Gather make_gather(const Plan::Impl& plan, const AttentionArgs& args, const planning::Schedule& schedule) {
  const AttentionProblem& problem = plan.problem;
  const KvCacheSpec& spec = std::get<KvCacheSpec>(problem.kv);
  Gather g;
  g.caches[0] = gather_cache(std::get<PagedKv>(args.kv), plan.layout, args.indices);
  if (problem.listed.extra_top_k != 0)
    g.caches[1] = gather_cache(args.extra_kv, plan.extra_layout, args.extra_indices);
  g.first_list = schedule.first_list;
  g.v_in_k = spec.is_latent();
  QuadClass quads;
  const int row = g.v_in_k ? spec.head_dim : spec.v_dim();
  for (int t = 0; t < kTileTokens; ++t) quads.token[static_cast<std::size_t>(t)] = t * row;
  quads.dim = {0, 1, 2, 3};
  for (int d = 0; d < spec.v_dim(); d += 4) {
    quads.base.push_back(d);
    quads.first_dim.push_back(d);
  }
  g.quads.push_back(std::move(quads));
  return g;
}

}  // namespace halftone::cpu
