// The module, and the translation of errors of the core into Python exceptions.
#include <exception>

#include "bindings/bindings.h"

namespace memsaver {
namespace {

// make(kind, message, fields) of errors.py, which has the Python classes. Never freed: errors may be raised while the
// interpreter exits.
PyObject* make_error = nullptr;

void raise(const char* kind, const std::exception& error, const nb::dict& fields) {
  nb::object made = call(make_error, kind, error.what(), fields);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void translate_ours(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const BadArgument& error) {
    raise("ValueError", error, {});
  } catch (const ConfigError& error) {
    raise("ConfigError", error, error.option.empty() ? nb::dict() : dict_of("option", error.option));
  } catch (const BackupError& error) {
    raise("BackupError", error,
          dict_of("needed_bytes", error.needed_bytes, "held_bytes", error.held_bytes, "available_bytes",
                  error.available_bytes, "_of_pinned_memory", error.of_pinned_memory));
  } catch (const SameError& error) {
    raise("SameError", error,
          dict_of("block", error.block, "processes", error.differing, "_others_agree", error.others_agree));
  } catch (const RegionPausedError& error) {
    raise("RegionPausedError", error, dict_of("tag", error.tag, "state", error.state));
  } catch (const DriverError& error) {
    raise("DriverError", error, dict_of("call", error.call, "code", error.code, "detail", error.message));
  } catch (const OutOfMemoryError& error) {
    raise("OutOfMemoryError", error,
          dict_of("device", error.device, "needed_bytes", error.needed_bytes, "free_bytes", error.free_bytes,
                  "waited_s", error.waited_s, "unused", error.unused));
  } catch (const BrokerError& error) {
    raise("BrokerError", error, dict_of("path", error.path));
  } catch (const WaitTimeoutError& error) {
    raise("WaitTimeoutError", error, dict_of("stage", error.stage, "waited_s", error.waited_s));
  } catch (const AttachedError& error) {
    raise("AttachedError", error, dict_of("tag", error.tag, "holders", error.pids));
  } catch (const Error& error) {
    raise("Error", error, {});
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

}  // namespace memsaver

NB_MODULE(_core, module) {
  nanobind::set_leak_warnings(false);  // a region that is entered at exit is no leak, and the library must not print
  module.def("set_error_factory", [](nanobind::callable factory) { memsaver::make_error = factory.release().ptr(); });
  nanobind::register_exception_translator(memsaver::translate);
  memsaver::bind_process(module);
  memsaver::bind_regions(module);
  memsaver::bind_transitions(module);
  memsaver::bind_driver(module);
  memsaver::bind_pool(module);
  memsaver::bind_lending(module);
  memsaver::bind_broker(module);
}
