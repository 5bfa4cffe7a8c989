// Translates errors of the core into Python exceptions.
#include <nanobind/stl/string.h>

#include <exception>

#include "bindings/bindings.h"

namespace memsaver {
namespace {

// make(kind, message, fields) of errors.py, which has the Python classes. Never freed: errors may be raised while the
// interpreter exits.
PyObject* make_error = nullptr;

void raise(const char* kind, const std::exception& error, nb::dict fields) {
  nb::object made = call(make_error, kind, error.what(), fields);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void translate_ours(const std::exception_ptr& thrown) {
  nb::dict fields;
  try {
    std::rethrow_exception(thrown);
  } catch (const BadArgument& error) {
    raise("ValueError", error, fields);
  } catch (const ConfigError& error) {
    if (!error.option.empty()) fields["option"] = error.option;
    raise("ConfigError", error, fields);
  } catch (const BackupError& error) {
    fields["needed_bytes"] = error.needed_bytes;
    fields["held_bytes"] = error.held_bytes;
    fields["available_bytes"] = error.available_bytes;
    fields["_of_pinned_memory"] = error.of_pinned_memory;
    raise("BackupError", error, fields);
  } catch (const RegionPausedError& error) {
    fields["tag"] = error.tag;
    fields["state"] = error.state;
    raise("RegionPausedError", error, fields);
  } catch (const DriverError& error) {
    fields["call"] = error.call;
    fields["code"] = error.code;
    fields["detail"] = error.message;
    raise("DriverError", error, fields);
  } catch (const OutOfMemoryError& error) {
    fields["device"] = error.device;
    fields["needed_bytes"] = error.needed_bytes;
    fields["free_bytes"] = error.free_bytes;
    fields["waited_s"] = error.waited_s;
    nb::list unused;
    for (const NoCollector no_collector; const Unused& each : error.unused)
      unused.append(nb::make_tuple(each.pid, each.bytes, each.why));
    fields["unused"] = unused;
    raise("OutOfMemoryError", error, fields);
  } catch (const BrokerError& error) {
    fields["path"] = error.path;
    raise("BrokerError", error, fields);
  } catch (const WaitTimeoutError& error) {
    fields["stage"] = error.stage;
    fields["waited_s"] = error.waited_s;
    raise("WaitTimeoutError", error, fields);
  } catch (const AttachedError& error) {
    fields["tag"] = error.tag;
    fields["holders"] = error.pids;
    raise("AttachedError", error, fields);
  } catch (const Error& error) {
    raise("Error", error, fields);
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    translate_ours(thrown);
  } catch (nb::python_error& error) {  // for example Ctrl-C, which Python delivers when its code runs next: here
    error.restore();
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  module.def("set_error_factory", [](nb::callable factory) { make_error = factory.release().ptr(); });
  nb::register_exception_translator(translate);
}

}  // namespace memsaver
