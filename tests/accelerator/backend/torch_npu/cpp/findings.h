// What the device reports to Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sim {

// A use of the device that is wrong on a real one.
struct Finding {
  std::string kind;
  std::string text;
};
using Findings = std::vector<Finding>;

// Both functions take the GIL, so the caller must not hold `state_mutex()`: another thread may hold the GIL and wait
// for that mutex.
void report(const Findings& findings);
void report_host_wait(const std::string& kind, int64_t num_bytes = 0, const std::string& detail = "");

// Python functions (kind, text) and (kind, num_bytes, detail); None switches the reports off.
void set_finding_callback(PyObject* function);
void set_host_wait_callback(PyObject* function);

}  // namespace sim
