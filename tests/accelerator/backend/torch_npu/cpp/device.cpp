#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "memory.h"

namespace sim {
namespace {

int count = 1;
std::atomic<bool> initialized{false};
std::atomic<bool> bad_fork{false};
thread_local int current = 0;
thread_local c10::StreamId current_streams[kMaxDevices] = {};
std::atomic<c10::StreamId> next_stream{1};

int index_of(const c10::Device& device) {
  return device.index() < 0 ? current : device.index();
}

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

int64_t event_number(void* event) {
  return reinterpret_cast<int64_t>(event);
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;

  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return c10::Device(kSim, current);
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(count);
  }

  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  // Work is complete when it is asked for; this is how the host learns that it is.
  bool queryStream(const c10::Stream& stream) const override {
    make_host_wait(clock_of(key_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    report_host_wait("stream.synchronize");
    make_host_wait(clock_of(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    report_host_wait("device.synchronize");
    make_host_wait_for_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    initialize();
    if (*event != nullptr) {
      destroy_event(event_number(*event));
    }
    *event = reinterpret_cast<void*>(record_event(key_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    make_stream_wait(key_of(stream), clock_of_event(event_number(event)));
  }
  bool queryEvent(void* event) const override {
    make_host_wait(clock_of_event(event_number(event)));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    report_host_wait("event.synchronize");
    make_host_wait(clock_of_event(event_number(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    destroy_event(event_number(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return milliseconds_between(event_number(first), event_number(second));
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory.get(), key_of(stream));
  }
};

// CPU kernels draw from a CPU generator, so a generator of the device has one of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(seed)) {}

  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return cpu.current_seed();
  }
  uint64_t seed() override {
    return cpu.seed();
  }
  void set_offset(uint64_t offset) override {
    cpu.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return cpu.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->set_state(*get_state());
    return copy;
  }

  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
    initialize();
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return initialized;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(count);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = getCurrentDevice();
    if (device >= 0) {
      set_current_device(device);
    }
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    Block* block = find_block(address);
    return c10::Device(kSim, block != nullptr && block->device != kPinned ? block->device : current);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = device_allocator()->allocate(size);
    size_t num_kept = std::min(size, storage.nbytes());
    if (num_kept > 0 && storage.data() != nullptr) {
      std::memcpy(memory.get(), storage.data(), num_kept);
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};

}  // namespace

int num_devices() {
  return count;
}

void set_num_devices(int num) {
  count = num;
}

int current_device() {
  return current;
}

void set_current_device(int index) {
  TORCH_CHECK(
      index >= 0 && index < count, "invalid device ordinal: ", index, ". This process sees ", count,
      " devices of type ", c10::get_privateuse1_backend(), ".");
  current = index;
}

StreamKey current_stream(int device) {
  return {device, current_streams[device]};
}

c10::Stream new_stream(int device) {
  initialize();
  return stream_of(device, next_stream++);
}

void initialize() {
  TORCH_CHECK(
      !bad_fork, "Cannot re-initialize ", c10::get_privateuse1_backend(),
      " in forked subprocess. To use it with multiprocessing, you must use the 'spawn' start method");
  initialized = true;
}

bool is_initialized() {
  return initialized && !bad_fork;
}

bool is_in_bad_fork() {
  return bad_fork;
}

const at::Generator& default_generator(int device) {
  static const auto generators = [] {
    std::vector<at::Generator> all;
    for (int index = 0; index < kMaxDevices; ++index) {
      all.push_back(at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(index)));
    }
    return all;
  }();
  return generators.at(device < 0 ? current : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

void register_device() {
  static Hooks hooks;
  c10::SetAllocator(kSim, device_allocator());
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, [] { bad_fork = initialized.load(); });
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

}  // namespace sim
