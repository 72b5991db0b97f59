#include "cli/figures/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace halftone::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// sqrt(noise / signal); infinite when a value was not finite or where nothing should have been.
double relative_error(double noise, double signal) {
  if (noise == 0) return 0;
  return signal > 0 && std::isfinite(noise) ? std::sqrt(noise / signal) : kInfinity;
}

}  // namespace

double snr_db(std::span<const float> x, std::span<const float> y) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = static_cast<double>(x[i]) - y[i];
    signal += static_cast<double>(x[i]) * x[i];
    noise += difference * difference;
  }
  if (noise == 0) return kInfinity;
  if (!std::isfinite(noise)) return -kInfinity;
  return 10 * std::log10(signal / noise);
}

OutputError compare_output(std::span<const double> truth, std::span<const float> actual, int heads, int dim) {
  OutputError result;
  const auto n_heads = static_cast<std::size_t>(heads), n_dim = static_cast<std::size_t>(dim);
  std::vector<double> signal(n_heads), noise(n_heads);
  for (std::size_t row = 0; row * n_dim < truth.size(); ++row) {
    double tt = 0, aa = 0, ta = 0, dd = 0;
    for (std::size_t d = 0; d < n_dim; ++d) {
      const double t = truth[row * n_dim + d], a = actual[row * n_dim + d];
      tt += t * t;
      aa += a * a;
      ta += t * a;
      dd += (t - a) * (t - a);
    }
    signal[row % n_heads] += tt;
    noise[row % n_heads] += dd;
    if (!std::isfinite(dd)) {
      result.worst_cosine = -1;
    } else if (tt > 0) {
      result.worst_cosine = std::min(result.worst_cosine, aa > 0 ? ta / std::sqrt(tt * aa) : 0.0);
    }
  }
  double all_signal = 0, all_noise = 0;
  for (std::size_t h = 0; h < n_heads; ++h) {
    all_signal += signal[h];
    all_noise += noise[h];
    result.head_relative.push_back(relative_error(noise[h], signal[h]));
  }
  result.relative = relative_error(all_noise, all_signal);
  return result;
}

double largest_difference(std::span<const double> truth, std::span<const float> actual) {
  double largest = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(truth[i])) continue;
    const double difference = std::fabs(truth[i] - static_cast<double>(actual[i]));
    largest = std::isnan(difference) ? kInfinity : std::max(largest, difference);
  }
  return largest;
}

ChannelStats channel_stats(std::span<const float> x, int heads, int dim) {
  const auto channels = static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim);
  ChannelStats stats;
  stats.absmax.assign(channels, 0);
  std::vector<double> square(channels, 0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    stats.absmax[i % channels] = std::max(stats.absmax[i % channels], std::fabs(x[i]));
    square[i % channels] += static_cast<double>(x[i]) * x[i];
  }
  const double tokens = static_cast<double>(x.size()) / static_cast<double>(channels);
  for (const double s : square) stats.rms.push_back(static_cast<float>(std::sqrt(s / tokens)));
  for (int h = 0; h < heads; ++h) {
    const auto head = stats.absmax.begin() + static_cast<std::ptrdiff_t>(h) * dim;
    const double middle = median({head, head + dim});
    if (middle > 0)
      stats.outlier_ratio = std::max(stats.outlier_ratio, *std::max_element(head, head + dim) / middle);
  }
  return stats;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

}  // namespace halftone::cli
