// Pointers to the driver's functions in the data of another library, found by their values: its layout need not be
// known.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

using Word = std::uintptr_t;

// The parts of a loaded library.
struct LibraryParts {
  Range code{0, 0};
  Ranges writable = {};  // without the parts that the loader makes read-only
};

// The library whose code has this address. `code` is empty if there is none.
LibraryParts parts_of(Address within);

bool contains(const Range& range, Address address);

// Words of a library that take other values.
class FunctionPointers {
 public:
  template <typename Function>
  void add(const char* name, Function* original, Function* instead) {
    wanted_.push_back({name, reinterpret_cast<Word>(original), reinterpret_cast<Word>(instead)});
  }

  // Looks for the words in these parts. Returns the reason if they are not there once each; `where`: the place, for
  // the reason. No word is changed.
  std::string find(const Ranges& parts, const std::string& where);
  // Changes the words that were found.
  void replace() const;

 private:
  struct Wanted {
    const char* name;
    Word original, instead;
    Word* place = nullptr;
  };
  std::vector<Wanted> wanted_;
};

}  // namespace memsaver
