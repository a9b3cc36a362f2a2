#include "accesses.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "memory.h"

namespace sim {
namespace {

// Bounds the time per operation. Older accesses are forgotten, so races with them are not found.
constexpr size_t kMaxAccesses = 512;

std::string describe(const Access& access) {
  std::ostringstream text;
  text << access.op << " (" << (access.is_write ? "write" : "read") << ", " << access.end - access.begin << " bytes, "
       << name_of(access.launch.stream) << ")";
  return text.str();
}

bool overlap(const Access& one, const Access& other) {
  return one.begin < other.end && other.begin < one.end;
}

bool is_race(const Access& earlier, const Access& later) {
  return (earlier.is_write || later.is_write) && overlap(earlier, later) &&
      !is_ordered(earlier.launch, later.launch.stream);
}

// Whether an access that is ordered after `later` is also ordered after `earlier`, and conflicts with `later` if it
// conflicts with `earlier`.
bool replaces(const Access& later, const Access& earlier) {
  return later.begin <= earlier.begin && earlier.end <= later.end &&
      (later.is_write || (!earlier.is_write && earlier.launch.stream == later.launch.stream)) &&
      is_ordered(earlier.launch, later.launch.stream);
}

Finding finding_of(const Access& earlier, const Access& later) {
  if (earlier.before_free) {
    return {
        "freed", describe(later) + " uses memory that was freed while another stream may still use it in " +
            describe(earlier) + ": the memory belongs to the first stream; call record_stream before it is freed"};
  }
  return {
      "race", describe(later) + " is not ordered after " + describe(earlier) +
          ": no event, wait_stream, wait() of a collective or synchronize between them"};
}

}  // namespace

Operation::Operation(const StreamKey& stream, std::string name)
    : launch_(sim::launch(stream)), name_(std::move(name)) {}

Operation::~Operation() {
  report(findings_);
}

void Operation::add(const at::Tensor& tensor, bool is_write) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
    return;
  }
  auto [begin, end] = address_range(tensor);
  Access access{launch_, begin, end, is_write, name_};
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  Block* block = find_block(reinterpret_cast<void*>(begin));
  if (block == nullptr) {
    return;
  }
  auto& accesses = block->accesses;
  for (const auto& earlier : accesses) {
    if (is_race(earlier, access)) {
      findings_.push_back(finding_of(earlier, access));
    }
  }
  auto is_obsolete = [&](const Access& earlier) {
    return earlier.before_free ? is_race(earlier, access) || is_ordered(earlier.launch, launch_.stream)
                               : replaces(access, earlier) || host_has_waited(earlier.launch);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_obsolete), accesses.end());
  if (accesses.size() >= kMaxAccesses) {
    accesses.erase(accesses.begin());
  }
  accesses.push_back(std::move(access));
}

std::pair<uintptr_t, uintptr_t> address_range(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

}  // namespace sim
