// The functions of the CUDA run-time library that halftone and its tests call, over the emulator: device
// memory is this process's, streams are in order and done when a call returns. A launch that faults prints
// why and leaves an error that every later call returns, as a GPU does.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "tests/emulator/machine.h"
#include "tests/emulator/tensor_map.h"

namespace halftone::emulator {
namespace {

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}
int processors() {
  static const int count = number_from("HALFTONE_EMULATOR_PROCESSORS", 8);
  return count;
}

struct State {
  std::mutex mutex;
  cudaError_t error = cudaSuccess;                     // of a launch; stays
  cudaError_t last = cudaSuccess;                      // cudaGetLastError()
  std::unordered_map<const void*, std::string> names;  // of kernels, by their host functions
  std::unordered_map<void*, std::size_t> allocations;
  std::uint64_t launches = 0;
};
State& state() {
  static auto* only = new State;  // outlives the kernels' registrations
  return *only;
}

Library& library() {
  static Library only(std::getenv("HALFTONE_EMULATOR_PTX") != nullptr ? std::getenv("HALFTONE_EMULATOR_PTX")
                                                                      : HALFTONE_EMULATOR_PTX);
  return only;
}

cudaError_t remembered(cudaError_t error) {
  if (error != cudaSuccess) state().last = error;
  return error;
}

/// A launch with a copy of its arguments.
struct Call {
  std::string name;
  Launch launch;
};

void execute(Call& call) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.error != cudaSuccess) return;
  try {
    const int seed = number_from("HALFTONE_EMULATOR_SEED", 1);
    Machine machine(call.launch, processors(), static_cast<std::uint64_t>(seed) * 1000003 + s.launches++);
    machine.run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulator: %s: %s\n", call.name.c_str(), error.what());
    s.error = cudaErrorIllegalAddress;
  }
}

struct Stream {
  bool captures = false;
  std::vector<std::function<void()>> captured;
};
Stream* stream_of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }

/// Does it now, or records it where the stream is captured.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  Stream* s = stream_of(stream);
  if (s != nullptr && s->captures) {
    s->captured.push_back(std::move(work));
    return cudaSuccess;
  }
  work();
  return state().error;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                   int cluster, cudaStream_t stream) {
  State& s = state();
  if (s.error != cudaSuccess) return s.error;
  const auto name = s.names.find(kernel);
  if (name == s.names.end()) return remembered(cudaErrorInvalidDeviceFunction);
  const auto size_of = [](const dim3& d) -> Launch::Size {
    return {static_cast<int>(d.x), static_cast<int>(d.y), static_cast<int>(d.z)};
  };
  const int threads = Launch::count(size_of(block));
  if (Launch::count(size_of(grid)) <= 0 || grid.y > 65535 || grid.z > 65535 || threads <= 0 ||
      threads > 1024 || shared > 232448 || grid.x % static_cast<unsigned>(cluster) != 0) {
    return remembered(cudaErrorInvalidValue);
  }
  auto call = std::make_shared<Call>();
  call->name = name->second;
  Launch& l = call->launch;
  try {
    const std::lock_guard lock(s.mutex);
    l.program = &library().kernel(call->name);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return remembered(cudaErrorInvalidKernelImage);
  }
  l.grid = size_of(grid);
  l.block = size_of(block);
  l.cluster = cluster;
  l.shared_bytes = static_cast<std::uint32_t>(shared);
  for (const Program::Param& param : l.program->params) {
    l.params.resize(std::max(l.params.size(), std::size_t{(param.offset + param.bytes + 7) / 8}));
  }
  for (std::size_t n = 0; n < l.program->params.size(); ++n) {
    const auto& [offset, bytes] = l.program->params[n];
    std::memcpy(reinterpret_cast<std::uint8_t*>(l.params.data()) + offset, arguments[n], bytes);
  }
  return remembered(enqueue(stream, [call] { execute(*call); }));
}

CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.base = reinterpret_cast<std::uint64_t>(base);
  map.rank = static_cast<std::uint8_t>(rank);
  map.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                      : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                : 2;
  map.swizzle = static_cast<std::uint8_t>(swizzle);
  std::uint64_t stride = map.element_bytes;
  for (cuuint32_t n = 0; n < rank; ++n) {
    if (n > 0) stride = strides[n - 1];
    if (dims[n] == 0 || box[n] == 0 || box[n] > 256 || (n > 0 && stride % 16 != 0))
      return CUDA_ERROR_INVALID_VALUE;
    map.dims[n] = dims[n];
    map.box[n] = box[n];
    map.strides[n] = stride;
  }
  const std::uint32_t row = map.box[0] * map.element_bytes;
  if (map.base % 16 != 0 || row % 16 != 0 || (swizzle != 0 && row > 16u << swizzle))
    return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(static_cast<void*>(to), &map, sizeof map);
  return CUDA_SUCCESS;
}

constexpr std::size_t kGuard = 4096;  // bytes behind an allocation that are in none

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace halftone::emulator

using namespace halftone::emulator;

extern "C" {

// --- What the compiler calls ---

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  state().names[host] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  std::memcpy(stream, &c.stream, sizeof c.stream);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, 1, stream);
}

// --- Launches ---

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, 1, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  int cluster = 1;
  for (unsigned n = 0; n < config->numAttrs; ++n) {
    if (config->attrs[n].id == cudaLaunchAttributeClusterDimension)
      cluster = static_cast<int>(config->attrs[n].val.clusterDim.x);
  }
  return launch(kernel, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, cluster,
                config->stream);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return state().error; }

// --- Memory ---

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  if (bytes == 0) return *p = nullptr, cudaSuccess;
  void* memory_of = mmap(nullptr, bytes + kGuard, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_of == MAP_FAILED) return remembered(cudaErrorMemoryAllocation);
  constexpr std::size_t kPoisoned = std::size_t{64} << 20;
  if (bytes <= kPoisoned) std::memset(memory_of, 0xa5, bytes);
  const std::lock_guard lock(state().mutex);
  state().allocations[memory_of] = bytes;
  memory().add(memory_of, bytes);
  *p = memory_of;
  return state().error;
}
cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  const std::lock_guard lock(state().mutex);
  const auto found = state().allocations.find(p);
  if (found == state().allocations.end()) return remembered(cudaErrorInvalidValue);
  memory().remove(p);
  munmap(p, found->second + kGuard);
  state().allocations.erase(found);
  return state().error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return enqueue(stream, [=] { std::memmove(to, from, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
  return cudaMemsetAsync(p, value, bytes, nullptr);
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{16} << 30;
  return state().error;
}

// --- The device ---

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return remembered(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() { return state().error; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = processors();
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      break;
    default:
      return remembered(cudaErrorInvalidValue);
  }
  return state().error;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::strncpy(p->name, "emulated sm_90a", sizeof p->name - 1);
  p->major = 9;
  p->multiProcessorCount = processors();
  p->l2CacheSize = 50 << 20;
  p->totalGlobalMem = std::size_t{16} << 30;
  p->sharedMemPerBlockOptin = 232448;
  return state().error;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::snprintf(id, static_cast<std::size_t>(length), "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  if (result != nullptr) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- Errors ---

cudaError_t cudaGetLastError() {
  const cudaError_t error = state().error != cudaSuccess ? state().error : state().last;
  state().last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return state().error != cudaSuccess ? state().error : state().last; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess               ? "cudaSuccess"
         : error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress"
                                            : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulator; see what it printed";
}

// --- Streams, events and graphs ---

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream_of(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return state().error; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream_of(stream)->captures = true;
  stream_of(stream)->captured.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  stream_of(stream)->captures = false;
  *graph = reinterpret_cast<cudaGraph_t>(new std::vector<std::function<void()>>(stream_of(stream)->captured));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(
      new std::vector<std::function<void()>>(*reinterpret_cast<std::vector<std::function<void()>>*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<std::vector<std::function<void()>>*>(executable)) work();
  return state().error;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return delete reinterpret_cast<std::vector<std::function<void()>>*>(graph), cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return delete reinterpret_cast<std::vector<std::function<void()>>*>(executable), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new std::chrono::steady_clock::time_point);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return delete reinterpret_cast<std::chrono::steady_clock::time_point*>(event), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return state().error; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const auto at = [](cudaEvent_t e) { return *reinterpret_cast<std::chrono::steady_clock::time_point*>(e); };
  *ms = std::chrono::duration<float, std::milli>(at(end) - at(begin)).count();
  return cudaSuccess;
}

}  // extern "C"
