// Looks for a GPU without needing CUDA to build: /proc, /dev, and the driver's own library through dlopen.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>

#include "cli/host.h"

namespace halftone::cli {
namespace {

/// The few entry points of the CUDA driver API that doctor needs (docs.nvidia.com/cuda/cuda-driver-api).
class Driver {
 public:
  Driver() : library_(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}
  ~Driver() {
    if (library_ != nullptr) ::dlclose(library_);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  bool found() const { return library_ != nullptr; }

  template <class... Args>
  int call(const char* name, Args... args) const {
    using Function = int (*)(Args...);
    const auto function = reinterpret_cast<Function>(::dlsym(library_, name));
    return function == nullptr ? kNoFunction : function(args...);
  }

  std::string describe(int result) const {
    if (result == kNoFunction) return "the library lacks a function";
    const char* text = nullptr;
    if (call("cuGetErrorString", result, &text) != 0 || text == nullptr)
      return fmt::format("error {}", result);
    return text;
  }

 private:
  static constexpr int kNoFunction = -1;
  void* library_;
};

void ask_driver(GpuInfo& info) {
  const Driver driver;
  info.library_found = driver.found();
  if (!info.library_found) return;
  int count = 0;
  int result = driver.call("cuInit", 0U);
  if (result == 0) result = driver.call("cuDriverGetVersion", &info.driver_cuda);
  if (result == 0) result = driver.call("cuDeviceGetCount", &count);
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  for (int i = 0; result == 0 && i < count; ++i) {
    GpuDevice device;
    int handle = 0;
    char name[256] = "";
    std::size_t memory = 0;
    result = driver.call("cuDeviceGet", &handle, i);
    if (result == 0)
      result = driver.call("cuDeviceGetName", &name[0], static_cast<int>(sizeof(name)), handle);
    if (result == 0) result = driver.call("cuDeviceTotalMem_v2", &memory, handle);
    if (result == 0) result = driver.call("cuDeviceGetAttribute", &device.major, kMajor, handle);
    if (result == 0) result = driver.call("cuDeviceGetAttribute", &device.minor, kMinor, handle);
    if (result != 0) break;
    device.name = name;
    device.memory = static_cast<std::int64_t>(memory);
    info.devices.push_back(std::move(device));
  }
  if (result != 0) info.failure = driver.describe(result);
}

}  // namespace

GpuInfo gpu_info() {
  GpuInfo info;
#ifdef HALFTONE_WITH_CUDA
  info.backend_built = true;
#endif
  std::ifstream version("/proc/driver/nvidia/version");
  std::string line;
  std::smatch match;
  if (std::getline(version, line) &&
      std::regex_search(line, match, std::regex(R"(\s(\d+\.\d+(\.\d+)?)\s)"))) {
    info.kernel_driver = match[1];
  }
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename().string();
    if (std::regex_match(name, std::regex(R"(nvidia\d+)")))
      info.device_nodes.push_back(entry.path().string());
  }
  std::sort(info.device_nodes.begin(), info.device_nodes.end());
  ask_driver(info);
  return info;
}

}  // namespace halftone::cli
