// Copies between devices and the host, and reads of single values.
#include "copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "accesses.h"
#include "device.h"
#include "findings.h"
#include "late_copies.h"
#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

bool is_pinned_tensor(const at::Tensor& tensor) {
  return tensor.has_storage() && is_pinned(tensor.storage().data());
}

// A copy between two devices waits for the current streams of both, and both wait for it, as in torch.cuda.
void order_streams(const StreamKey& from, const StreamKey& to) {
  make_stream_wait(from, clock_of(to));
  make_stream_wait(to, clock_of(from));
}

void copy_on_device(const at::Tensor& source, const at::Tensor& destination) {
  auto from = current_stream(source.device().index());
  auto to = current_stream(destination.device().index());
  order_streams(from, to);
  {
    Operation operation(from, "aten::copy_");
    operation.reads(source);
    operation.writes(destination);
    cpu_alias(destination).copy_(cpu_alias(source));
  }
  order_streams(from, to);
}

void report_wait_of_copy(const at::Tensor& source, bool to_host, bool pinned, bool non_blocking) {
  if (non_blocking && pinned) {
    return;
  }
  auto kind = non_blocking ? std::string("pageable copy") : std::string("blocking copy");
  auto detail = pinned ? "pinned memory" : "pageable memory";
  report_host_wait(kind + (to_host ? " to host" : " to device"), static_cast<int64_t>(source.nbytes()), detail);
}

void copy_with_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  bool to_host = is_on_device(source);
  const auto& host = to_host ? destination : source;
  const auto& device = to_host ? source : destination;
  bool pinned = is_pinned_tensor(host);
  report_wait_of_copy(source, to_host, pinned, non_blocking);
  auto stream = current_stream(device.device().index());
  Operation operation(stream, to_host ? "copy to host" : "copy to device");
  operation.reads(source);
  operation.writes(destination);
  if (!non_blocking || !pinned) {
    make_host_wait(clock_of(stream));
    cpu_alias(destination).copy_(cpu_alias(source));
  } else if (to_host) {
    start_copy_to_host(operation.launch(), host, cpu_alias(device));
  } else {
    start_copy_to_device(operation.launch(), host, cpu_alias(device));
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (source.numel() == 0) {
    return destination;
  }
  if (is_on_device(source) && is_on_device(destination)) {
    copy_on_device(source, destination);
  } else {
    copy_with_host(source, destination, non_blocking);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar read_value(const at::Tensor& tensor) {
  auto stream = current_stream(tensor.device().index());
  report_host_wait("item", static_cast<int64_t>(tensor.itemsize()));
  Operation operation(stream, "aten::item");
  operation.reads(tensor);
  make_host_wait(clock_of(stream));
  return cpu_alias(tensor).item();
}

}  // namespace sim
