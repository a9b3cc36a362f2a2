// Finds two operations on different streams that use the same memory in no order.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "clocks.h"
#include "findings.h"

namespace sim {

// One operation on a stream: an operator, a copy, or a collective. The destructor reports what was found.
class Operation {
 public:
  Operation(const StreamKey& stream, std::string name);
  ~Operation();

  void reads(const at::Tensor& tensor) {
    add(tensor, false);
  }
  void writes(const at::Tensor& tensor) {
    add(tensor, true);
  }
  const Launch& launch() const {
    return launch_;
  }

 private:
  void add(const at::Tensor& tensor, bool is_write);

  Launch launch_;
  std::string name_;
  Findings findings_;
};

// The addresses of the elements of a tensor: first byte, and the byte after the last one.
std::pair<uintptr_t, uintptr_t> address_range(const at::Tensor& tensor);

}  // namespace sim
