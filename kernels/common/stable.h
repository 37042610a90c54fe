// Conveniences over torch's stable ABI for a binding .cpp: the only kind of file that knows torch.
//
// Device code (.cu) includes no torch header: its launcher takes plain pointers and a stream and
// returns cudaError_t. One binding serves both builds; the build defines WB_CUDA for a CUDA one:
//
//     void run(const wb::Tensor& x, wb::Tensor& y) {
//       wb::expect(x, "x", wb::Float, {wb::any});
//       wb::expect(y, "y", wb::Float, {x.size(0)});
//       wb::expect_same_device(x, "x", y, "y");
//     #ifdef WB_CUDA
//       const wb::OnDevice on(x);                // device guard and torch's current stream
//       wb::check(launch(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.size(0),
//                        on.stream), "twice");
//     #else
//       wb::parallel_for(0, x.size(0), 1024, [&](int64_t begin, int64_t end) { … });
//     #endif
//     }
//     WB_REGISTER("run(Tensor x, Tensor(a!) y) -> ()", run)
#pragma once

#if defined(WB_CUDA) && !defined(USE_CUDA)
#define USE_CUDA  // torch's shim declares its CUDA functions only then
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>

#ifdef WB_CUDA
#include <cuda_runtime_api.h>
#endif

// Stops an op with a readable message; Python sees a RuntimeError.
#define WB_CHECK(condition, ...) \
  do {                           \
    if (!(condition)) {          \
      ::wb::fail(__VA_ARGS__);   \
    }                            \
  } while (0)

// Registers the op of a binding under the build's own namespace and for its device.
#ifdef WB_CUDA
#define WB_DEVICE CUDA
#else
#define WB_DEVICE CPU
#endif
#define WB_REGISTER(schema, function)                               \
  STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) { m.def(schema); } \
  STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, WB_DEVICE, m) { m.impl("run", TORCH_BOX(&function)); }

namespace wb {

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;  // (begin, end, grain, f(begin, end)); f must not throw
using torch::stable::Tensor;

constexpr ScalarType Float = ScalarType::Float;
constexpr ScalarType Double = ScalarType::Double;
constexpr int64_t any = -1;  // a size that `expect` leaves open

template <class... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// torch's own spelling in Python of the types that kernels take.
inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline void write_shape(std::ostream& out, const int64_t* sizes, int64_t count) {
  out << "(";
  for (int64_t i = 0; i < count; ++i) {
    out << (i ? ", " : "");
    sizes[i] == any ? out << "*" : out << sizes[i];
  }
  out << ")";
}

inline bool has_shape(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.dim() != static_cast<int64_t>(shape.size())) {
    return false;
  }
  int64_t axis = 0;
  for (const int64_t wanted : shape) {
    if (wanted != any && t.size(axis) != wanted) {
      return false;
    }
    ++axis;
  }
  return true;
}

// A dense row-major tensor of this type and shape, as a kernel of plain pointers needs it.
inline void expect(const Tensor& t, const char* name, ScalarType dtype,
                   std::initializer_list<int64_t> shape) {
  if (t.scalar_type() == dtype && has_shape(t, shape) && t.is_contiguous()) {
    return;
  }
  std::ostringstream text;
  text << name << ": got " << dtype_name(t.scalar_type()) << " ";
  write_shape(text, t.sizes().data(), t.dim());
  text << (t.is_contiguous() ? "" : ", not contiguous") << "; wants a contiguous "
       << dtype_name(dtype) << " ";
  write_shape(text, shape.begin(), static_cast<int64_t>(shape.size()));
  fail(text.str());
}

inline void expect_same_device(const Tensor& a, const char* a_name, const Tensor& b,
                               const char* b_name) {
  WB_CHECK(a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index(), b_name,
           " is on another device than ", a_name, "; move both to one");
}

// A float32 matrix (rows, columns) whose rows may lie at any stride, columns adjacent.
inline void expect_rows(const Tensor& t, const char* name) {
  WB_CHECK(t.dim() == 2 && t.scalar_type() == Float, name, ": got ", dtype_name(t.scalar_type()),
           " with ", t.dim(), " dimensions; wants a float32 matrix");
  WB_CHECK(t.stride(1) == 1 || t.size(1) <= 1 || t.size(0) == 0, name, ": got columns ",
           t.stride(1), " elements apart; wants them adjacent: call .contiguous()");
}

// Folded weights that a kernel reads by 16 bytes.
inline void expect_aligned(const Tensor& t, const char* name) {
  WB_CHECK(
      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
      ": got memory that does not start at 16 bytes; wants a tensor of its own: call .clone()");
}

#ifdef WB_CUDA

// Makes the tensor's device current for a scope and holds torch's current stream there.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit OnDevice(const Tensor& t)
      : guard(t.get_device_index()), stream(current_stream(t.get_device_index())) {}

  static cudaStream_t current_stream(int32_t device) {
    void* stream = nullptr;
    WB_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS,
             "torch has no current stream for CUDA device ", device);
    return static_cast<cudaStream_t>(stream);
  }
};

// A launcher's result; `what` names the kernel. CUDA also keeps an error for whoever asks next: it
// is taken away here, or torch would raise it at its next launch.
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) cudaGetLastError();
  WB_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorName(error), ": ",
           cudaGetErrorString(error));
}

#endif  // WB_CUDA

}  // namespace wb
