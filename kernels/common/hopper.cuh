// What a Hopper kernel asks of the machine, a wrapper a instruction: barriers in shared memory, the
// tensor copy engine (TMA), matrix products of a warpgroup (wgmma). For sm_90a alone.
//   Names of PTX, of the section "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async" of its manual.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace hopper {

constexpr int kWarpgroup = 128;  // threads that issue a matrix product together

__device__ __forceinline__ uint32_t shared(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// --- barriers: a phase ends when `count` threads have arrived and all expected bytes are there ---

__device__ __forceinline__ void init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(count));
}

// After `init`, before the copy engine uses the barriers.
__device__ __forceinline__ void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(shared(barrier)),
      "r"(parity)
      : "memory");
}

// --- the copy engine -----------------------------------------------------------------------------

// A box of a matrix that is stored by panels, or of a plain one, to shared memory; its bytes are
// counted by the barrier. Coordinates: the fastest first.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, int x, int y, int z,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared(to)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared(barrier))
      : "memory");
}

__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, int x, int y,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared(to)),
      "l"(&map), "r"(x), "r"(y), "r"(shared(barrier))
      : "memory");
}

// --- registers -----------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// --- turns of two warpgroups, 1 and 2, by barriers of those numbers -------------------------------

// Waits until `pass_turn` has been called for this warpgroup once more.
__device__ __forceinline__ void take_turn(int mine) {
  asm volatile("bar.sync %0, %1;" ::"r"(mine), "n"(2 * kWarpgroup) : "memory");
}

__device__ __forceinline__ void pass_turn(int whose) {
  asm volatile("bar.arrive %0, %1;" ::"r"(whose), "n"(2 * kWarpgroup) : "memory");
}

// All of both, by the barrier of that number.
template <int Barrier>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(Barrier), "n"(2 * kWarpgroup) : "memory");
}

// True for all of both where it is for one; a barrier too.
template <int Barrier>
__device__ __forceinline__ bool any(bool mine) {
  int found;
  asm volatile(
      "{\n.reg .pred mine, found;\nsetp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred found, %2, %3, mine;\nselp.b32 %0, 1, 0, found;\n}"
      : "=r"(found)
      : "r"(static_cast<int>(mine)), "n"(Barrier), "n"(2 * kWarpgroup)
      : "memory");
  return found != 0;
}

// --- matrix products of a warpgroup --------------------------------------------------------------

// Rows of 32 halves, 64 bytes each, in groups of 8 rows that are 512 bytes apart, swizzled: of row r
// the 16 bytes c stand at c ^ (r / 2 % 4). `address` may stand 16 halves further on.
__device__ __forceinline__ uint64_t rows_of_32(const void* address) {
  const uint64_t start = (shared(address) & 0x3ffff) >> 4;
  return start | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 | uint64_t{2} << 62;
}

// Rows of 32 floats, 128 bytes each, in groups of 8 rows that are 1024 bytes apart, swizzled: of row r
// the 16 bytes c stand at c ^ r % 8. `address` may stand 8 floats, 32 bytes, further on.
__device__ __forceinline__ uint64_t rows_of_32_floats(const void* address) {
  const uint64_t start = (shared(address) & 0x3ffff) >> 4;
  return start | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

constexpr int kNext = 16 * sizeof(half) >> 4;  // to the next 16 halves, or 8 floats, in a descriptor's unit

// Before the first product of a sequence: registers written so far are what it adds to.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The accumulators of a product, 64 or 128, as PTX names them and as its operands.
#define WB_64_SUMS                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "            \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WB_64_MORE                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "            \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "            \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "      \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "  \
  "%126, %127"
#define WB_SUMS "{" WB_64_SUMS "}, "
#define WB_128_SUMS "{" WB_64_SUMS ", " WB_64_MORE "}, "
#define WB_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WB_SIXTEEN(d, i) WB_FOUR(d, i), WB_FOUR(d, i + 4), WB_FOUR(d, i + 8), WB_FOUR(d, i + 12)
#define WB_64(d) WB_SIXTEEN(d, 0), WB_SIXTEEN(d, 16), WB_SIXTEEN(d, 32), WB_SIXTEEN(d, 48)

#define WB_SHARED_PRODUCT(shape, types)                                                          \
  asm volatile(                                                                                \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned." shape " " WB_SUMS "%64, %65, add, 1, 1" types ";\n}"      \
      : WB_64(d)                                                                               \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// sum (64, 128) <- A (64, 16) B (128, 16)^T + (add ? sum : 0), from shared memory. Of a thread are
// sum[4 j + 2 r + c] at row 16 warp + lane / 4 + 8 r, column 8 j + lane % 4 * 2 + c.
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  WB_SHARED_PRODUCT("m64n128k16.f32.f16.f16", ", 0, 0");
}

// The same of 8 floats of k, that were rounded to TF32 before: what is beyond is cut off.
__device__ __forceinline__ void multiply_tf32(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  WB_SHARED_PRODUCT("m64n128k8.f32.tf32.tf32", "");
}

// The same with A from registers: of a thread a[r + 2 q] has row 16 warp + lane / 4 + 8 r, columns
// 8 q + lane % 4 * 2 and the next. They stay as they are until the product is done.
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                         bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " WB_SUMS
      "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
      : WB_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// sums (64, 256) <- A (64, 16) B (256, 16)^T + (add ? sums : 0), from shared memory; sums[h] has columns
// 128 h and on.
__device__ __forceinline__ void multiply(float (&d)[2][64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " WB_128_SUMS
      "%128, %129, add, 1, 1, 0, 0;\n}"
      : WB_64(d[0]), WB_64(d[1])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

#undef WB_SHARED_PRODUCT
#undef WB_64
#undef WB_SIXTEEN
#undef WB_FOUR
#undef WB_128_SUMS
#undef WB_SUMS
#undef WB_64_MORE
#undef WB_64_SUMS

}  // namespace hopper
