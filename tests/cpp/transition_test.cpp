#include "transitions/transition.h"

#include "regions/eviction.h"
#include "support.h"

namespace memsaver {
namespace {

using test::fresh_region;
using test::Segment;

// Segments whose chunks are of several sizes and have gaps between them.
std::vector<Segment> segments_of(Region& region, unsigned seed) {
  std::vector<Segment> held;
  for (const std::size_t size : {3 * kMiB, 40 * kMiB, 5 * kMiB, std::size_t{100}, 2 * kMiB})
    held.emplace_back(region, size, ++seed);
  held[1].free();
  held.erase(held.begin() + 1);
  return held;
}

bool intact(const std::vector<Segment>& held) {
  return std::all_of(held.begin(), held.end(), [](const Segment& segment) { return segment.intact(); });
}

// Segments live as long as their region.
void free_all(const std::vector<Segment>& held) {
  for (const Segment& segment : held) segment.free();
}

TEST_CASE("transition: two threads switch the same two regions back and forth") {
  Region &one = fresh_region(Policy::host), &other = fresh_region(Policy::host);
  const std::vector<Segment> first = segments_of(one, 60), second = segments_of(other, 70);
  std::atomic<int> wrong = 0;
  std::thread forth([&] {
    for (int round = 0; round < 10; ++round) test::move({&one}, {&other});
  });
  std::thread back([&] {
    for (int round = 0; round < 10; ++round) test::move({&other}, {&one});
  });
  std::thread figures([&] {
    for (int round = 0; round < 200; ++round) {
      wrong += one.allocated_bytes() != other.allocated_bytes();
    }
  });
  for (std::thread* thread : {&forth, &back, &figures}) thread->join();
  test::move({}, {&one, &other});
  CHECK(wrong == 0);
  CHECK(intact(first));
  CHECK(intact(second));
  free_all(first);
  free_all(second);
}

TEST_CASE("eviction: a demand takes few bytes beyond what it lacks, and no chunk in vain") {
  const std::vector<Slot> chunks{{0, 256 * kMiB},
                                 {256 * kMiB, 32 * kMiB},
                                 {288 * kMiB, 32 * kMiB},
                                 {320 * kMiB, 32 * kMiB},
                                 {352 * kMiB, 32 * kMiB}};
  const std::pair<std::size_t, std::size_t> cases[] = {{1, 32},    {34, 64},   {128, 128}, {130, 256},
                                                       {256, 256}, {260, 288}, {999, 384}};
  for (const auto& [lacking, taken] : cases) CHECK(bytes_of(enough_of(chunks, lacking * kMiB)) == taken * kMiB);
  CHECK(enough_of(chunks, 0).empty());
  CHECK(enough_of(chunks, 34 * kMiB).front().offset == 256 * kMiB);  // neighbours, to be copied together
  CHECK(enough_of(chunks, 34 * kMiB).back().end() == 320 * kMiB);
}

TEST_CASE("region: bytes of another process are zeroed under a segment of another allocator") {
  Driver& driver = test::driver();
  Region& region = core().region("placed", "cpu", {.placed = true});
  constexpr std::size_t kChunks = 3;
  const Address base = driver.reserve(kChunks * kPage);
  std::vector<Chunk> chunks;
  for (std::size_t number = 0; number < kChunks; ++number) {
    const bool foreign = number != 1;
    chunks.emplace_back(driver, driver.create(kPage), kPage, nullptr, foreign);
    driver.map(base, kPage, chunks.back().handle());
    driver.allow(base, kPage);
    std::memset(test::at(base), 0xaa, kPage);
    driver.unmap(base, kPage);
  }
  region.place({base, kChunks * kPage}, std::move(chunks));
  for (std::size_t number = 0; number < kChunks; ++number) {
    const std::byte expected{number == 1 ? std::uint8_t{0xaa} : std::uint8_t{0}};
    const std::byte* page = test::at(base + number * kPage);
    CHECK(std::all_of(page, page + kPage, [&](std::byte each) { return each == expected; }));
  }
  CHECK(region.drop({base, kChunks * kPage}));
  driver.unreserve(base, kChunks * kPage);
}

}  // namespace
}  // namespace memsaver
