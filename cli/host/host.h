// What this machine is: for doctor, and for the head of every file of measurements.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace halftone::cli {

struct CpuInfo {
  std::string model;
  std::string architecture;           ///< "x86_64"
  std::vector<std::string> features;  ///< the ones that kernels care about: avx2, avx512f, ...
  int online = 0;                     ///< logical CPUs of the machine
  int allowed = 0;                    ///< of these, the ones that this process may use
  int threads = 0;                    ///< OpenMP threads that a plan uses by default
  std::int64_t last_level_cache = 0;  ///< bytes, 0 when unknown
  std::int64_t memory_total = 0;      ///< bytes
  std::int64_t memory_available = 0;
  std::string simd;                         ///< the Highway target that run-time dispatch picks
  std::vector<std::string> simd_supported;  ///< all compiled targets that this CPU runs, best first
};
CpuInfo cpu_info();

/// "2 threads".
std::string thread_count(int threads);

struct GpuDevice {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  std::int64_t memory = 0;   ///< bytes

  /// The kernels are compiled for sm_90a, which no other capability runs.
  bool hopper() const { return major == 9 && minor == 0; }
};

struct GpuInfo {
  bool backend_built = false;             ///< this binary contains the CUDA backend
  std::string kernel_driver;              ///< version in /proc/driver/nvidia/version, empty when absent
  std::vector<std::string> device_nodes;  ///< /dev/nvidia0, ...
  bool library_found = false;             ///< libcuda.so.1 loads
  int driver_cuda = 0;                    ///< CUDA version of the driver, 12080 for 12.8; 0 when unknown
  std::string failure;                    ///< what libcuda said, empty when it works
  std::vector<GpuDevice> devices;
};
GpuInfo gpu_info();

/// What the driver's management library says now; 0 or empty when unknown.
struct GpuClocks {
  std::string driver;      ///< "580.95.05"
  int sm = 0, memory = 0;  ///< MHz
  int sm_max = 0, memory_max = 0;
};
/// For the device at a PCI bus id, as cudaDeviceGetPCIBusId writes it.
GpuClocks gpu_clocks(const std::string& pci_bus_id);

/// The backend that serves device memory here, and why.
struct BackendChoice {
  std::string backend;  ///< "cpu" or "cuda"
  int device = -1;      ///< CUDA: index of the first Hopper GPU
  std::string reason;
  std::vector<std::string> missing;  ///< what a CUDA run would still need; empty on a ready machine
};
BackendChoice choose_backend(const CpuInfo& cpu, const GpuInfo& gpu);

/// "GCC 12.2.0"
std::string compiler_name();
/// Commit that the binary was built from, or "" when it was not built from a git checkout.
std::string build_commit();
/// Now, UTC, as 2025-01-31T12:00:00Z.
std::string utc_now();

/// {"halftone", "commit", "compiler", "date", "device": {...}}
nlohmann::ordered_json provenance();

}  // namespace halftone::cli
