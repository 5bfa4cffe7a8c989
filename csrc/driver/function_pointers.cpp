#include "driver/function_pointers.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/mutants.h"

namespace memsaver {
namespace {

struct Search {
  Address within;
  LibraryParts found = {};
};

int find_parts(dl_phdr_info* info, std::size_t, void* wanted) {
  auto& search = *static_cast<Search*>(wanted);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  LibraryParts parts;
  Address fixed = 0;  // the loader makes the addresses below this one read-only, within one writable part
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const Range range{static_cast<Address>(info->dlpi_addr + part.p_vaddr), static_cast<std::size_t>(part.p_memsz)};
    if (part.p_type == PT_GNU_RELRO) fixed = round_down(range.end(), page);
    if (part.p_type != PT_LOAD) continue;
    if ((part.p_flags & PF_X) != 0 && contains(range, search.within)) parts.code = range;
    if ((part.p_flags & PF_W) != 0) parts.writable.push_back(range);
  }
  if (parts.code.size == 0) return 0;
  for (Range& range : parts.writable) {
    const bool is_fixed = contains(range, fixed) && !MEMSAVER_MUTANT(read_only_pointers_count);
    const Address begin = is_fixed ? fixed : range.offset;
    range = {begin, range.end() - begin};
  }
  search.found = std::move(parts);
  return 1;
}

}  // namespace

bool contains(const Range& range, Address address) { return address >= range.offset && address < range.end(); }

LibraryParts parts_of(Address within) {
  Search search{within};
  ::dl_iterate_phdr(&find_parts, &search);
  return search.found;
}

std::string FunctionPointers::find(const Ranges& parts, const std::string& where) {
  for (const Range& part : parts) {
    const Address begin = round_up(part.offset, sizeof(Word));
    for (Address at = begin; at + sizeof(Word) <= part.end(); at += sizeof(Word)) {
      auto* word = reinterpret_cast<Word*>(at);
      // The library may write to it in another thread.
      const Word value = std::atomic_ref<Word>(*word).load(std::memory_order_relaxed);
      for (Wanted& each : wanted_) {
        if (value != each.original) continue;
        if (each.place != nullptr && !MEMSAVER_MUTANT(of_two_equal_pointers_the_last_counts))
          return where + " has " + each.name + " twice";
        each.place = word;
      }
    }
  }
  for (const Wanted& each : wanted_)
    if (each.place == nullptr) return where + " has no " + each.name;
  return "";
}

void FunctionPointers::replace() const {
  for (const Wanted& each : wanted_) std::atomic_ref<Word>(*each.place).store(each.instead, std::memory_order_release);
}

}  // namespace memsaver
