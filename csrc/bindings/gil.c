// C without exceptions: there glibc's pthread_cleanup_push() jumps to the handler, so that no frame above it is
// unwound. In C++ the handler would be a destructor, which another unwinder than glibc's cannot run, as that of the
// wheels.
#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

#ifdef __EXCEPTIONS
#error "compile this file without exceptions: pthread_cleanup_push() would unwind the frames of the caller"
#endif

static void wait_for_the_end(void* unused) {
  (void)unused;
  for (;;) pause();
}

void memsaver_restore_thread(PyThreadState* state) {
  pthread_cleanup_push(wait_for_the_end, NULL);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}

PyGILState_STATE memsaver_ensure_gil(void) {
  PyGILState_STATE state;
  pthread_cleanup_push(wait_for_the_end, NULL);
  state = PyGILState_Ensure();
  pthread_cleanup_pop(0);
  return state;
}

int memsaver_check_signals(void) {
  int status;
  pthread_cleanup_push(wait_for_the_end, NULL);
  status = PyErr_CheckSignals();
  pthread_cleanup_pop(0);
  return status;
}

PyObject* memsaver_call(PyObject* callable, PyObject* arguments) {
  PyObject* result;
  pthread_cleanup_push(wait_for_the_end, NULL);
  result = PyObject_CallObject(callable, arguments);
  pthread_cleanup_pop(0);
  return result;
}
