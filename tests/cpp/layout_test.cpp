#include "memory/layout.h"

#include "memory/segments.h"
#include "support.h"

namespace memsaver {
namespace {

using test::kGiB;

// Segments, some side by side, and chunks that earlier layouts left under some of them.
Layout::Input random_input(std::mt19937& random) {
  Segments segments;
  Layout::Input in{.wanted = {},
                   .segments = {},
                   .chunks = {},
                   .reserved = {{0, 64 * kGiB}, {65 * kGiB, 64 * kGiB}},
                   .largest = kChunkClasses[random() % 2],
                   .slack = 0,
                   .allowance = random() % 2 * 48 * kMiB};
  for (const Range& reserved : in.reserved) {
    Address at = reserved.offset;
    for (int i = 0; i < 15; ++i) {
      at += random() % 3 == 0 ? random() % 200 * kMiB : 0;
      const std::size_t size = random() % 8 == 0 ? random() % (3 * kGiB) + 1 : 512 * (1 + random() % 200'000);
      segments.add({at, size});
      const Range chunk{round_up(at, kPage), random() % 2 == 0 ? kPage : 32 * kMiB};
      if (random() % 4 == 0 && chunk.end() <= at + size) in.chunks.push_back(chunk);
      at += size;
    }
  }
  in.wanted = segments.live();
  in.segments = segments.all();
  return in;
}

TEST_CASE("layout: random segments are covered, also where chunks are smaller than asked for") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const Layout::Input in = random_input(random);
    const bool smaller = random() % 2 == 0;
    Ranges places = in.chunks;
    RangeSet covered;
    Layout layout(in);
    while (const auto gap = layout.next()) {
      REQUIRE(gap->limit <= gap->room);
      const std::size_t size = smaller ? chunk_class(std::max(kPage, gap->limit / (1 + random() % 40))) : gap->limit;
      layout.place(size);
      places.push_back({gap->at, size});
    }
    for (const Range& place : places) {
      const auto holds = [&](const Range& range) { return range.offset <= place.offset && place.end() <= range.end(); };
      CHECK(place.offset % kPage == 0);
      CHECK(std::any_of(in.reserved.begin(), in.reserved.end(), holds));
      if (place.size == kGiB) CHECK(std::any_of(in.segments.begin(), in.segments.end(), holds));
      covered.add(place);
    }
    CHECK(covered.bytes() == bytes_of(places));  // none overlap
    CHECK(covered.covers(in.wanted));
    // Each run of segments may waste less than a page at each end, beside the allowance.
    CHECK(bytes_of(places) <= bytes_of(in.segments) + in.allowance + 2 * kPage * in.wanted.size());
  }
}

TEST_CASE("layout: an allowance is used for a larger chunk, and kept") {
  Layout::Input in{.wanted = {{0, 30 * kMiB}},
                   .segments = {{0, 30 * kMiB}},
                   .chunks = {},
                   .reserved = {{0, kGiB}},
                   .largest = kChunkClasses[1],
                   .slack = 0,
                   .allowance = 2 * kMiB};
  CHECK(Layout::planned(Layout(in)).size() == 1);
  in.slack = 1;  // one byte of it is used up before
  CHECK(Layout::planned(Layout(in)).size() == 15);
}

}  // namespace
}  // namespace memsaver
