// Small wrong changes, each of which a test must find. `make mutants` builds all of them and selects one at a time by
// the variable MEMSAVER_TEST_MUTANT. In other builds a mutant is the constant false, or holds no mutex.
// tests/mutants.py has the table.
#pragma once

#ifdef MEMSAVER_MUTANTS

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace memsaver {

inline bool mutant_named(const char* name) {
  const char* chosen = std::getenv("MEMSAVER_TEST_MUTANT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}

}  // namespace memsaver

// The variable is read once at each place.
#define MEMSAVER_MUTANT(name)                               \
  ([] {                                                     \
    static const bool on = ::memsaver::mutant_named(#name); \
    return on;                                              \
  }())

// The mutex is held to the end of the scope.
#define MEMSAVER_MUTANT_HOLDS(name, held) \
  const auto name = MEMSAVER_MUTANT(name) ? std::unique_lock(held) : std::unique_lock<std::mutex>()

#else

#define MEMSAVER_MUTANT(name) false
#define MEMSAVER_MUTANT_HOLDS(name, held) static_cast<void>(0)

#endif
