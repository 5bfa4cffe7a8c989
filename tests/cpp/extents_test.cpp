#include "backup/extents.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace memsaver {
namespace {

constexpr std::size_t kPlaces = 256;

struct Run {
  std::size_t begin, size;
};

std::vector<Run> runs(const std::vector<bool>& free) {
  std::vector<Run> found;
  for (std::size_t at = 0; at < kPlaces; ++at) {
    if (!free[at]) continue;
    if (at > 0 && free[at - 1])
      ++found.back().size;
    else
      found.push_back({at, 1});
  }
  return found;
}

TEST_CASE("free extents: random extents are joined, split and found as a map of 256 places says") {
  static std::byte memory[kPlaces];
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    FreeExtents extents;
    std::vector<bool> free(kPlaces, false);
    for (int step = 0; step < 300; ++step) {
      const std::size_t begin = random() % kPlaces;
      const std::size_t size = 1 + random() % std::min<std::size_t>(40, kPlaces - begin);
      bool none_free = true, all_free = true;
      for (std::size_t at = begin; at < begin + size; ++at) (free[at] ? none_free : all_free) = false;
      const auto set = [&](std::size_t from, std::size_t count, bool value) {
        for (std::size_t at = from; at < from + count; ++at) free[at] = value;
      };
      switch (random() % 3) {
        case 0:
          if (!none_free) break;
          extents.put({memory + begin, size});
          set(begin, size, true);
          break;
        case 1:
          REQUIRE(extents.take_at({memory + begin, size}) == all_free);
          if (all_free) set(begin, size, false);
          break;
        default: {  // the smallest run that fits, else the largest one unless it must be whole
          const bool whole = random() % 2 == 0;
          std::size_t fit = 0, largest = 0;
          for (const Run& run : runs(free)) {
            largest = std::max(largest, run.size);
            if (run.size >= size && (fit == 0 || run.size < fit)) fit = run.size;
          }
          const std::size_t from = fit != 0 ? fit : whole ? 0 : largest;
          const auto taken = extents.take(size, whole);
          REQUIRE(taken.has_value() == (from != 0));
          if (!taken) break;
          const auto at = static_cast<std::size_t>(taken->data - memory);
          REQUIRE(taken->size == std::min(size, from));
          bool of_such_a_run = false;
          for (const Run& run : runs(free)) of_such_a_run |= run.begin == at && run.size == from;
          REQUIRE(of_such_a_run);
          set(at, taken->size, false);
        }
      }
    }
  }
}

}  // namespace
}  // namespace memsaver
