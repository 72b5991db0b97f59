// `halftone doctor`: what this machine offers, which backend is used and why.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cli/commands/command.h"
#include "cli/commands/kernel_matrix.h"
#include "cli/host/host.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

nlohmann::ordered_json to_json(const CpuInfo& cpu, const GpuInfo& gpu, const BackendChoice& choice) {
  nlohmann::ordered_json json;
  json["halftone"] = HALFTONE_VERSION;
  json["commit"] = build_commit();
  json["compiler"] = compiler_name();
  json["cpu"] = {{"model", cpu.model},
                 {"architecture", cpu.architecture},
                 {"features", cpu.features},
                 {"online", cpu.online},
                 {"allowed", cpu.allowed},
                 {"threads", cpu.threads},
                 {"last_level_cache_bytes", cpu.last_level_cache},
                 {"memory_bytes", cpu.memory_total},
                 {"memory_available_bytes", cpu.memory_available},
                 {"simd", cpu.simd},
                 {"simd_supported", cpu.simd_supported}};
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (const GpuDevice& d : gpu.devices) {
    devices.push_back({{"name", d.name},
                       {"compute_capability", fmt::format("{}.{}", d.major, d.minor)},
                       {"memory_bytes", d.memory}});
  }
  json["gpu"] = {{"backend_built", gpu.backend_built},
                 {"kernel_driver", gpu.kernel_driver},
                 {"device_nodes", gpu.device_nodes},
                 {"libcuda", gpu.library_found},
                 {"driver_cuda", gpu.driver_cuda},
                 {"failure", gpu.failure},
                 {"devices", devices}};
  json["backend"] = {
      {"name", choice.backend}, {"reason", choice.reason}, {"missing_for_cuda", choice.missing}};
  return json;
}

void print_machine(Terminal& terminal, const CpuInfo& cpu, const GpuInfo& gpu, const BackendChoice& choice) {
  const auto line = [&](std::string_view key, const std::string& value) {
    print(terminal.out, "{}{}\n", terminal.dim(fmt::format("{:<14}", key)), value);
  };
  const std::string commit = build_commit();
  line("halftone", fmt::format("{}{}, built with {}", HALFTONE_VERSION,
                               commit.empty() ? "" : " (" + commit + ")", compiler_name()));
  line("CPU", fmt::format("{} ({})", cpu.model, cpu.architecture));
  line("features", fmt::format("{}", fmt::join(cpu.features, " ")));
  line("SIMD", fmt::format("{} (this CPU also runs: {})", cpu.simd,
                           cpu.simd_supported.size() > 1
                               ? fmt::format("{}", fmt::join(cpu.simd_supported.begin() + 1,
                                                             cpu.simd_supported.end(), ", "))
                               : "nothing else"));
  line("threads", fmt::format("{} OpenMP threads; {} of {} CPUs allowed (OMP_NUM_THREADS changes it)",
                              cpu.threads, cpu.allowed, cpu.online));
  line("cache", cpu.last_level_cache > 0
                    ? human_bytes(static_cast<double>(cpu.last_level_cache)) + " last level"
                    : "last level unknown");
  line("memory", fmt::format("{}, {} available", human_bytes(static_cast<double>(cpu.memory_total)),
                             human_bytes(static_cast<double>(cpu.memory_available))));
  if (gpu.devices.empty()) line("GPU", "none usable");
  for (const GpuDevice& d : gpu.devices) {
    line("GPU", fmt::format("{}, compute capability {}.{}, {}", d.name, d.major, d.minor,
                            human_bytes(static_cast<double>(d.memory))));
  }
  if (!gpu.kernel_driver.empty() || gpu.driver_cuda > 0) {
    line("driver", fmt::format("{}, CUDA {}.{}", gpu.kernel_driver.empty() ? "unknown" : gpu.kernel_driver,
                               gpu.driver_cuda / 1000, gpu.driver_cuda % 1000 / 10));
  }
  line("backend", terminal.bold(fmt::format("{}: {}", choice.backend, choice.reason)));
  for (const std::string& missing : choice.missing) line("CUDA needs", missing);
}

}  // namespace

void add_doctor(Command app, Terminal& terminal) {
  const Command command =
      app.add_subcommand("doctor", "Say what this machine offers, which backend is used and why");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON instead of text");
  auto kernels = std::make_shared<bool>(false);
  command->add_flag("--kernels", *kernels,
                    "Instead say what runs where: the operations and kernels of this build's backends");
  command->callback([json, kernels, &terminal] {
    if (*kernels) {
      if (*json) {
        terminal.out << kernel_matrix(all_backends()).dump(2) << '\n';
      } else {
        print_kernel_matrix(terminal, all_backends());
      }
      return;
    }
    const CpuInfo cpu = cpu_info();
    const GpuInfo gpu = gpu_info();
    const BackendChoice choice = choose_backend(cpu, gpu);
    if (*json) {
      terminal.out << to_json(cpu, gpu, choice).dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
                   << '\n';
    } else {
      print_machine(terminal, cpu, gpu, choice);
    }
  });
}

}  // namespace halftone::cli
