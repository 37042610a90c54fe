// The exact GELU, and what of a row is enough for the maximum of scale * gelu(u).
//
// g(u) = u Phi(u) falls until the vertex v = -0.7518 and rises after it. So of a set of u
//   the largest g is that of its smallest or of its largest u (what wins for scale >= 0),
//   the smallest g is that of its largest u up to v or of its smallest above (for scale < 0).
// A u within rounding of v may stand on either side: g is flat there.
#pragma once
#include <math.h>

#ifdef __CUDACC__
#define WB_BOTH __host__ __device__ __forceinline__
#else
#define WB_BOTH inline
#endif

constexpr float kVertex = -0.75179152f;
constexpr double kLeast = -5.921587195794507;  // erf(z) is -1 in double for z up to here

// u / 2 (1 + erf(u / sqrt 2)), as torch has it, in double. erfc keeps the digits that 1 + erf loses
// below 0; below -8.37 torch's GELU is 0, and so is this one. Of -inf both are NaN.
WB_BOTH double gelu(double u) {
  const double z = u * 0.70710678118654752440;
  return 0.5 * u * (z <= kLeast ? 0.0 : erfc(-z));
}

// The larger, or the smaller, of two; NaN if one is, which fmaxf would drop. T: a number, or a
// vector of them.
template <class T>
WB_BOTH T larger(T a, T b) {
  return (a != a) | (a > b) ? a : b;
}
template <class T>
WB_BOTH T smaller(T a, T b) {
  return (a != a) | (a < b) ? a : b;
}

// The two u of a row that can win. `left` is NaN once a u is NaN, or -inf where scale < 0.
template <class T>
struct Ends {
  T left, right;
};

template <class T>
WB_BOTH Ends<T> no_ends(bool dips) {  // dips: scale < 0
  return dips ? Ends<T>{T{} - INFINITY, T{} + INFINITY} : Ends<T>{T{} + INFINITY, T{} - INFINITY};
}

template <class T>
WB_BOTH Ends<T> joined(Ends<T> a, Ends<T> b, bool dips) {
  if (dips) return {larger(a.left, b.left), a.right < b.right ? a.right : b.right};
  return {smaller(a.left, b.left), a.right > b.right ? a.right : b.right};
}

template <class T>
WB_BOTH Ends<T> ends_of(T u, bool dips) {
  if (!dips) return {u, u};
  const T none = T{} + INFINITY;
  return {u > kVertex ? -none : u + (u - u), u > kVertex ? u : none};  // of -inf u - u is NaN
}

// scale * gelu of a u that may be missing for scale < 0.
WB_BOTH double scaled(float u, double scale) {
  return scale < 0 && u == -INFINITY ? -INFINITY : scale * gelu(u);
}

// scale * gelu of the one that wins; in double, rounded once.
WB_BOTH float highest(Ends<float> e, double scale) {
  return static_cast<float>(larger(scaled(e.left, scale), scaled(e.right, scale)));
}
