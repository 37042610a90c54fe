// Launches that begin while the one before them ends ("programmatic dependent launch", Hopper and later):
// blocks take the places that those of the kernel before leave, and its end waits for no launch.
//   PTX, "griddepcontrol".
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

// The first statement of a kernel that `launch_dependent` starts, by all threads: nothing may be read or
// written before, since the kernel before may still run. Its last blocks end meanwhile.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// After that, by all threads, where the next kernel has something to do before it waits: once all blocks
// have said so, or ended, its blocks take what room there is. Where this kernel leaves multiprocessors
// empty they crowd on those, so it is not for products: next to one of 64 tiles a tail took 5 us more.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// kernel<<<grid, threads, shared, stream>>>(arguments...), which waits for what is before it in the
// stream by itself; on earlier GPUs a launch like any other.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
                             cudaStream_t stream, const Arguments&... arguments) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
