// Tensors of the device as CPU tensors on the same memory, and back.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

bool is_on_device(const at::Tensor& tensor);
// A CPU tensor on the memory of a tensor of the device. Other tensors are returned as they are.
at::Tensor cpu_alias(const at::Tensor& tensor);
// A tensor of the device with the shape, strides and dtype of `like`.
at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like);
// Moves a CPU result to the device without a copy.
at::Tensor adopt(const at::Tensor& cpu, int device);
// Gives `storage` the memory of another one.
void replace_memory(const c10::Storage& storage, const c10::Storage& other);

}  // namespace sim
