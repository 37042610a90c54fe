// Vectors of the target's own width, in GCC's and Clang's portable notation (x86-64 and arm64).
// A sum over one variable may not be reordered, so that the compiler does not vectorise it; a sum
// over named vectors says which partial sums are meant, and stays the same on every run.
#pragma once
#include <algorithm>
#include <cstdint>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectorRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16, kVectorRegisters = 16;
#endif
constexpr int kDoubles = kVectorBytes / sizeof(double);
constexpr int kFloats = kVectorBytes / sizeof(float);
constexpr int kLineFloats = 64 / sizeof(float);  // a cache line

typedef double doubles __attribute__((vector_size(kVectorBytes)));
typedef float floats __attribute__((vector_size(kVectorBytes)));

// The next kDoubles floats, as doubles. One instruction on x86, but GCC splits the portable notation
// into five (two halves, converted and joined).
inline doubles widen(const float* address) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(_mm256_loadu_ps(address));
#elif defined(__AVX__)
  return _mm256_cvtps_pd(_mm_loadu_ps(address));
#else
  typedef float unaligned __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const unaligned*>(address), doubles);
#endif
}

// The other way: kDoubles floats from as many doubles, rounded.
inline void narrow(float* address, doubles v) {
#if defined(__AVX512F__)
  _mm256_storeu_ps(address, _mm512_cvtpd_ps(v));
#elif defined(__AVX__)
  _mm_storeu_ps(address, _mm256_cvtpd_ps(v));
#else
  typedef float half __attribute__((vector_size(kVectorBytes / 2)));
  typedef float unaligned __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));
  *reinterpret_cast<unaligned*>(address) = __builtin_convertvector(v, half);
#endif
}

inline doubles load(const double* address) {
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  return *reinterpret_cast<const unaligned*>(address);
}

inline floats load(const float* address) {
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  return *reinterpret_cast<const unaligned*>(address);
}

// The next `count` floats, all of a vector's or fewer; zeros follow.
inline floats load_some(const float* address, int64_t count) {
  if (count >= kFloats) return load(address);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), address);
#endif
  alignas(kVectorBytes) float lanes[kFloats] = {};
  std::copy(address, address + count, lanes);
  return load(lanes);
}

inline void store(float* address, floats v) {
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  *reinterpret_cast<unaligned*>(address) = v;
}

inline void store(double* address, doubles v) {
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  *reinterpret_cast<unaligned*>(address) = v;
}

// To an aligned address, past the caches where the target can: what is not read before it has left them
// need not be read into them to be written. `streamed` before another thread reads it.
inline void stream(float* address, floats v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(address, v);
#elif defined(__AVX__)
  _mm256_stream_ps(address, v);
#else
  store(address, v);
#endif
}

inline void streamed() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// a b + c with one rounding where the target has it. In a * b + c the compiler may choose, and may
// choose otherwise in a tile of another shape.
inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Neighbours first, then pairs of them: a fixed order, and a short chain of additions.
inline double sum_lanes(doubles v) {
  for (int lanes = kDoubles / 2; lanes > 0; lanes /= 2)
    for (int lane = 0; lane < lanes; ++lane) v[lane] = v[2 * lane] + v[2 * lane + 1];
  return v[0];
}

// Lanes of two vectors, by number: Clang's notation, which GCC has from 12 on, and GCC's own.
#if defined(__clang__)
#define WB_LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int lane_numbers __attribute__((vector_size(kVectorBytes)));
#define WB_LANES(a, b, ...) __builtin_shuffle(a, b, lane_numbers{__VA_ARGS__})
#endif

// (a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...)
inline floats add_neighbours(floats a, floats b) {
#if defined(__AVX512F__)
  return WB_LANES(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         WB_LANES(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX__)
  return WB_LANES(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + WB_LANES(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return WB_LANES(a, b, 0, 2, 4, 6) + WB_LANES(a, b, 1, 3, 5, 7);
#endif
}

#undef WB_LANES

// The sums of the lanes of kFloats vectors at once, lane j that of v[j], which are used up: neighbours
// first, in float, since a tree rounds little. One by one they take four times as long.
inline floats sums_of_lanes(floats (&v)[kFloats]) {
  for (int count = kFloats / 2; count > 0; count /= 2)
    for (int j = 0; j < count; ++j) v[j] = add_neighbours(v[2 * j], v[2 * j + 1]);
  return v[0];
}
