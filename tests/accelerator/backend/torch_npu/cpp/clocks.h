// The order of the operations on streams, as torch/cuda/_sanitizer.py keeps it: each stream has a vector clock.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace sim {

using StreamKey = std::pair<int, c10::StreamId>;  // index of the device, stream
using Clock = std::map<StreamKey, int64_t>;       // number of the newest operation of each stream that is complete

// One operation. Numbers increase over all streams.
struct Launch {
  StreamKey stream;
  int64_t number;
};

// Guards clocks, events, the log of accesses, and late copies.
std::recursive_mutex& state_mutex();

StreamKey key_of(const c10::Stream& stream);
std::string name_of(const StreamKey& stream);

// Starts an operation. It comes after everything that the host has waited for.
Launch launch(const StreamKey& stream);
// What is complete when all operations that were started so far on the stream are complete.
Clock clock_of(const StreamKey& stream);

void make_stream_wait(const StreamKey& stream, const Clock& clock);
// Also completes the late copies that the host has now waited for.
void make_host_wait(const Clock& clock);
void make_host_wait_for_device(int device);

// Whether an operation that is started now on `stream` comes after `earlier`.
bool is_ordered(const Launch& earlier, const StreamKey& stream);
bool host_has_waited(const Launch& launch);

// Events are numbers, which fit into the pointers of torch's interface.
int64_t record_event(const StreamKey& stream);
void destroy_event(int64_t event);
Clock clock_of_event(int64_t event);
double milliseconds_between(int64_t first, int64_t second);

}  // namespace sim
