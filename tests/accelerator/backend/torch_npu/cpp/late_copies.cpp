#include "late_copies.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "accesses.h"
#include "findings.h"

namespace sim {
namespace {

struct LateCopy {
  Launch launch;
  bool to_host;
  at::Tensor host;   // an alias, because `parameter.data = other` gives the tensor itself other memory
  at::Tensor value;  // a copy of what is copied, with the dtype of the source
};

std::vector<LateCopy> late_copies;  // in the order of their start

// Autograd must not see the copies that stand for the work of the device.
struct WithoutAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset};
};

// Whether the storage of the host's memory has not been resized to nothing since then.
bool has_memory(const at::Tensor& tensor) {
  return tensor.storage().nbytes() >= tensor.nbytes() && tensor.storage().data() != nullptr;
}

bool overlap(const LateCopy& copy, uintptr_t begin, uintptr_t end) {
  if (!has_memory(copy.host)) {
    return false;
  }
  auto [first, last] = address_range(copy.host);
  return first < end && begin < last;
}

void poison(const at::Tensor& host) {
  if (host.is_floating_point() || host.is_complex()) {
    host.fill_(NAN);
  } else {
    host.fill_(0x55);
  }
}

bool has_same_bytes(const at::Tensor& one, const at::Tensor& other) {
  auto left = one.contiguous();
  auto right = other.contiguous();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = at::empty_like(tensor, tensor.options().pinned_memory(false));
  copy.copy_(tensor);
  return copy;
}

}  // namespace

void start_copy_to_host(const Launch& launch, const at::Tensor& host, const at::Tensor& device_memory) {
  WithoutAutograd guard;
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  // From here on the device changes the memory, so earlier copies from it are no longer compared.
  auto [begin, end] = address_range(host);
  auto reads_host = [&](const LateCopy& copy) { return !copy.to_host && overlap(copy, begin, end); };
  late_copies.erase(std::remove_if(late_copies.begin(), late_copies.end(), reads_host), late_copies.end());
  late_copies.push_back({launch, true, at::alias(host), copy_of(device_memory)});
  poison(host);
}

void start_copy_to_device(const Launch& launch, const at::Tensor& host, const at::Tensor& device_memory) {
  WithoutAutograd guard;
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  auto [begin, end] = address_range(host);
  // The device sees the copies to this memory that come before this one; only the host must not see them yet.
  std::vector<at::Tensor> poisoned;
  for (const auto& copy : late_copies) {
    if (copy.to_host && overlap(copy, begin, end) && is_ordered(copy.launch, launch.stream)) {
      copy.host.copy_(copy.value);
      poisoned.push_back(copy.host);
    }
  }
  device_memory.copy_(host);
  if (poisoned.empty()) {
    late_copies.push_back({launch, false, at::alias(host), copy_of(host)});
  }
  for (const auto& tensor : poisoned) {
    poison(tensor);
  }
}

void complete_late_copies() {
  Findings findings;
  {
    WithoutAutograd guard;
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    std::vector<LateCopy> remaining;
    for (auto& copy : late_copies) {
      if (!host_has_waited(copy.launch)) {
        remaining.push_back(std::move(copy));
      } else if (!has_memory(copy.host)) {
        findings.push_back({"host memory", "the storage of pinned memory was resized before a copy was complete"});
      } else if (copy.to_host) {
        copy.host.copy_(copy.value);
      } else if (!has_same_bytes(copy.host, copy.value)) {
        auto size = std::to_string(copy.value.nbytes());
        findings.push_back(
            {"host memory", size + " bytes of pinned memory changed before their copy to the device was complete"});
      }
    }
    late_copies = std::move(remaining);
  }
  report(findings);
}

bool has_late_copy(uintptr_t begin, uintptr_t end) {
  for (const auto& copy : late_copies) {
    if (!host_has_waited(copy.launch) && overlap(copy, begin, end)) {
      return true;
    }
  }
  return false;
}

size_t num_late_copies() {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return late_copies.size();
}

}  // namespace sim
