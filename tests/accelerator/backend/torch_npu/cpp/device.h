// Devices, their current streams and their random number generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include "clocks.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

int num_devices();
void set_num_devices(int count);
int current_device();  // of the calling thread
void set_current_device(int index);
StreamKey current_stream(int device);
c10::Stream new_stream(int device);

// Marks the device as used by this process. Raises RuntimeError in a child that was forked after that.
void initialize();
bool is_initialized();
bool is_in_bad_fork();

// The default generator of a device; -1 is the current device.
const at::Generator& default_generator(int device);
// The CPU generator that draws the numbers of a generator of the device.
at::Generator cpu_generator_of(const at::Generator& generator);

void register_device();

}  // namespace sim
