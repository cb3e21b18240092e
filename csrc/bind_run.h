// What the files that bind the core share: addresses, and calls without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <new>

#include "abi.h"

namespace nb = nanobind;

namespace qkv {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

extern unsigned long main_thread;  // that handles signals, as Python names it

void bind_linear(nb::module_&);
void bind_beside(nb::module_&);

// Before 3.14, Python ends a thread that asks for the GIL when the interpreter is gone. That cannot end well among C++
// frames, so the thread rests here until the process is gone too.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) pause();
  }
}

// Runs in the thread that called, which gave its GIL away and put its state here.
inline int32_t ask_python(void* context) {
  auto& state = *static_cast<PyThreadState**>(context);
  take_gil(state);
  const int raised = PyErr_CheckSignals();
  state = PyEval_SaveThread();
  return raised;
}

// Compute without the GIL; the error of a call that ended early is Python's.
template <class Compute>
void run(int32_t threads, Compute compute) {
  PyThreadState* state = PyEval_SaveThread();
  const bool asks = PyThread_get_thread_ident() == main_thread;
  const Status status = compute(Run{threads, asks ? ask_python : nullptr, &state});
  take_gil(state);
  if (status == Status::interrupted) nb::raise_python_error();
  if (status == Status::out_of_memory) throw std::bad_alloc();
}

}  // namespace qkv
