// Launches that begin while the one before them ends ("programmatic dependent launch", Hopper and later):
// blocks take the places that those of the kernel before leave, and its end waits for no launch.
//   PTX, "griddepcontrol".
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>

// Of a kernel that `launch_dependent` starts, by all threads, before it reads or writes what a kernel
// before may still write or read: its first statement, but where samples.cuh samples rows.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// After that, by all threads, where the next kernel has something to do before it waits: once all blocks
// have said so, or ended, its blocks take what room there is. Where this kernel leaves multiprocessors
// empty they crowd on those, so it is not for products: behind a small one a tail took clearly longer.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __global__ void any_kernel() {}

// True where kernels of this file wait, on the current device: not those that the driver has translated
// from code for an earlier GPU. Asked once a device: it takes a microsecond.
static inline bool kernels_wait(int device) {
  constexpr int kDevices = 64, kHopper = 90;
  static std::atomic<signed char> known[kDevices];  // 1: yes, -1: no
  const bool listed = device >= 0 && device < kDevices;
  if (const int found = listed ? known[device].load() : 0; found != 0) return found > 0;
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, any_kernel) != cudaSuccess) {
    cudaGetLastError();  // asked for again at the next launch, which says what is wrong
    return false;
  }
  const bool yes = attributes.ptxVersion >= kHopper;
  if (listed) known[device] = yes ? 1 : -1;
  return yes;
}

// kernel<<<grid, threads, shared, stream>>>(arguments...), which waits for what is before it in the
// stream by itself; on earlier GPUs a launch like any other.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
                             cudaStream_t stream, const Arguments&... arguments) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = kernels_wait(device) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
