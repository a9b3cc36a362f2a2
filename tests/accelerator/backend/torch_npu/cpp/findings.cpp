#include "findings.h"

#include <atomic>

namespace sim {
namespace {

class Callback {
 public:
  void set(PyObject* function) {
    PyObject* old = function_.exchange(function == Py_None ? nullptr : Py_NewRef(function));
    Py_XDECREF(old);
  }

  bool is_set() const {
    return function_.load() != nullptr;
  }

  template <typename... Arguments>
  void call(const char* format, Arguments... arguments) {
    // Memory is also freed while the interpreter ends, when no Python code can run.
    if (!is_set() || !Py_IsInitialized()) {
      return;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    // The call may be made while an exception is on its way, for example from a destructor.
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (PyObject* function = Py_XNewRef(function_.load())) {
      PyObject* result = PyObject_CallFunction(function, format, arguments...);
      if (result == nullptr) {
        PyErr_WriteUnraisable(function);
      }
      Py_XDECREF(result);
      Py_DECREF(function);
    }
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
  }

 private:
  std::atomic<PyObject*> function_{nullptr};
};

Callback finding_callback;
Callback host_wait_callback;

}  // namespace

void report(const Findings& findings) {
  for (const auto& finding : findings) {
    finding_callback.call("ss", finding.kind.c_str(), finding.text.c_str());
  }
}

void report_host_wait(const std::string& kind, int64_t num_bytes, const std::string& detail) {
  host_wait_callback.call("sLs", kind.c_str(), static_cast<long long>(num_bytes), detail.c_str());
}

void set_finding_callback(PyObject* function) {
  finding_callback.set(function);
}

void set_host_wait_callback(PyObject* function) {
  host_wait_callback.set(function);
}

}  // namespace sim
