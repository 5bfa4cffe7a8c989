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

TEST_CASE("ranges: bytes and order") {
  CHECK(bytes_of(Ranges{}) == 0);
  CHECK(bytes_of({{0, 3}, {10, 4}}) == 7);
  CHECK(pairs(sorted({{10, 1}, {0, 2}, {5, 3}})) == Pairs{{0, 2}, {5, 3}, {10, 1}});
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

TEST_CASE("range set: ranges that touch or overlap are joined") {
  RangeSet set;
  set.add({10, 5});
  set.add({20, 5});
  CHECK(pairs(set.within({0, 100})) == Pairs{{10, 5}, {20, 5}});
  set.add({15, 5});
  CHECK(pairs(set.within({0, 100})) == Pairs{{10, 15}});
  set.add({0, 50});
  CHECK(pairs(set.within({0, 100})) == Pairs{{0, 50}});
  set.add({60, 0});
  CHECK(set.bytes() == 50);
}

TEST_CASE("range set: within() cuts at both ends") {
  RangeSet set;
  set.add({10, 10});
  set.add({30, 10});
  CHECK(pairs(set.within({15, 20})) == Pairs{{15, 5}, {30, 5}});
  CHECK(set.within({20, 10}).empty());
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

}  // namespace
}  // namespace memsaver
