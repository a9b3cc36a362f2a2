// Copies between pinned memory and the device that the host has not waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include "clocks.h"

namespace sim {

// A copy to the host: until the host has waited for it, `host` contains NaN (bytes 0x55 if it has no NaN).
void start_copy_to_host(const Launch& launch, const at::Tensor& host, const at::Tensor& device_memory);
// A copy to the device: `host` must not change until the host has waited for it.
void start_copy_to_device(const Launch& launch, const at::Tensor& host, const at::Tensor& device_memory);

void complete_late_copies();
bool has_late_copy(uintptr_t begin, uintptr_t end);
size_t num_late_copies();

}  // namespace sim
