// x as it is, split on its way: the warpgroup that asks the copy engine for panels writes their halves
// beside those of W, in shared memory. A thread owns a row of the tile, with an exponent for each 64
// of k. Nobody walks x before, and the other two only multiply.
#pragma once
#include "split_sides.cuh"

namespace split_gemm {

// Of 64 of a row, from the two places that follow `place`: its largest |x 2^c|. The copy engine has
// swizzled: of row i the 16 bytes b stand at b ^ i % 8.
template <class Way>
__device__ __forceinline__ float largest_of_row(const Shared<Way>& shared, int place,
                                                const float* raise) {
  const int row = threadIdx.x;
  float most = 0.f;
#pragma unroll
  for (int b = 0; b < 2 * kPanel / 4; ++b) {
    const float* panel = shared.staging.x[place + b / 8][row];
    const float4 v = reinterpret_cast<const float4*>(panel)[b % 8 ^ row % 8];
    const float4 r = reinterpret_cast<const float4*>(raise)[b];
    most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x * r.x), fabsf(v.y * r.y)),
                             fmaxf(fabsf(v.z * r.z), fabsf(v.w * r.w))));
  }
  return most;
}

// A panel of a row times 2^c and `by`, as halves.
template <class Way>
__device__ __forceinline__ void split_panel(Stage<Way>& stage, const float (&panel)[kPanel],
                                            const float* raise, float by) {
  const int row = threadIdx.x;
#pragma unroll
  for (int q = 0; q < kPanel / 8; ++q) {  // 16 bytes of halves
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float4 v = reinterpret_cast<const float4*>(panel)[(2 * q + b) ^ row % 8];
      const float4 r = reinterpret_cast<const float4*>(raise)[2 * q + b];
      split_two<Way>(hi[2 * b], lo[2 * b], {v.x * r.x, v.y * r.y}, by);
      split_two<Way>(hi[2 * b + 1], lo[2 * b + 1], {v.z * r.z, v.w * r.w}, by);
    }
    const int to = q ^ row / 2 % 4;
    reinterpret_cast<uint4*>(stage.x[0][row])[to] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    if constexpr (Way::Products == 3)
      reinterpret_cast<uint4*>(stage.x[1][row])[to] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
  }
}

// By all of the first warpgroup. ask_x(i, to, full), ask_w(i): for the panels i of x and W, by one thread.
template <class Way, class AskX, class AskW>
__device__ __forceinline__ void stage_panels(Shared<Way>& shared, const int8_t* c, int pairs,
                                             const AskX& ask_x, const AskW& ask_w) {
  constexpr int kPlaces = Staging<Way>::kPlaces, kStages = Shared<Way>::kStages, kBarrier = 4;
  auto& [raise, full, top] = shared.staged;
  const bool asks = threadIdx.x == 0, raises = threadIdx.x < 2 * kPanel;
  const auto ask = [&](int i) {
    if (asks && i < 2 * pairs) ask_x(i, shared.staging.x[i % kPlaces], &full[i % kPlaces]);
  };
  for (int i = 0; i < kPlaces; ++i) ask(i);
  for (int i = 0; asks && i < min(kStages, 2 * pairs); ++i) ask_w(i);
  int exponent = raises ? c[threadIdx.x] : 0;  // a pair ahead, as it may come from L2
  for (int pair = 0; pair < pairs; ++pair) {
    const int place = 2 * pair % kPlaces, stage = 2 * pair % kStages;
    float(&now)[2 * kPanel] = raise[pair % 2];
    if (raises) {
      now[threadIdx.x] = power_of_two(exponent);
      exponent = c[min(pair + 1, pairs - 1) * 2 * kPanel + threadIdx.x];
    }
    hopper::meet_here<kBarrier>();
    for (int i = 0; i < 2; ++i) hopper::wait(&full[place + i], 2 * pair / kPlaces % 2);
    const int e = exponent_of_largest(largest_of_row(shared, place, now));
    for (int i = 0; asks && i < 2 && 2 * pair >= kStages; ++i) ask_w(2 * pair + i);
    for (int i = 0; i < 2; ++i) shared.ring.wait_empty(2 * pair + i);
    top[stage / 2][threadIdx.x] = static_cast<int16_t>(e);
    for (int i = 0; i < 2; ++i) {
      split_panel(shared.stages[stage + i], shared.staging.x[place + i][threadIdx.x],
                  now + i * kPanel, power_of_two(-e));
      hopper::fence_written();
      hopper::meet_here<kBarrier>();  // all have read the panel, and written its halves
      if (threadIdx.x % 32 == 0) hopper::arrive(&shared.ring.full[stage + i]);
      ask(2 * pair + i + kPlaces);
    }
  }
}

}  // namespace split_gemm
