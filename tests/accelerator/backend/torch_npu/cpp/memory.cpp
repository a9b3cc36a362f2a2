#include "memory.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <map>
#include <sstream>

#include "device.h"
#include "late_copies.h"

namespace sim {
namespace {

constexpr size_t kRounding = 512;  // as the caching allocator of torch.cuda rounds

// Memory that was freed before the operations on it were finished.
struct Freed {
  size_t size;
  std::vector<Access> accesses;
};

constexpr size_t kMaxFreed = 1000;

MemoryStats stats[kMaxDevices];
std::map<uintptr_t, Block*> blocks;
std::map<StreamKey, std::vector<Freed>> freed;

size_t rounded(size_t size) {
  return (size + kRounding - 1) / kRounding * kRounding;
}

std::string format_size(int64_t num_bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (num_bytes < (1 << 20)) {
    text << num_bytes / 1024.0 << " KiB";
  } else if (num_bytes < (1 << 30)) {
    text << num_bytes / 1048576.0 << " MiB";
  } else {
    text << num_bytes / 1073741824.0 << " GiB";
  }
  return text.str();
}

std::string out_of_memory_message(int device, int64_t num_bytes, const MemoryStats& now) {
  std::string name = c10::get_privateuse1_backend();
  std::transform(name.begin(), name.end(), name.begin(), ::toupper);
  std::ostringstream text;
  text << name << " out of memory. Tried to allocate " << format_size(num_bytes) << ". " << name << " " << device
       << " has a total capacity of " << format_size(now.limit) << " of which "
       << format_size(std::max<int64_t>(0, now.limit - now.allocated)) << " is free. Of the allocated memory "
       << format_size(now.allocated) << " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.";
  return text.str();
}

void count_allocation(int device, int64_t num_bytes) {
  std::string error;
  {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    auto& now = stats[device];
    if (now.allocated + num_bytes > now.limit) {
      now.num_ooms++;
      error = out_of_memory_message(device, num_bytes, now);
    } else {
      now.allocated += num_bytes;
      now.peak = std::max(now.peak, now.allocated);
      now.num_allocations += num_bytes > 0;
    }
  }
  TORCH_CHECK_WITH(OutOfMemoryError, error.empty(), error);
}

void remove_block(Block* block) {
  auto found = blocks.find(block->begin);
  if (found != blocks.end() && found->second == block) {
    blocks.erase(found);
  }
  delete block;
}

// The operations that the next owner of the memory does not come after by itself: other streams than the block's
// started them, the block's stream has not waited for them, and no stream passed to record_stream has.
std::vector<Access> unfinished_accesses(const Block& block) {
  std::vector<Access> unfinished;
  for (const auto& access : block.accesses) {
    bool finished = is_ordered(access.launch, block.stream);
    for (const auto& stream : block.recorded) {
      finished = finished || is_ordered(access.launch, stream);
    }
    if (!finished) {
      unfinished.push_back(access);
      unfinished.back().before_free = true;
    }
  }
  return unfinished;
}

void remember_freed(const Block& block) {
  auto accesses = unfinished_accesses(block);
  if (!accesses.empty()) {
    auto& list = freed[block.stream];
    if (list.size() >= kMaxFreed) {
      list.erase(list.begin());
    }
    list.push_back({rounded(block.size), std::move(accesses)});
  }
}

bool is_small(size_t size) {
  return size <= (1 << 20);  // the caching allocator has one pool for these, and another one
}

// The allocator gives memory to the next fitting allocation on its stream, here the smallest that fits. The operations
// on it before the free are then operations on the new block, so that one which does not come after them is found.
void inherit_accesses(Block& block) {
  auto& list = freed[block.stream];
  auto is_finished = [&](const Freed& memory) {
    return std::all_of(memory.accesses.begin(), memory.accesses.end(), [&](const Access& access) {
      return is_ordered(access.launch, block.stream);
    });
  };
  list.erase(std::remove_if(list.begin(), list.end(), is_finished), list.end());
  auto best = list.end();
  for (auto memory = list.begin(); memory != list.end(); ++memory) {
    bool fits = memory->size >= block.size && is_small(memory->size) == is_small(block.size);
    if (fits && (best == list.end() || memory->size < best->size)) {
      best = memory;
    }
  }
  if (best != list.end()) {
    block.accesses = std::move(best->accesses);
    for (auto& access : block.accesses) {
      access.begin = block.begin;
      access.end = block.begin + block.size;
    }
    list.erase(best);
  }
}

Block* add_block(void* address, size_t size, int device) {
  auto begin = reinterpret_cast<uintptr_t>(address);
  StreamKey stream = device == kPinned ? StreamKey{kPinned, 0} : current_stream(device);
  auto* block = new Block{begin, size, device, stream, {}, {}};
  if (size > 0) {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    blocks.emplace(begin, block);
    if (device != kPinned) {
      inherit_accesses(*block);
    }
  }
  return block;
}

void free_device_memory(void* context) {
  auto* block = static_cast<Block*>(context);
  auto* address = reinterpret_cast<void*>(block->begin);
  release_memory(block);
  std::free(address);
}

void free_pinned_memory(void* context) {
  auto* block = static_cast<Block*>(context);
  auto* address = reinterpret_cast<void*>(block->begin);
  {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    remove_block(block);
  }
  std::free(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    initialize();
    int device = current_device();
    count_allocation(device, static_cast<int64_t>(rounded(size)));
    void* address = size > 0 ? std::aligned_alloc(kRounding, rounded(size)) : nullptr;
    Block* block = add_block(address, size, device);
    return {address, block, &free_device_memory, c10::Device(c10::DeviceType::PrivateUse1, device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    size_t num_bytes = std::max<size_t>(size, 1);  // an empty tensor can be pinned too
    void* address = std::aligned_alloc(kRounding, rounded(num_bytes));
    Block* block = add_block(address, num_bytes, kPinned);
    return {address, block, &free_pinned_memory, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

Block* find_block(const void* address) {
  auto value = reinterpret_cast<uintptr_t>(address);
  auto next = blocks.upper_bound(value);
  if (next == blocks.begin()) {
    return nullptr;
  }
  Block* block = std::prev(next)->second;
  return value < block->begin + block->size ? block : nullptr;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  Block* block = find_block(address);
  return block != nullptr && block->device == kPinned;
}

void record_stream(const void* address, const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  if (Block* block = find_block(address)) {
    block->recorded.insert(stream);
  }
}

Block* adopt_memory(void* address, size_t size, int device) {
  count_allocation(device, static_cast<int64_t>(rounded(size)));
  return add_block(address, size, device);
}

void release_memory(Block* block) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  remember_freed(*block);
  auto& now = stats[block->device];
  now.allocated -= static_cast<int64_t>(rounded(block->size));
  now.num_frees += block->size > 0;
  remove_block(block);
}

bool pin_memory(uintptr_t address, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  auto* begin = reinterpret_cast<void*>(address);
  if (size == 0 || find_block(begin) != nullptr || find_block(reinterpret_cast<void*>(address + size - 1)) != nullptr) {
    return false;
  }
  add_block(begin, size, kPinned);
  return true;
}

bool unpin_memory(uintptr_t address) {
  Findings findings;
  {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    auto found = blocks.find(address);
    if (found == blocks.end() || found->second->device != kPinned) {
      return false;
    }
    Block* block = found->second;
    if (has_late_copy(block->begin, block->begin + block->size)) {
      findings.push_back(
          {"unpinned", std::to_string(block->size) + " bytes are unpinned before a copy of them is complete"});
    }
    remove_block(block);
  }
  report(findings);
  return true;
}

MemoryStats memory_stats(int device) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return stats[device];
}

void reset_peak(int device) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  stats[device].peak = stats[device].allocated;
}

void set_memory_limit(int device, int64_t num_bytes) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  stats[device].limit = num_bytes;
}

}  // namespace sim
