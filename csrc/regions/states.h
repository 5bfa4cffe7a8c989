// The states of a region, and the policies for its contents. The numbers are sent to the broker, the names to Python.
// No other file defines them.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "base/errors.h"

namespace memsaver {

// `draining`: a transition has marked the region and may still abort. Its public name is "pausing".
enum class State { active, pausing, paused, resuming, lost, draining };
inline constexpr std::array kStateNames = {"active", "pausing", "paused", "resuming", "lost", "pausing"};

enum class Policy { none, host, disk };
inline constexpr std::array kPolicyNames = {"none", "host", "disk"};

// The value of memory without contents. `clean`: zero in place of bytes of other processes. `zero`, `poison`: also a
// resume without contents writes it, to all memory. `keep`: nothing is written.
enum class Fill { clean, zero, poison, keep };
inline constexpr std::array kFillNames = {"clean", "zero", "poison", "keep"};

inline const char* name_of(State state) { return kStateNames.at(static_cast<std::size_t>(state)); }
inline const char* name_of(Policy policy) { return kPolicyNames.at(static_cast<std::size_t>(policy)); }
inline const char* name_of(Fill fill) { return kFillNames.at(static_cast<std::size_t>(fill)); }

// The value of an option by its name. Throws BadArgument.
template <typename Choice, std::size_t count>
Choice chosen(const char* option, const std::string& name, const std::array<const char*, count>& names) {
  std::string expected;
  for (std::size_t number = 0; number < count; ++number) {
    if (name == names[number]) return static_cast<Choice>(number);
    expected += std::string(number == 0 ? "" : number + 1 < count ? ", " : " or ") + "'" + names[number] + "'";
  }
  throw BadArgument(std::string(option) + " is '" + name + "', expected " + expected);
}
inline Policy policy_of(const std::string& name) { return chosen<Policy>("backup", name, kPolicyNames); }
inline Fill fill_of(const std::string& name) { return chosen<Fill>("fill", name, kFillNames); }

}  // namespace memsaver
