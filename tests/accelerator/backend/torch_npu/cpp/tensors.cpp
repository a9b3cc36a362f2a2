#include "tensors.h"

#include <c10/core/CPUAllocator.h>

#include <utility>

#include "device.h"
#include "memory.h"

namespace sim {
namespace {

struct Adopted {
  c10::Storage cpu;
  Block* block;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  release_memory(adopted->block);
  delete adopted;
}

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

c10::Storage make_storage(c10::DataPtr memory, size_t size, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, std::move(memory), allocator, /*resizable=*/true));
}

// Memory that keeps another storage alive.
c10::DataPtr shared_memory(const c10::Storage& storage, c10::Device device) {
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), &release_storage, device};
}

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    tensor._set_conj(true);
  }
  if (like.is_neg()) {
    tensor._set_neg(true);
  }
  return tensor;
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) {
    return tensor;
  }
  auto memory = shared_memory(tensor.storage(), c10::Device(c10::kCPU));
  auto storage = make_storage(std::move(memory), tensor.storage().nbytes(), c10::GetCPUAllocator());
  auto alias = make_tensor(std::move(storage), c10::DispatchKey::CPU, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like) {
  return make_tensor(storage, c10::DispatchKey::PrivateUse1, like);
}

at::Tensor adopt(const at::Tensor& cpu, int device) {
  auto storage = cpu.storage();
  auto* address = const_cast<void*>(storage.data());
  auto* adopted = new Adopted{storage, adopt_memory(address, storage.nbytes(), device)};
  c10::DataPtr memory(address, adopted, &release_adopted, c10::Device(kSim, device));
  return device_tensor(make_storage(std::move(memory), storage.nbytes(), device_allocator()), cpu);
}

void replace_memory(const c10::Storage& storage, const c10::Storage& other) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(shared_memory(other, storage.device()));
  impl->set_nbytes(other.nbytes());
}

}  // namespace sim
