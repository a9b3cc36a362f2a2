#include "collectives.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <optional>
#include <utility>

#include "accesses.h"
#include "device.h"
#include "findings.h"
#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

using Tensors = CollectivesBackend::Tensors;
using Lists = CollectivesBackend::Lists;
using WorkPtr = CollectivesBackend::WorkPtr;

// The aliases of a collective, for gloo. Its threads may drop them a little after the collective has ended, when the
// memory belongs to the caller again, who may have freed it.
class Lender {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    auto alias = cpu_alias(tensor);
    if (is_on_device(tensor)) {
      lent_.push_back(alias.storage());
    }
    return alias;
  }
  Tensors operator()(const Tensors& tensors) {
    Tensors list;
    for (const auto& tensor : tensors) {
      list.push_back((*this)(tensor));
    }
    return list;
  }
  Lists operator()(const Lists& lists) {
    Lists result;
    for (const auto& tensors : lists) {
      result.push_back((*this)(tensors));
    }
    return result;
  }
  void take_back() {
    for (const auto& storage : lent_) {
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap({nullptr, c10::Device(c10::kCPU)});
    }
  }

 private:
  std::vector<c10::Storage> lent_;
};

Tensors flatten(const Lists& lists) {
  Tensors result;
  for (const auto& tensors : lists) {
    result.insert(result.end(), tensors.begin(), tensors.end());
  }
  return result;
}

void wait_for_gloo(const WorkPtr& work) {
  std::optional<pybind11::gil_scoped_release> without_gil;
  if (PyGILState_Check()) {
    without_gil.emplace();
  }
  work->wait();
}

// gloo has no AVG: the sum is divided.
bool replace_average(c10d::ReduceOp& op) {
  bool is_average = op == c10d::ReduceOp::AVG;
  if (is_average) {
    op = c10d::ReduceOp::SUM;
  }
  return is_average;
}

}  // namespace

// A collective that was started. It keeps its tensors until wait().
class Collective final : public c10d::Work {
 public:
  Collective(const StreamKey& stream, Tensors tensors, Tensors outputs)
      : stream_(stream), end_(clock_of(stream)), tensors_(std::move(tensors)), outputs_(std::move(outputs)) {
    future_ = make_future();
  }

  // If the work is dropped without wait(), torch's watchdog keeps the tensors until the collective has ended, so that
  // their memory can be used again.
  ~Collective() override {
    for (const auto& tensor : tensors_) {
      record_stream(tensor.storage().data(), stream_);
    }
  }

  // gloo's work of a send or a receive, which another rank must join. Other collectives have ended when they return.
  void set_transfer(WorkPtr transfer) {
    transfer_ = std::move(transfer);
  }

  bool isCompleted() override {
    return transfer_ == nullptr || transfer_->isCompleted();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    if (transfer_ != nullptr) {
      wait_for_gloo(std::exchange(transfer_, nullptr));
    }
    make_stream_wait(current_stream(stream_.first), end_);
    tensors_.clear();
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  // The future records an event on the stream of the collective. Whoever waits for the future waits for the event.
  c10::intrusive_ptr<c10::ivalue::Future> make_future() {
    c10::Device device(kSim, static_cast<c10::DeviceIndex>(stream_.first));
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream_.second));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

  StreamKey stream_;
  Clock end_;
  Tensors tensors_, outputs_;
  WorkPtr transfer_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

CollectivesBackend::CollectivesBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

StreamKey CollectivesBackend::stream_of(int device) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  auto found = streams_.find(device);
  if (found == streams_.end()) {
    found = streams_.emplace(device, key_of(new_stream(device))).first;
  }
  return found->second;
}

// `start` calls gloo on aliases of the tensors. It returns after all ranks have joined, unless it returns work.
template <typename Start>
WorkPtr CollectivesBackend::run(const char* name, const Tensors& inputs, const Tensors& outputs, Start start) {
  const auto& any = inputs.empty() ? outputs : inputs;
  TORCH_CHECK(!any.empty() && is_on_device(any[0]), name_, " supports only tensors of its device, not CPU tensors");
  int device = any[0].device().index();
  auto stream = stream_of(device);
  make_stream_wait(stream, clock_of(current_stream(device)));
  Tensors tensors = inputs;
  tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  {
    Operation operation(stream, name_ + " " + name);
    for (const auto& tensor : inputs) {
      operation.reads(tensor);
    }
    for (const auto& tensor : outputs) {
      operation.writes(tensor);
    }
  }
  Lender lender;
  WorkPtr transfer = start(lender);
  if (transfer == nullptr) {
    lender.take_back();
  }
  auto work = c10::make_intrusive<Collective>(stream, std::move(tensors), outputs);
  work->set_transfer(std::move(transfer));
  return work;
}

