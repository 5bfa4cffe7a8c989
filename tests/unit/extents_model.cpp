// FreeExtents against a model: a byte map of 256 places. Prints the first difference, or nothing.
#include <cstdio>
#include <random>
#include <vector>

#include "backup/extents.h"

using memsaver::Extent;
using memsaver::FreeExtents;

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

}  // namespace

int main() {
  static std::byte memory[kPlaces];
  std::mt19937 random(1);
  const auto below = [&](std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
  };
  for (int round = 0; round < 300; ++round) {
    FreeExtents extents;
    std::vector<bool> free(kPlaces, false);
    for (int step = 0; step < 300; ++step) {
      const std::size_t begin = below(kPlaces), size = 1 + below(std::min<std::size_t>(40, kPlaces - begin));
      bool none_free = true, all_free = true;
      for (std::size_t at = begin; at < begin + size; ++at) (free[at] ? none_free : all_free) = false;
      const auto set = [&](std::size_t from, std::size_t count, bool value) {
        for (std::size_t at = from; at < from + count; ++at) free[at] = value;
      };
      switch (below(3)) {
        case 0:
          if (!none_free) break;
          extents.put({memory + begin, size});
          set(begin, size, true);
          break;
        case 1:
          if (extents.take_at({memory + begin, size}) != all_free) {
            std::printf("take_at(%zu, %zu) is wrong\n", begin, size);
            return 1;
          }
          if (all_free) set(begin, size, false);
          break;
        default: {
          const bool whole = below(2) == 0;
          std::size_t fit = 0, largest = 0;  // sizes of runs
          for (const Run& run : runs(free)) {
            largest = std::max(largest, run.size);
            if (run.size >= size && (fit == 0 || run.size < fit)) fit = run.size;
          }
          const std::size_t from = fit != 0 ? fit : whole ? 0 : largest;
          const auto taken = extents.take(size, whole);
          bool right = taken.has_value() == (from != 0);
          if (taken && right) {
            const auto at = static_cast<std::size_t>(taken->data - memory);
            right = taken->size == std::min(size, from);
            bool of_such_a_run = false;
            for (const Run& run : runs(free)) of_such_a_run |= run.begin == at && run.size == from;
            right = right && of_such_a_run;
            set(at, taken->size, false);
          }
          if (!right) {
            std::printf("take(%zu, %d) is wrong\n", size, whole);
            return 1;
          }
        }
      }
    }
  }
  return 0;
}
