// What `halftone eval --latent` prints and writes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/eval/latent.h"
#include "cli/figures/json.h"
#include "cli/host/host.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

nlohmann::ordered_json format_json(const LatentResult& f) {
  return {{"name", format_name(f.format)},
          {"bytes_per_token", f.result.bytes_per_token},
          {"compression", f.result.compression},
          {"k_snr_db", snr_json(f.result.k_snr)},
          {"v_snr_db", snr_json(f.result.v_snr)},
          {"error", number_or_text(f.result.output.relative)},
          {"ordinary_error", number_or_text(f.ordinary_error)},
          {"worst_cosine", f.result.output.worst_cosine},
          {"lse_error", number_or_text(f.result.lse_error)}};
}

std::string dims_text(const LatentLayer& layer) {
  return fmt::format("{} + {}", layer.shape.head_dim - layer.rope_dim, layer.rope_dim);
}

}  // namespace

nlohmann::ordered_json to_json(const LatentReport& report) {
  nlohmann::ordered_json json = provenance();
  json["file"] = report.file.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(report.file);
  if (report.file.empty()) json["seed"] = kLatentSeed;
  json["options"] = {{"page_size", report.options.page_size},
                     {"scale", report.options.scale},
                     {"softcap", report.options.softcap},
                     {"window", report.options.window}};
  json["layers"] = nlohmann::ordered_json::array();
  for (const LatentLayer& l : report.layers) {
    nlohmann::ordered_json layer = {{"name", l.shape.name()},
                                    {"tokens", l.shape.tokens},
                                    {"queries", l.shape.queries},
                                    {"q_heads", l.shape.q_heads},
                                    {"head_dim", l.shape.head_dim},
                                    {"rope_dim", l.rope_dim},
                                    {"v_head_dim", l.shape.v_dim},
                                    {"scale", l.attention.scale},
                                    {"softcap", l.attention.softcap},
                                    {"window", l.attention.window},
                                    {"bf16_rounding_error", number_or_text(l.bf16_rounding)},
                                    {"outliers", l.outliers},
                                    {"formats", nlohmann::ordered_json::array()}};
    for (const LatentResult& f : l.formats) layer["formats"].push_back(format_json(f));
    json["layers"].push_back(std::move(layer));
  }
  json["skipped"] = report.skipped;
  return json;
}

void print_latents(Terminal& terminal, const LatentReport& report) {
  const CapturedLayer& shape = report.layers.front().shape;
  print(terminal.out, "{}: {} tokens, {} queries, {} query heads\n\n",
        report.file.empty() ? fmt::format("generated latents, seed {}", kLatentSeed) : printable(report.file),
        shape.tokens, shape.queries, shape.q_heads);
  Table table;
  table.column(report.file.empty() ? "data" : "layer", Table::Align::kLeft);
  table.column("dims", Table::Align::kLeft);
  table.column("format", Table::Align::kLeft);
  for (const char* heading : {"bytes/\ntoken", "vs\nbf16", "K SNR\ndB", "V SNR\ndB", "output\nerror",
                              "ordinary\nchannels", "worst\ncosine", "LSE\nerror"})
    table.column(heading);
  double rounding = 0;
  std::size_t outliers = 0;
  for (const LatentLayer& l : report.layers) {
    rounding = std::max(rounding, l.bf16_rounding);
    outliers = std::max(outliers, l.outliers.size());
    for (const LatentResult& f : l.formats) {
      table.row({printable(l.shape.name(), 24), dims_text(l), format_name(f.format),
                 fmt::format("{:.0f}", f.result.bytes_per_token),
                 fmt::format("{:.2f}x", f.result.compression), decibel(f.result.k_snr),
                 decibel(f.result.v_snr), percent(f.result.output.relative), percent(f.ordinary_error),
                 fmt::format("{:.5f}", f.result.output.worst_cosine), short_number(f.result.lse_error)});
    }
  }
  table.print(terminal);
  print(terminal.out,
        "\nDims: of the latent and, in bf16, rotary ones; V is the latent, of 512 or 256 dims in all the "
        "whole.\n"
        "Errors: against double precision on the values as given; output error is relative (Frobenius), "
        "rounding\n"
        "the output to bf16 alone costs {}. Ordinary channels: the same without outliers, dims of K whose\n"
        "largest magnitude is more than {:g} times that of the median one; a layer has up to {}.\n",
        percent(rounding), kOutlierRatio, outliers);
  if (report.file.empty()) {
    print(terminal.out,
          "Data: q and k are N(0, 1); outliers: one dim of k in 32, at random, is offset by +-10 to 40, "
          "with twice\nthe deviation.\n");
  }
  if (!report.skipped.empty())
    print(terminal.out, "Left out, because they do not fit: {}.\n", fmt::join(report.skipped, ", "));
}

}  // namespace halftone::cli
