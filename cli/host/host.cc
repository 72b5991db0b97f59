#include "cli/host/host.h"

// First of all: it decides which targets the Highway headers name.
#include "cpu/targets.h"
//
#include <fmt/format.h>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <omp.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <map>
#include <sstream>

#include "halftone_commit.h"

namespace halftone::cli {
namespace {

/// Value after "key<spaces>:" of the first such line, as in /proc/cpuinfo and /proc/meminfo.
std::string proc_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || !line.starts_with(key)) continue;
    if (line.find_first_not_of(" \t", key.size()) != colon) continue;
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

std::int64_t meminfo_bytes(std::string_view key) {
  std::istringstream text(proc_value("/proc/meminfo", key));
  std::int64_t kib = 0;
  text >> kib;
  return kib * 1024;
}

/// Sum of the distinct last-level caches (sysfs lists one per core, with the cores that share it).
std::int64_t last_level_cache_bytes() {
  std::map<std::string, std::int64_t> caches;  // by shared_cpu_list
  int deepest = 0;
  for (int cpu = 0; cpu < ::sysconf(_SC_NPROCESSORS_CONF); ++cpu) {
    for (int index = 0; index < 8; ++index) {
      const std::string folder = fmt::format("/sys/devices/system/cpu/cpu{}/cache/index{}/", cpu, index);
      int level = 0;
      std::int64_t kib = 0;
      std::string shared;
      std::ifstream(folder + "level") >> level;
      std::ifstream(folder + "size") >> kib;  // "32768K"
      std::ifstream(folder + "shared_cpu_list") >> shared;
      if (level < deepest || kib == 0) continue;
      if (level > deepest) caches.clear();
      deepest = level;
      caches[shared] = kib * 1024;
    }
  }
  std::int64_t bytes = 0;
  for (const auto& [shared, size] : caches) bytes += size;
  return bytes;
}

std::vector<std::string> kernel_features(const std::string& all) {
  static constexpr std::string_view kKnown[] = {
      "sse4_2",   "avx",         "f16c",        "fma",         "avx2",        "avx_vnni", "avx512f",
      "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512_vbmi", "amx_int8", "amx_bf16",
      "asimd",    "asimdhp",     "asimddp",     "i8mm",        "bf16",        "sve",      "sve2"};
  std::istringstream text(all);
  std::vector<std::string> features;
  std::string word;
  while (text >> word) {
    if (std::find(std::begin(kKnown), std::end(kKnown), word) != std::end(kKnown)) features.push_back(word);
  }
  return features;
}

}  // namespace

CpuInfo cpu_info() {
  CpuInfo info;
  info.model = proc_value("/proc/cpuinfo", "model name");
  utsname name{};
  if (::uname(&name) == 0) info.architecture = name.machine;
  if (info.model.empty()) info.model = info.architecture;
  std::string flags = proc_value("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = proc_value("/proc/cpuinfo", "Features");
  info.features = kernel_features(flags);
  info.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  info.allowed = ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : info.online;
  info.threads = omp_get_max_threads();
  info.last_level_cache = last_level_cache_bytes();
  info.memory_total = meminfo_bytes("MemTotal");
  info.memory_available = meminfo_bytes("MemAvailable");
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    info.simd_supported.emplace_back(hwy::TargetName(target));
  }
  if (!info.simd_supported.empty()) info.simd = info.simd_supported.front();
  return info;
}

std::string thread_count(int threads) { return fmt::format("{} thread{}", threads, threads == 1 ? "" : "s"); }

BackendChoice choose_backend(const CpuInfo& cpu, const GpuInfo& gpu) {
  BackendChoice choice;
  const auto hopper =
      std::find_if(gpu.devices.begin(), gpu.devices.end(), [](const GpuDevice& d) { return d.hopper(); });
  const bool found = hopper != gpu.devices.end();
  if (!gpu.backend_built)
    choice.missing.push_back("a build with the CUDA backend (HALFTONE_CUDA=ON, `make cuda`)");
  if (!gpu.library_found) choice.missing.push_back("libcuda.so.1, the driver's user library");
  if (gpu.library_found && !gpu.failure.empty()) choice.missing.push_back("a working driver: " + gpu.failure);
  if (!gpu.devices.empty() && !found) choice.missing.push_back("a GPU of compute capability 9.0 (Hopper)");
  if (gpu.devices.empty()) {  // a container may hide these files and still have a working GPU
    if (gpu.kernel_driver.empty())
      choice.missing.push_back("the NVIDIA kernel driver (/proc/driver/nvidia is absent)");
    if (gpu.device_nodes.empty()) choice.missing.push_back("a device node /dev/nvidia<N>");
    if (choice.missing.empty()) choice.missing.push_back("a GPU that the driver shows to this process");
  }
  const std::string engine = fmt::format("{} SIMD on {}", cpu.simd, thread_count(cpu.threads));
  if (choice.missing.empty()) {
    choice.backend = "cuda";
    choice.device = static_cast<int>(hopper - gpu.devices.begin());
    choice.reason = fmt::format(
        "{} as cuda:{} serves `bench` and tensors in its memory; the other commands read host files and run "
        "on the CPU, {}",
        hopper->name, choice.device, engine);
    return choice;
  }
  choice.backend = "cpu";
  choice.reason = fmt::format(
      "{}; {}", engine,
      found ? "a Hopper GPU is present, but this build has no CUDA backend" : "no Hopper GPU was found");
  return choice;
}

std::string compiler_name() {
#if defined(__clang__)
  return fmt::format("Clang {}", __clang_version__);
#else
  return fmt::format("GCC {}", __VERSION__);
#endif
}

std::string build_commit() { return HALFTONE_COMMIT; }

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

nlohmann::ordered_json provenance() {
  const CpuInfo cpu = cpu_info();
  nlohmann::ordered_json json;
  json["halftone"] = HALFTONE_VERSION;
  json["commit"] = build_commit();
  json["compiler"] = compiler_name();
  json["date"] = utc_now();
  json["device"] = {{"type", "cpu"},
                    {"model", cpu.model},
                    {"simd", cpu.simd},
                    {"threads", cpu.threads},
                    {"memory_bytes", cpu.memory_total},
                    {"last_level_cache_bytes", cpu.last_level_cache}};
  return json;
}

}  // namespace halftone::cli
