// Looks for a GPU without needing CUDA to build: /proc, /dev, and the driver's own library through dlopen.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <regex>

#include "cli/host/host.h"
#include "plan/backend.h"

namespace halftone::cli {
namespace {

constexpr int kNoFunction = -1;

/// A library of the driver, if it is there; its functions return 0 when they succeed.
class Library {
 public:
  explicit Library(const char* file) : library_(::dlopen(file, RTLD_NOW | RTLD_LOCAL)) {}
  ~Library() {
    if (library_ != nullptr) ::dlclose(library_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool found() const { return library_ != nullptr; }

  template <class... Args>
  int call(const char* name, Args... args) const {
    using Function = int (*)(Args...);
    const auto function = reinterpret_cast<Function>(::dlsym(library_, name));
    return function == nullptr ? kNoFunction : function(args...);
  }

 private:
  void* library_;
};

std::string describe(const Library& driver, int result) {
  if (result == kNoFunction) return "the library lacks a function";
  const char* text = nullptr;
  if (driver.call("cuGetErrorString", result, &text) != 0 || text == nullptr)
    return fmt::format("error {}", result);
  return text;
}

/// The few entry points of the CUDA driver API that doctor needs (docs.nvidia.com/cuda/cuda-driver-api).
void ask_driver(GpuInfo& info) {
  const Library driver("libcuda.so.1");
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
  if (result != 0) info.failure = describe(driver, result);
}

}  // namespace

GpuInfo gpu_info() {
  GpuInfo info;
  info.backend_built = planning::find_backend(DeviceType::kCuda) != nullptr;
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

// docs.nvidia.com/deploy/nvml-api
GpuClocks gpu_clocks(const std::string& pci_bus_id) {
  constexpr int kSm = 1, kMemory = 2;  // nvmlClockType_t
  GpuClocks clocks;
  const Library nvml("libnvidia-ml.so.1");
  if (!nvml.found() || nvml.call("nvmlInit_v2") != 0) return clocks;
  std::array<char, 96> version{};
  if (nvml.call("nvmlSystemGetDriverVersion", version.data(), static_cast<unsigned>(version.size())) == 0)
    clocks.driver = version.data();
  void* device = nullptr;
  if (nvml.call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.c_str(), &device) == 0) {
    const auto read = [&](const char* function, int type, int& mhz) {
      unsigned value = 0;
      if (nvml.call(function, device, type, &value) == 0) mhz = static_cast<int>(value);
    };
    read("nvmlDeviceGetClockInfo", kSm, clocks.sm);
    read("nvmlDeviceGetClockInfo", kMemory, clocks.memory);
    read("nvmlDeviceGetMaxClockInfo", kSm, clocks.sm_max);
    read("nvmlDeviceGetMaxClockInfo", kMemory, clocks.memory_max);
  }
  nvml.call("nvmlShutdown");
  return clocks;
}

}  // namespace halftone::cli
