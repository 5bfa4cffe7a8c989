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
