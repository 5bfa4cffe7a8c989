// What a region can be in, and what becomes of its contents. The numbers go to the broker, the names to Python: this is
// the one place of both.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace memsaver {

enum class State { active, pausing, paused, resuming, lost };
inline constexpr std::array kStateNames = {"active", "pausing", "paused", "resuming", "lost"};

enum class Policy { none, host, disk };
inline constexpr std::array kPolicyNames = {"none", "host", "disk"};

enum class Fill { nothing, zero, poison };  // what a resume writes where it brings no contents
inline constexpr std::array kFillNames = {"nothing", "zero", "poison"};

inline const char* name_of(State state) { return kStateNames.at(static_cast<std::size_t>(state)); }
inline const char* name_of(Policy policy) { return kPolicyNames.at(static_cast<std::size_t>(policy)); }
inline const char* name_of(Fill fill) { return kFillNames.at(static_cast<std::size_t>(fill)); }

// These throw BadArgument.
Policy policy_of(const std::string& name);
Fill fill_of(const std::string& name);

}  // namespace memsaver
