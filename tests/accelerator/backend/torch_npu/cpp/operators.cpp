// Operators with a kernel of their own: allocation, views, storages, and those that the CPU implements differently.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "accesses.h"
#include "copies.h"
#include "device.h"
#include "fallback.h"
#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Storage;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

// ---- allocation ----------------------------------------------------------------------------------------------------

Tensor empty(
    SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    SymIntArrayRef size, SymIntArrayRef stride, std::optional<ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(kSim)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t num_bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (tensor.storage().nbytes() < num_bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
  }
  return tensor;
}

void record_tensor(Tensor& tensor, at::Stream stream) {
  record_stream(tensor.storage().data(), key_of(stream));
}

// ---- views and storages: they use no memory, so they are no operations on a stream ---------------------------------

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  auto start = offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view_dtype(const Tensor& tensor, ScalarType dtype) {
  return device_tensor(tensor.storage(), cpu_alias(tensor).view(dtype));
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return device_tensor(tensor.storage(), cpu_alias(tensor).unfold(dim, size, step));
}

void set_memory(Tensor& tensor, const Storage& storage, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(size, stride, offset);
}

Tensor& set_storage(Tensor& tensor, Storage storage) {
  return at::native::set_(tensor, std::move(storage));
}

Tensor& set_part_of_storage(
    Tensor& tensor, Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.size() != sizes.size()) {  // set_(storage) passes no strides
    strides = at::detail::defaultStrides(sizes);
  }
  set_memory(tensor, storage, sizes, strides, offset.expect_int());
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  set_memory(tensor, source.storage(), source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

Tensor& set_empty(Tensor& tensor) {
  return set_tensor(tensor, at::empty({0}, tensor.options()));
}

// Lets `parameter.data = tensor` replace a CPU tensor by one of the device.
bool has_compatible_type(const Tensor& one, const Tensor& other) {
  auto is_dense = [](const Tensor& tensor) {
    auto type = tensor.device().type();
    return tensor.layout() == at::kStrided && (type == kSim || type == at::kCPU || type == at::kMeta);
  };
  return is_dense(one) && is_dense(other);
}

// ---- operators for which the CPU has another name or other dtypes --------------------------------------------------

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Operation operation(current_stream(input.device().index()), "aten::convolution");
  operation.reads(input);
  operation.reads(weight);
  std::optional<Tensor> cpu_bias;
  if (bias.has_value() && bias->defined()) {
    operation.reads(*bias);
    cpu_bias = cpu_alias(*bias);
  }
  auto result = adopt(
      at::convolution(
          cpu_alias(input), cpu_alias(weight), cpu_bias, stride, padding, dilation, transposed, output_padding, groups),
      input.device().index());
  operation.writes(result);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Operation operation(current_stream(input.device().index()), "aten::convolution_backward");
  operation.reads(gradient);
  operation.reads(input);
  operation.reads(weight);
  std::vector<int64_t> bias_size{gradient.size(1)};
  auto [input_gradient, weight_gradient, bias_gradient] = at::convolution_backward(
      cpu_alias(gradient), cpu_alias(input), cpu_alias(weight), IntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto to_device = [&](const Tensor& cpu) {
    auto result = cpu.defined() ? adopt(cpu, input.device().index()) : cpu;
    operation.writes(result);
    return result;
  };
  return {to_device(input_gradient), to_device(weight_gradient), to_device(bias_gradient)};
}

// The CPU has no histogram of integers; mixture-of-experts models count tokens with it.
Tensor histogram(const Tensor& tensor, int64_t bins, const Scalar& low, const Scalar& high) {
  Operation operation(current_stream(tensor.device().index()), "aten::histc");
  operation.reads(tensor);
  auto counts = at::histc(cpu_alias(tensor).to(at::kDouble), bins, low, high).to(tensor.scalar_type());
  auto result = adopt(counts, tensor.device().index());
  operation.writes(result);
  return result;
}

// Attention is computed by the operators of its formula (0 is sdp::SDPBackend::math).
int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Composite operators that have a kernel of their own on the CPU and on CUDA. The composition would allocate more.
constexpr const char* kNotComposite[] = {"mish_backward", "native_channel_shuffle", "silu_backward"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kNotComposite) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("record_stream", record_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view.dtype", view_dtype);
  m.impl("unfold", unfold);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part_of_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_value);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histogram);
}

// torch resolves the conjugate and negative bits of an argument by a copy, so the copy must resolve them itself.
// Without this, the copy calls itself until the stack overflows.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_SET_OPT_DTYPE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}  // namespace at::native
