// Distances between tensors, as eval reports them. None is NaN: a value that is not finite is the worst
// error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace halftone::cli {

/// 10 log10(sum x^2 / sum (x - y)^2) in dB; +infinity when they are equal, -infinity when y is not finite.
double snr_db(std::span<const float> x, std::span<const float> y);

/// How far an attention output [queries, heads, dim] is from the truth.
struct OutputError {
  double relative = 0;  ///< Frobenius norm of the difference over that of the truth; infinite when not finite
  double worst_cosine =
      1;  ///< smallest over the (query, head) rows whose truth is not 0; -1 of one not finite
  std::vector<double> head_relative;  ///< `relative` of each head [heads]
};
OutputError compare_output(std::span<const double> truth, std::span<const float> actual, int heads, int dim);

/// Largest |truth - actual| over finite truths; infinite when an actual value is not finite.
double largest_difference(std::span<const double> truth, std::span<const float> actual);

/// Magnitudes of the channels of x [tokens, heads, dim].
struct ChannelStats {
  std::vector<float> absmax;  ///< [heads, dim]
  std::vector<float> rms;     ///< [heads, dim]
  /// Largest absmax over the median absmax of a head, largest over heads: 1 is flat.
  double outlier_ratio = 0;
};
ChannelStats channel_stats(std::span<const float> x, int heads, int dim);

double median(std::vector<double> values);

}  // namespace halftone::cli
