#include "bindings/bindings.h"

NB_MODULE(_core, module) {
  nanobind::set_leak_warnings(false);  // a region that is entered at exit is no leak, and the library must not print
  memsaver::bind_errors(module);
  memsaver::bind_process(module);
  memsaver::bind_regions(module);
  memsaver::bind_tagged(module);
  memsaver::bind_transitions(module);
  memsaver::bind_driver(module);
  memsaver::bind_pool(module);
  memsaver::bind_lending(module);
  memsaver::bind_broker(module);
}