WorkPtr CollectivesBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  bool is_source = getRank() == options.rootRank;
  return run("broadcast", is_source ? tensors : Tensors{}, is_source ? Tensors{} : tensors, [&](Lender& lend) {
    auto list = lend(tensors);
    wait_for_gloo(gloo_->broadcast(list, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run("allreduce", {}, tensors, [&](Lender& lend) {
    auto list = lend(tensors);
    auto sum = options;
    bool is_average = replace_average(sum.reduceOp);
    wait_for_gloo(gloo_->allreduce(list, sum));
    for (auto& tensor : list) {
      if (is_average) {
        tensor.div_(getSize());
      }
    }
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  c10d::AllreduceOptions one;
  one.reduceOp = options.reduceOp;
  WorkPtr work;
  for (const auto& tensor : tensors) {
    Tensors list{tensor};
    work = allreduce(list, one);
  }
  return work;
}

WorkPtr CollectivesBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run("reduce", {}, tensors, [&](Lender& lend) {
    auto list = lend(tensors);
    auto sum = options;
    bool is_average = replace_average(sum.reduceOp);
    wait_for_gloo(gloo_->reduce(list, sum));
    if (is_average && getRank() == options.rootRank) {
      list[0].div_(getSize());
    }
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run("allgather", inputs, flatten(outputs), [&](Lender& lend) {
    auto to = lend(outputs);
    auto from = lend(inputs);
    wait_for_gloo(gloo_->allgather(to, from, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return run("allgather_base", {input}, {output}, [&](Lender& lend) {
    auto to = lend(output).flatten();  // libraries rely on numbers of elements, gloo compares shapes
    auto from = lend(input).flatten();
    wait_for_gloo(gloo_->_allgather_base(to, from, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  WorkPtr work;
  for (size_t index = 0; index < outputs.size(); ++index) {
    work = _allgather_base(outputs[index], inputs[index], options);
  }
  return work;
}

WorkPtr CollectivesBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return run("gather", inputs, flatten(outputs), [&](Lender& lend) {
    auto to = lend(outputs);
    auto from = lend(inputs);
    wait_for_gloo(gloo_->gather(to, from, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  return run("scatter", flatten(inputs), outputs, [&](Lender& lend) {
    auto to = lend(outputs);
    auto from = lend(inputs);
    wait_for_gloo(gloo_->scatter(to, from, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::reduce_scatter(
    Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) {
  return run("reduce_scatter", flatten(inputs), outputs, [&](Lender& lend) {
    auto to = lend(outputs);
    auto from = lend(inputs);
    auto sum = options;
    bool is_average = replace_average(sum.reduceOp);
    wait_for_gloo(gloo_->reduce_scatter(to, from, sum));
    for (auto& tensor : to) {
      if (is_average) {
        tensor.div_(getSize());
      }
    }
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::_reduce_scatter_base(
    Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  return run("reduce_scatter_base", {input}, {output}, [&](Lender& lend) {
    auto to = lend(output).flatten();
    auto from = lend(input).flatten();
    auto sum = options;
    bool is_average = replace_average(sum.reduceOp);
    wait_for_gloo(gloo_->_reduce_scatter_base(to, from, sum));
    if (is_average) {
      to.div_(getSize());
    }
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  WorkPtr work;
  for (size_t index = 0; index < outputs.size(); ++index) {
    work = _reduce_scatter_base(outputs[index], inputs[index], options);
  }
  return work;
}

WorkPtr CollectivesBackend::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  return run("alltoall_base", {input}, {output}, [&](Lender& lend) {
    auto to = lend(output);
    auto from = lend(input);
    wait_for_gloo(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return run("alltoall", inputs, outputs, [&](Lender& lend) {
    auto to = lend(outputs);
    auto from = lend(inputs);
    wait_for_gloo(gloo_->alltoall(to, from, options));
    return WorkPtr();
  });
}

WorkPtr CollectivesBackend::send(Tensors& tensors, int rank, int tag) {
  return run("send", tensors, {}, [&](Lender& lend) {
    auto list = lend(tensors);
    return gloo_->send(list, rank, tag);
  });
}

WorkPtr CollectivesBackend::recv(Tensors& tensors, int rank, int tag) {
  return run("recv", {}, tensors, [&](Lender& lend) {
    auto list = lend(tensors);
    return gloo_->recv(list, rank, tag);
  });
}

// As with nccl, the host waits for the current stream, because a barrier is a collective on the device.
WorkPtr CollectivesBackend::barrier(const c10d::BarrierOptions& options) {
  report_host_wait("barrier");
  make_host_wait(clock_of(current_stream(current_device())));
  c10d::BarrierOptions without_device;
  without_device.timeout = options.timeout;
  auto work = gloo_->barrier(without_device);
  wait_for_gloo(work);
  return work;
}

}  // namespace sim
