#include "memory/layout.h"

#include <doctest/doctest.h>

#include <random>

#include "memory/segments.h"

namespace memsaver {
namespace {

constexpr std::size_t kGiB = 1024 * kMiB;

Layout::Input input(Ranges wanted, Ranges segments, std::size_t largest = kChunkClasses[1]) {
  return {.wanted = std::move(wanted),
          .segments = std::move(segments),
          .chunks = {},
          .reserved = {{0, 64 * kGiB}},
          .largest = largest,
          .slack = 0,
          .allowance = 0};
}

// Every byte of `wanted` lies in exactly one place or chunk, and no place leaves the reserved ranges.
void check_covers(const Layout::Input& in, const Ranges& places) {
  RangeSet covered;
  std::size_t bytes = 0;
  for (const Ranges* ranges : {&places, &in.chunks})
    for (const Range& range : *ranges) {
      covered.add(range);
      bytes += range.size;
    }
  CHECK(covered.bytes() == bytes);  // none overlap
  CHECK(covered.covers(in.wanted));
  for (const Range& place : places) {
    bool inside = false;
    for (const Range& range : in.reserved) inside |= range.offset <= place.offset && place.end() <= range.end();
    CHECK(inside);
    CHECK(place.offset % kPage == 0);
  }
}

}  // namespace

TEST_CASE("layout: without an allowance no chunk reaches beyond the pages of the wanted range") {
  const auto in = input({{0, 37 * kMiB}}, {{0, 37 * kMiB}});
  const Ranges places = Layout::planned(Layout(in));
  check_covers(in, places);
  CHECK(bytes_of(places) == 38 * kMiB);
}

TEST_CASE("layout: an allowance is used for a larger chunk, and kept") {
  auto in = input({{0, 30 * kMiB}}, {{0, 30 * kMiB}});
  in.allowance = 2 * kMiB;
  CHECK(Layout::planned(Layout(in)).size() == 1);
  in.slack = kMiB;  // one byte of it is used up before
  CHECK(Layout::planned(Layout(in)).size() == 15);
}

TEST_CASE("layout: the largest class serves one segment alone") {
  const auto shared = input({{0, 2 * kGiB}}, {{0, kGiB / 2}, {kGiB / 2, kGiB + kGiB / 2}}, kChunkClasses[0]);
  for (const Range& place : Layout::planned(Layout(shared)))
    CHECK((place.size < kGiB || (place.offset >= kGiB / 2 && place.end() <= 2 * kGiB)));
  const auto whole = input({{0, 2 * kGiB}}, {{0, 2 * kGiB}}, kChunkClasses[0]);
  CHECK(Layout::planned(Layout(whole)).size() == 2);
}

TEST_CASE("layout: mapped chunks and borders of reserved ranges are respected") {
  auto in = input({{0, 100 * kMiB}, {kGiB - 4 * kMiB, 4 * kMiB}}, {{0, 100 * kMiB}, {kGiB - 4 * kMiB, 4 * kMiB}});
  in.chunks = {{32 * kMiB, 32 * kMiB}};
  in.reserved = {{0, kGiB}, {2 * kGiB, kGiB}};
  in.allowance = kGiB;
  check_covers(in, Layout::planned(Layout(in)));
}

TEST_CASE("layout: chunks that come smaller than planned are followed by more") {
  const auto in = input({{0, 100 * kMiB}}, {{0, 100 * kMiB}});
  Layout layout(in);
  Ranges places;
  while (const auto gap = layout.next()) {
    CHECK(gap->limit <= gap->room);
    places.push_back({gap->at, kPage});
    layout.place(kPage);
  }
  check_covers(in, places);
  CHECK(places.size() == 50);
}

TEST_CASE("layout: random segments are covered") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Segments segments;
    Address at = 0;
    for (int i = 0; i < 30; ++i) {
      at += random() % 3 == 0 ? random() % 200 * kMiB : 0;
      const std::size_t size = 512 * (1 + random() % 200'000);
      segments.add({at, size});
      at += size;
    }
    auto in = input(segments.live(), segments.all(), kChunkClasses[random() % 2]);
    in.allowance = random() % 2 == 0 ? 0 : 48 * kMiB;
    const Ranges places = Layout::planned(Layout(in));
    check_covers(in, places);
    // Each run of segments may waste less than a page at each end, beside the allowance.
    CHECK(bytes_of(places) <= segments.live_bytes() + in.allowance + 2 * kPage * segments.live().size());
  }
}

}  // namespace memsaver
