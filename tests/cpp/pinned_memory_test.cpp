#include "backup/pinned_memory.h"

#include <cstring>

#include "support.h"

namespace memsaver {
namespace {

TEST_CASE("arena: threads take and put side by side") {
  HostBudget budget;
  budget.set_limit(64 * kMiB);
  HostArena arena{test::driver(), budget};
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (unsigned thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      for (unsigned round = 0; round < 40; ++round) {
        const HostArena::Extent extent = arena.take_whole((1 + (round + thread) % 3) * 64 * 1024);
        std::memset(extent.data, static_cast<int>(thread + 1), extent.size);
        std::this_thread::yield();
        for (std::size_t i = 0; i < extent.size; i += 4096) wrong += extent.data[i] != std::byte(thread + 1);
        arena.put(extent);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(arena.used_bytes() == 0);
}

}  // namespace
}  // namespace memsaver
