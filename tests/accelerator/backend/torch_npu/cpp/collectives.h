// Collectives on tensors of the device, by gloo on the same memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

#include "clocks.h"

namespace sim {

class Collective;

// A backend as torch.distributed knows nccl: collectives run on a stream of the backend, which waits for the current
// stream when they start; wait() makes the current stream wait for them, and the host does not wait.
class CollectivesBackend final : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  CollectivesBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name);

  const std::string getBackendName() const override {
    return name_;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int rank, int tag) override;
  WorkPtr recv(Tensors& tensors, int rank, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }

 private:
  template <typename Start>
  WorkPtr run(const char* name, const Tensors& inputs, const Tensors& outputs, Start start);
  StreamKey stream_of(int device);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::map<int, StreamKey> streams_;
};

}  // namespace sim
