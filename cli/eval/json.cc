// What eval measured, as JSON.
#include <nlohmann/json.hpp>

#include "cli/eval/evaluate.h"
#include "cli/figures/json.h"
#include "cli/host/host.h"

namespace halftone::cli {
namespace {

nlohmann::ordered_json layer_json(const LayerResult& r) {
  nlohmann::ordered_json heads = nlohmann::ordered_json::array();
  for (const double error : r.output.head_relative) heads.push_back(number_or_text(error));
  return {{"bytes_per_token", r.bytes_per_token},
          {"compression", r.compression},
          {"k_snr_db", snr_json(r.k_snr)},
          {"v_snr_db", snr_json(r.v_snr)},
          {"error", number_or_text(r.output.relative)},
          {"worst_cosine", r.output.worst_cosine},
          {"lse_error", number_or_text(r.lse_error)},
          {"prefill_us", r.prefill_us},
          {"decode_us", r.decode_us},
          {"head_error", std::move(heads)}};
}

}  // namespace

nlohmann::ordered_json to_json(const EvalReport& report) {
  nlohmann::ordered_json json = provenance();
  json["file"] = report.file;
  json["metadata"] = report.metadata;
  json["options"] = {
      {"page_size", report.options.page_size}, {"max_error", report.options.max_error},
      {"scale", report.options.scale},         {"softcap", report.options.softcap},
      {"window", report.options.window},       {"arithmetic", arithmetic_name(report.options.arithmetic)}};
  json["layers"] = nlohmann::ordered_json::array();
  for (const LayerReport& l : report.layers) {
    json["layers"].push_back({{"name", l.shape.name()},
                              {"tokens", l.shape.tokens},
                              {"queries", l.shape.queries},
                              {"q_heads", l.shape.q_heads},
                              {"kv_heads", l.shape.kv_heads},
                              {"head_dim", l.shape.head_dim},
                              {"v_head_dim", l.shape.v_dim},
                              {"scale", l.attention.scale},
                              {"softcap", l.attention.softcap},
                              {"window", l.attention.window},
                              {"bf16_rounding_error", number_or_text(l.bf16_rounding)},
                              {"k_outlier_ratio", l.k_channels.outlier_ratio},
                              {"k_outlier_ratio_rotated", l.k_channels_rotated.outlier_ratio},
                              {"k_channel_absmax", l.k_channels.absmax}});
  }
  json["formats"] = nlohmann::ordered_json::array();
  for (const FormatResult& f : report.formats) {
    nlohmann::ordered_json row = {{"name", f.choice.name},
                                  {"k_format", format_name(f.choice.k)},
                                  {"v_format", format_name(f.choice.v)},
                                  {"rotate_k", f.choice.rotate_k},
                                  {"rotate_v", f.choice.rotate_v},
                                  {"channels", f.choice.channels},
                                  {"bytes_per_token", f.bytes_per_token},
                                  {"compression", f.compression},
                                  {"k_snr_db", snr_json(f.k_snr)},
                                  {"v_snr_db", snr_json(f.v_snr)},
                                  {"error_mean", number_or_text(f.error_mean)},
                                  {"error_worst", number_or_text(f.error_worst)},
                                  {"worst_cosine", f.worst_cosine},
                                  {"lse_error", number_or_text(f.lse_error)},
                                  {"prefill_us", f.prefill_us},
                                  {"decode_us", f.decode_us},
                                  {"pareto", f.pareto},
                                  {"layers", nlohmann::ordered_json::array()}};
    for (const LayerResult& r : f.layers) row["layers"].push_back(layer_json(r));
    json["formats"].push_back(std::move(row));
  }
  json["skipped"] = report.skipped;
  const auto name = [&](int i) {
    return i < 0 ? nlohmann::ordered_json(nullptr)
                 : nlohmann::ordered_json(report.formats[static_cast<std::size_t>(i)].choice.name);
  };
  nlohmann::ordered_json per_layer = nlohmann::ordered_json::array();
  for (const int i : report.conclusion.per_layer) per_layer.push_back(name(i));
  json["conclusion"] = {{"max_error", report.conclusion.max_error},
                        {"format", name(report.conclusion.chosen)},
                        {"per_layer", per_layer},
                        {"sentence", report.conclusion.sentence}};
  return json;
}

}  // namespace halftone::cli
