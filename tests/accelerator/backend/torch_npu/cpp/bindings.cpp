// The functions that the Python package torch_npu calls.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "findings.h"
#include "late_copies.h"
#include "memory.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::register_device();

  m.def("set_num_devices", &sim::set_num_devices);
  m.def("num_devices", &sim::num_devices);
  m.def("set_current_device", &sim::set_current_device);
  m.def("current_device", &sim::current_device);
  m.def("initialize", &sim::initialize);
  m.def("is_initialized", &sim::is_initialized);
  m.def("is_in_bad_fork", &sim::is_in_bad_fork);
  m.def("default_generator", &sim::default_generator);

  py::class_<sim::MemoryStats>(m, "MemoryStats")
      .def_readonly("allocated", &sim::MemoryStats::allocated)
      .def_readonly("peak", &sim::MemoryStats::peak)
      .def_readonly("limit", &sim::MemoryStats::limit)
      .def_readonly("num_allocations", &sim::MemoryStats::num_allocations)
      .def_readonly("num_frees", &sim::MemoryStats::num_frees)
      .def_readonly("num_ooms", &sim::MemoryStats::num_ooms);
  m.def("memory_stats", &sim::memory_stats);
  m.def("reset_peak", &sim::reset_peak);
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("pin_memory", &sim::pin_memory);
  m.def("unpin_memory", &sim::unpin_memory);
  m.def("num_late_copies", &sim::num_late_copies);

  m.def("set_finding_callback", [](py::object function) { sim::set_finding_callback(function.ptr()); });
  m.def("set_host_wait_callback", [](py::object function) { sim::set_host_wait_callback(function.ptr()); });

  py::class_<sim::CollectivesBackend, c10::intrusive_ptr<sim::CollectivesBackend>, c10d::Backend>(
      m, "CollectivesBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, std::string>());
}
