#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "accesses.h"
#include "device.h"
#include "findings.h"
#include "tensors.h"

namespace sim {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// Operators whose result has a size that only the data determine: the host must read it from the device.
const std::set<std::string> kDataDependent = {
    "aten::nonzero",     "aten::masked_select",      "aten::_unique",  "aten::_unique2",
    "aten::unique_dim",  "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::repeat_interleave"};

// Operators that accept CPU tensors besides tensors of an accelerator, as they do for CUDA.
bool accepts_cpu_tensors(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 || name.rfind("aten::", 0) != 0;
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// The default generator of the device in place of the CPU's, for operators that have no argument for a generator.
class DefaultGeneratorOfDevice {
 public:
  explicit DefaultGeneratorOfDevice(int device)
      : device_(cpu_generator_of(default_generator(device))),
        cpu_(at::detail::getDefaultCPUGenerator()),
        saved_(cpu_.get_state()) {
    cpu_.set_state(device_.get_state());
  }
  ~DefaultGeneratorOfDevice() {
    device_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator device_, cpu_;
  at::Tensor saved_;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), device_(current_device()) {}

  void run() {
    find_device();
    Operation operation(current_stream(device_), schema_.name());
    convert_arguments(operation);
    if (depends_on_data()) {
      report_host_wait("size depends on data", 0, schema_.name());
      make_host_wait(clock_of(current_stream(device_)));
    }
    {
      std::optional<DefaultGeneratorOfDevice> generator;
      if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_argument_) {
        generator.emplace(device_);
      }
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    convert_results(operation);
    resize_arguments();
  }

 private:
  struct Converted {
    at::Tensor device, cpu;
  };

  c10::IValue& argument(size_t index) {
    return (*stack_)[stack_->size() - schema_.arguments().size() + index];
  }

  template <typename Function>
  static void for_each_tensor(const c10::IValue& value, Function function) {
    if (value.isTensor()) {
      function(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        function(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor.has_value()) {
          function(*tensor);
        }
      }
    }
  }

  // The device of the tensors, or the one that a factory is called with.
  void find_device() {
    std::optional<c10::Device> found;
    bool has_cpu_tensor = false;
    for (size_t index = 0; index < schema_.arguments().size(); ++index) {
      const auto& value = argument(index);
      if (value.isDevice() && value.toDevice().type() == kSim && value.toDevice().index() >= 0) {
        device_ = value.toDevice().index();
      }
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_on_device(tensor)) {
          check_same_device(found.value_or(tensor.device()), tensor.device());
          found = tensor.device();
        } else if (tensor.defined() && tensor.dim() > 0 && tensor.device().is_cpu()) {
          has_cpu_tensor = true;
        }
      });
    }
    if (found.has_value()) {
      device_ = found->index();
      if (has_cpu_tensor && !accepts_cpu_tensors(schema_.name())) {
        check_same_device(*found, c10::Device(c10::kCPU));
      }
    }
  }

  void check_same_device(c10::Device one, c10::Device other) {
    TORCH_CHECK(
        one == other, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
        other, "! (in ", schema_.name(), ")");
  }

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!is_on_device(tensor)) {
      return tensor;
    }
    for (const auto& converted : converted_) {
      if (converted.device.is_same(tensor)) {
        return converted.cpu;
      }
    }
    converted_.push_back({tensor, cpu_alias(tensor)});
    return converted_.back().cpu;
  }

  void convert_arguments(Operation& operation) {
    for (size_t index = 0; index < schema_.arguments().size(); ++index) {
      const auto& declared = schema_.arguments()[index];
      auto& value = argument(index);
      note_accesses(operation, declared, value);
      if (value.isTensor()) {
        value = to_cpu(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for_each_tensor(value, [&](const at::Tensor& tensor) { list.push_back(to_cpu(tensor)); });
        value = c10::IValue(c10::List<at::Tensor>(list));
      } else if (value.isOptionalTensorList()) {
        OptionalTensors list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
          list.push_back(tensor.has_value() ? std::optional<at::Tensor>(to_cpu(*tensor)) : std::nullopt);
          has_mask_ |= tensor.has_value() && tensor->defined() && is_mask(*tensor);
        }
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == kSim) {
        value = c10::IValue(c10::Device(c10::kCPU));
      } else if (declared.name() == "generator") {
        has_generator_argument_ = true;
        auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device_);
        value = generator.device().type() == kSim ? cpu_generator_of(generator) : generator;
      }
    }
  }

  // A view of an argument does not use its memory.
  static void note_accesses(Operation& operation, const c10::Argument& declared, const c10::IValue& value) {
    const auto* alias = declared.alias_info();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (alias == nullptr) {
        operation.reads(tensor);
      } else if (alias->isWrite()) {
        operation.writes(tensor);
      }
    });
  }

  bool depends_on_data() {
    const auto& name = schema_.name();
    if (name == "aten::repeat_interleave" && !argument(schema_.arguments().size() - 1).isNone()) {
      return false;  // the size is passed as output_size
    }
    return kDataDependent.count(name) > 0 || (has_mask_ && name.rfind("aten::index", 0) == 0);
  }

  at::Tensor to_device(Operation& operation, const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    for (const auto& converted : converted_) {
      if (converted.cpu.is_same(tensor)) {
        copy_shape(converted);
        return converted.device;
      }
    }
    for (const auto& converted : converted_) {
      if (shares_storage(converted.cpu, tensor)) {
        return device_tensor(converted.device.storage(), tensor);  // a view of an argument
      }
    }
    auto result = adopt(tensor, device_);
    operation.writes(result);
    converted_.push_back({result, tensor});
    return result;
  }

  static bool shares_storage(const at::Tensor& one, const at::Tensor& other) {
    return other.has_storage() && one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
  }

  // Out-of-place results with out=, and in-place operators, can change the shape and the memory of an argument.
  static void copy_shape(const Converted& converted) {
    const auto& [device, cpu] = converted;
    if (cpu.storage().data() != device.storage().data() || cpu.storage().nbytes() != device.storage().nbytes()) {
      auto fresh = adopt(cpu, device.device().index());
      replace_memory(device.storage(), fresh.storage());
    }
    if (cpu.sizes() != device.sizes() || cpu.strides() != device.strides()) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  void convert_results(Operation& operation) {
    num_arguments_ = converted_.size();
    const auto num_results = schema_.returns().size();
    for (size_t index = stack_->size() - num_results; index < stack_->size(); ++index) {
      auto& value = (*stack_)[index];
      if (value.isTensor()) {
        value = to_device(operation, value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for_each_tensor(value, [&](const at::Tensor& tensor) { list.push_back(to_device(operation, tensor)); });
        value = c10::IValue(c10::List<at::Tensor>(list));
      }
    }
  }

  // An argument that was resized but is not returned, as in operators on lists.
  void resize_arguments() {
    for (size_t index = 0; index < num_arguments_; ++index) {
      if (converted_[index].cpu.has_storage()) {
        copy_shape(converted_[index]);
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  int device_;
  std::vector<Converted> converted_;
  size_t num_arguments_ = 0;
  bool has_mask_ = false;
  bool has_generator_argument_ = false;
};

}  // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

}  // namespace sim
