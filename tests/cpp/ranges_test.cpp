#include "base/ranges.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace memsaver {
namespace {

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

Pairs pairs(const Ranges& ranges) {
  Pairs found;
  for (const Range& range : ranges) found.emplace_back(range.offset, range.size);
  return found;
}

constexpr std::size_t kSpan = 64;
using Bits = std::vector<bool>;  // one for each byte of a small span

Bits bits(const Ranges& ranges) {
  Bits found(kSpan);
  for (const Range& range : ranges)
    for (std::size_t i = range.offset; i < range.end(); ++i) found[i] = true;
  return found;
}

// Ranges by offset without overlaps; some touch.
Ranges random_ranges(std::mt19937& random) {
  Ranges found;
  std::size_t at = random() % 8;
  while (at < kSpan - 8) {
    const std::size_t size = 1 + random() % 7;
    found.push_back({at, size});
    at += size + random() % 5;
  }
  return found;
}

TEST_CASE("ranges: an intersection keeps the borders of both") {
  CHECK(pairs(intersect({{0, 10}}, {{2, 3}, {5, 2}})) == Pairs{{2, 3}, {5, 2}});
  CHECK(pairs(intersect({{0, 5}, {5, 5}}, {{0, 10}})) == Pairs{{0, 5}, {5, 5}});
  CHECK(intersect({{0, 5}}, {{5, 5}}).empty());
  CHECK(intersect({}, {{5, 5}}).empty());
}

TEST_CASE("ranges: an intersection has the bytes that are in both") {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Ranges one = random_ranges(random), other = random_ranges(random);
    const Bits in_one = bits(one), in_other = bits(other);
    Bits expected(kSpan);
    for (std::size_t i = 0; i < kSpan; ++i) expected[i] = in_one[i] && in_other[i];
    REQUIRE(bits(intersect(one, other)) == expected);
  }
}

TEST_CASE("range set: agrees with one bit for each byte") {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    RangeSet set;
    Bits expected(kSpan);
    for (int i = 0; i < 8; ++i) {
      const std::size_t offset = random() % (kSpan - 8);
      const Range range{offset, random() % 8};
      set.add(range);
      for (std::size_t byte = range.offset; byte < range.end(); ++byte) expected[byte] = true;
      const Ranges asked = random_ranges(random);
      Bits missing = bits(asked);
      for (std::size_t byte = 0; byte < kSpan; ++byte) missing[byte] = missing[byte] && !expected[byte];
      REQUIRE(bits(set.within({0, kSpan})) == expected);
      REQUIRE(bits(set.missing_from(asked)) == missing);
      REQUIRE(set.covers(asked) == (missing == Bits(kSpan)));
      REQUIRE(set.bytes() == static_cast<std::size_t>(std::count(expected.begin(), expected.end(), true)));
    }
  }
}

TEST_CASE("free ranges: agree with one bit for each byte") {
  constexpr std::size_t kBytes = 256;
  std::mt19937 random(3);
  const auto below = [&](std::size_t bound) { return std::size_t{random() % bound}; };
  for (int round = 0; round < 100; ++round) {
    FreeRanges ranges;
    Bits free(kBytes);
    const auto set = [&](std::size_t from, std::size_t count, bool value) {
      for (std::size_t at = from; at < from + count; ++at) free[at] = value;
    };
    for (int step = 0; step < 300; ++step) {
      const std::size_t begin = below(kBytes), size = 1 + below(std::min<std::size_t>(40, kBytes - begin));
      const auto of_size = [&](bool value) {
        return std::all_of(free.begin() + static_cast<std::ptrdiff_t>(begin),
                           free.begin() + static_cast<std::ptrdiff_t>(begin + size),
                           [&](bool bit) { return bit == value; });
      };
      const std::size_t call = below(3);
      if (call == 0 && of_size(false)) {
        ranges.put({begin, size});
        set(begin, size, true);
      } else if (call == 1) {
        const bool all = of_size(true);
        REQUIRE(ranges.take_at({begin, size}) == all);
        if (all) set(begin, size, false);
      } else if (call == 2) {
        const bool whole = below(2) == 0;
        Ranges runs;  // of free bytes
        for (std::size_t at = 0; at < kBytes; ++at) {
          if (!free[at]) continue;
          if (at > 0 && free[at - 1])
            ++runs.back().size;
          else
            runs.push_back({at, 1});
        }
        const Range* best = nullptr;
        for (const Range& run : runs)
          if (run.size >= size && (best == nullptr || run.size < best->size)) best = &run;
        for (const Range& run : runs)
          if (!whole && (best == nullptr || best->size < std::min(size, run.size))) best = &run;
        const auto taken = ranges.take(size, whole);
        REQUIRE(taken.has_value() == (best != nullptr));
        if (!taken) continue;
        REQUIRE(taken->size == std::min(size, best->size));
        REQUIRE(std::any_of(runs.begin(), runs.end(),
                            [&](const Range& run) { return run.offset == taken->offset && run.size == best->size; }));
        set(taken->offset, taken->size, false);
      }
      REQUIRE(ranges.bytes() == static_cast<std::size_t>(std::count(free.begin(), free.end(), true)));
    }
  }
}

}  // namespace
}  // namespace memsaver
