#include "backup/pinned_memory.h"

#include <cstring>

#include "support.h"

namespace memsaver {
namespace {

struct Bench {
  explicit Bench(std::size_t limit = 64 * kMiB) { budget.set_limit(limit); }
  HostBudget budget;
  HostArena arena{test::driver(), budget};
};

TEST_CASE("arena: extents are apart, and count as used until they are put back") {
  Bench bench;
  const HostArena::Extent first = bench.arena.take_whole(3 * kMiB), second = bench.arena.take_whole(5000);
  CHECK(first.size == 3 * kMiB);
  CHECK(second.size == 8192);
  CHECK((first.data + first.size <= second.data || second.data + second.size <= first.data));
  std::memset(first.data, 1, first.size);
  std::memset(second.data, 2, second.size);
  CHECK(first.data[first.size - 1] == std::byte{1});
  CHECK(bench.arena.used_bytes() == 3 * kMiB + 8192);
  bench.arena.put(first);
  bench.arena.put(second);
  CHECK(bench.arena.used_bytes() == 0);
  CHECK(bench.arena.idle_bytes() == bench.arena.held_bytes());
}

TEST_CASE("arena: extents that are put back join in any order") {
  Bench bench;
  const HostArena::Extent whole = bench.arena.take_whole(8 * kMiB);
  const HostArena::Extent parts[] = {
      {whole.data, 2 * kMiB}, {whole.data + 2 * kMiB, 2 * kMiB}, {whole.data + 4 * kMiB, 4 * kMiB}};
  for (const int number : {0, 2, 1}) bench.arena.put(parts[number]);
  const std::size_t held = bench.arena.held_bytes();
  const HostArena::Extent again = bench.arena.take_whole(8 * kMiB);
  CHECK(again.data == whole.data);
  CHECK(bench.arena.held_bytes() == held);
  bench.arena.put(again);
}

TEST_CASE("arena: idle memory is used before more is made, also in pieces") {
  Bench bench;
  bench.arena.put(bench.arena.take_whole(4 * kMiB));
  const HostArena::Extent some = bench.arena.take_some(6 * kMiB);
  CHECK(some.size == 4 * kMiB);
  CHECK(bench.arena.held_bytes() == 4 * kMiB);
  const HostArena::Extent more = bench.arena.take_some(2 * kMiB);
  CHECK(more.size == 2 * kMiB);
  CHECK(bench.arena.held_bytes() == 6 * kMiB);
  bench.arena.put(some);
  bench.arena.put(more);
}

TEST_CASE("arena: beyond the limit nothing is taken, and the error has the figures") {
  Bench bench(4 * kMiB);
  const HostArena::Extent extent = bench.arena.take_whole(4 * kMiB);
  CHECK_NOTHROW(bench.arena.check(0));
  CHECK_THROWS_AS(bench.arena.check(1), BackupError);
  try {
    bench.arena.take_whole(2 * kMiB);
    FAIL("the limit was passed");
  } catch (const BackupError& error) {
    CHECK(error.needed_bytes == 2 * kMiB);
    CHECK(error.held_bytes == 4 * kMiB);
    CHECK(error.available_bytes == 0);
  }
  CHECK(bench.arena.held_bytes() == 4 * kMiB);
  CHECK(bench.arena.used_bytes() == 4 * kMiB);
  bench.arena.put(extent);
  const HostArena::Extent again = bench.arena.take_whole(4 * kMiB);
  bench.arena.put(again);
}

TEST_CASE("arena: memory that cannot be pinned is an error, and goes back") {
  Bench bench;
  {
    const test::Armed pin(1);
    CHECK_THROWS_AS(bench.arena.take_whole(2 * kMiB), BackupError);
  }
  CHECK(bench.arena.held_bytes() == 0);
  CHECK_NOTHROW(bench.budget.check(64 * kMiB));
}

TEST_CASE("arena: threads take and put side by side") {
  Bench bench;
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (unsigned thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      for (unsigned round = 0; round < 40; ++round) {
        const HostArena::Extent extent = bench.arena.take_whole((1 + (round + thread) % 3) * 64 * 1024);
        std::memset(extent.data, static_cast<int>(thread + 1), extent.size);
        std::this_thread::yield();
        for (std::size_t i = 0; i < extent.size; i += 4096) wrong += extent.data[i] != std::byte(thread + 1);
        bench.arena.put(extent);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(bench.arena.used_bytes() == 0);
}

}  // namespace
}  // namespace memsaver
