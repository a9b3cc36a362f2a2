// Device memory and pinned memory: both are host memory. Each block has a log of the operations that used it.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "clocks.h"
#include "findings.h"

namespace sim {

constexpr int kMaxDevices = 16;
constexpr int kPinned = -1;  // in place of the index of a device

struct Access {
  Launch launch;
  uintptr_t begin, end;
  bool is_write;
  std::string op;
  bool before_free = false;  // an operation on the tensor that had the memory before
};

struct Block {
  uintptr_t begin;
  size_t size;
  int device;
  StreamKey stream;  // the allocator gives a freed block to the next allocation on this stream
  std::vector<Access> accesses;
  std::set<StreamKey> recorded;  // streams passed to record_stream, whose work so far the allocator waits for
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// The block that contains an address; nullptr if there is none. The caller holds `state_mutex()` while it uses it.
Block* find_block(const void* address);
bool is_pinned(const void* address);
void record_stream(const void* address, const StreamKey& stream);

// Adds memory that a CPU operator has allocated to the memory of a device, until `release` is called.
// Throws c10::OutOfMemoryError above the limit of the device.
Block* adopt_memory(void* address, size_t size, int device);
void release_memory(Block* block);

// Page-locks existing memory. Both return false where the driver would return an error.
bool pin_memory(uintptr_t address, size_t size);
bool unpin_memory(uintptr_t address);

struct MemoryStats {
  int64_t allocated = 0, peak = 0, limit = int64_t{8} << 30;
  int64_t num_allocations = 0, num_frees = 0, num_ooms = 0;
};
MemoryStats memory_stats(int device);
void reset_peak(int device);
void set_memory_limit(int device, int64_t num_bytes);

}  // namespace sim
