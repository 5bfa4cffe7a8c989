// Calls of Python in which a thread may end. Before Python 3.14 a thread that needs the GIL after the end of the
// interpreter has begun ends in pthread_exit(). That unwinds its stack, through destructors and through nanobind's
// handlers of all exceptions, so the process would abort. In these functions such a thread waits for the end of the
// process instead, as it does by itself in Python 3.14. The bindings call nothing else that takes the GIL or runs
// Python code; NoCollector (bindings.h) keeps the garbage collector from it.
#pragma once

// clang-format off
#include <Python.h>
// clang-format on

#ifdef __cplusplus
extern "C" {
#endif

void memsaver_restore_thread(PyThreadState* state);                // PyEval_RestoreThread()
PyGILState_STATE memsaver_ensure_gil(void);                        // PyGILState_Ensure()
int memsaver_check_signals(void);                                  // PyErr_CheckSignals()
PyObject* memsaver_call(PyObject* callable, PyObject* arguments);  // PyObject_CallObject()

#ifdef __cplusplus
}
#endif
