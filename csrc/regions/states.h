// The states of a region, and the policies for its contents. csrc/preload has the numbers of policies, Python the
// names. No other file defines them.
#pragma once

#include <array>
#include <cstddef>

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

}  // namespace memsaver
