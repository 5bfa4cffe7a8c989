#include "regions/states.h"

#include "base/errors.h"

namespace memsaver {
namespace {

template <typename Choice, std::size_t count>
Choice chosen(const char* option, const std::string& name, const std::array<const char*, count>& names) {
  std::string expected;
  for (std::size_t number = 0; number < count; ++number) {
    if (name == names[number]) return static_cast<Choice>(number);
    expected += std::string(number == 0 ? "" : number + 1 < count ? ", " : " or ") + "'" + names[number] + "'";
  }
  throw BadArgument(std::string(option) + " is '" + name + "', expected " + expected);
}

}  // namespace

Policy policy_of(const std::string& name) { return chosen<Policy>("backup", name, kPolicyNames); }
Fill fill_of(const std::string& name) { return chosen<Fill>("fill", name, kFillNames); }

}  // namespace memsaver
