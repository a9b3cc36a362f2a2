// Runs an operator that has no kernel for the device with the kernel of the CPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
