#include "clocks.h"

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <chrono>

#include "late_copies.h"

namespace sim {
namespace {

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

std::map<StreamKey, Clock> stream_clocks;
std::map<int64_t, Event> events;
// One clock for all threads: a thread that goes on after another thread has waited is ordered after it by the program.
Clock host_clock;
int64_t next_number = 1;
int64_t next_event = 1;

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    auto& own = clock[stream];
    own = std::max(own, number);
  }
}

bool contains(const Clock& clock, const Launch& launch) {
  auto found = clock.find(launch.stream);
  return found != clock.end() && found->second >= launch.number;
}

}  // namespace

std::recursive_mutex& state_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

std::string name_of(const StreamKey& stream) {
  return "stream " + std::to_string(stream.second) + " of " + c10::get_privateuse1_backend() + ":" +
      std::to_string(stream.first);
}

Launch launch(const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  auto& clock = stream_clocks[stream];
  merge(clock, host_clock);
  clock[stream] = next_number;
  return {stream, next_number++};
}

Clock clock_of(const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return stream_clocks[stream];
}

void make_stream_wait(const StreamKey& stream, const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  merge(stream_clocks[stream], clock);
}

void make_host_wait(const Clock& clock) {
  {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    merge(host_clock, clock);
  }
  complete_late_copies();
}

void make_host_wait_for_device(int device) {
  {
    std::lock_guard<std::recursive_mutex> lock(state_mutex());
    for (const auto& [stream, clock] : stream_clocks) {
      if (stream.first == device) {
        merge(host_clock, clock);
      }
    }
  }
  complete_late_copies();
}

bool is_ordered(const Launch& earlier, const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return earlier.stream == stream || contains(host_clock, earlier) || contains(stream_clocks[stream], earlier);
}

bool host_has_waited(const Launch& launch) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return contains(host_clock, launch);
}

int64_t record_event(const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  events[next_event] = {stream_clocks[stream], std::chrono::steady_clock::now()};
  return next_event++;
}

void destroy_event(int64_t event) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  events.erase(event);
}

Clock clock_of_event(int64_t event) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  auto found = events.find(event);
  return found == events.end() ? Clock{} : found->second.clock;  // an event that was never recorded is complete
}

double milliseconds_between(int64_t first, int64_t second) {
  std::lock_guard<std::recursive_mutex> lock(state_mutex());
  return std::chrono::duration<double, std::milli>(events[second].time - events[first].time).count();
}

}  // namespace sim
