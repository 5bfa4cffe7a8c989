#include "memory/chunk.h"

#include "support.h"

namespace memsaver {
namespace {

struct Bench {
  explicit Bench(std::size_t retain) { budget.limit = retain; }
  std::size_t free() { return driver.memory().free; }
  Chunk take(std::size_t limit) { return take(limit, limit, Clock::now()); }
  Chunk take(std::size_t limit, std::size_t fresh, Deadline deadline) {
    return pool.ask({{limit, fresh, limit}}, deadline)->next(limit, fresh, true);
  }

  Driver& driver = test::driver();
  RetainBudget budget;
  RetainedPool pool{driver, budget};
};

TEST_CASE("chunk classes: the largest that is no larger") {
  CHECK(chunk_class(kPage) == 2 * kMiB);
  CHECK(chunk_class(32 * kMiB - 1) == 2 * kMiB);
  CHECK(chunk_class(32 * kMiB) == 32 * kMiB);
  CHECK(chunk_class(5000 * kMiB) == 1024 * kMiB);
  CHECK_THROWS_AS(chunk_class(kPage - 1), Error);
}

TEST_CASE("retained pool: without a budget a chunk goes back to the driver at once") {
  Bench bench(0);
  const std::size_t before = bench.free();
  {
    const Chunk chunk = bench.take(32 * kMiB);
    CHECK(chunk.size() == 32 * kMiB);
    CHECK(bench.free() == before - 32 * kMiB);
  }
  CHECK(bench.free() == before);
  CHECK(bench.pool.idle_bytes() == 0);
}

TEST_CASE("retained pool: idle chunks are used again, and never beyond the budget") {
  Bench bench(34 * kMiB);
  Handle handle = 0;
  {
    const Chunk chunk = bench.take(32 * kMiB);
    handle = chunk.handle();
  }
  CHECK(bench.pool.idle_bytes() == 32 * kMiB);
  {
    const Chunk again = bench.take(32 * kMiB);
    CHECK(again.handle() == handle);
    CHECK(bench.budget.held == 0);
  }
  const std::size_t free = bench.free();
  {
    const Chunk first = bench.take(kPage), second = bench.take(kPage);  // the 32 MiB are too large, and stay
    CHECK(bench.free() == free - 2 * kPage);
  }
  CHECK(bench.pool.idle_bytes() == 34 * kMiB);
  CHECK(bench.budget.held == 34 * kMiB);
  CHECK(bench.free() == free - kPage);  // the other was over the budget
  CHECK(bench.pool.give_up(34 * kMiB) == 34 * kMiB);
  CHECK(bench.budget.held == 0);
}

TEST_CASE("retained pool: a chunk is never larger than asked for, nor a new one than allowed") {
  Bench bench(64 * kMiB);
  {
    const Chunk large = bench.take(32 * kMiB);
  }
  const Chunk small = bench.take(30 * kMiB);
  CHECK(small.size() == kPage);
  CHECK(bench.pool.idle_bytes() == 32 * kMiB);
  const Chunk idle = bench.take(40 * kMiB, kPage, Clock::now());  // an idle one may be larger than a new one
  CHECK(idle.size() == 32 * kMiB);
  const Chunk fresh = bench.take(40 * kMiB, kPage, Clock::now());
  CHECK(fresh.size() == kPage);
}

TEST_CASE("retained pool: the last of a device comes in small chunks, and then none") {
  Bench bench(0);
  std::vector<Chunk> chunks;
  while (bench.free() >= kPage) chunks.push_back(bench.take(32 * kMiB));
  CHECK(bench.free() < kPage);
  CHECK(chunks.back().size() == kPage);
  CHECK_THROWS_AS(bench.take(kPage), ChunkUnavailable);
  chunks.pop_back();
  CHECK(bench.take(32 * kMiB).size() == kPage);
}

TEST_CASE("retained pool: a demand waits for chunks that another returns") {
  Bench bench(0);
  std::vector<Chunk> chunks;
  while (bench.free() >= kPage) chunks.push_back(bench.take(32 * kMiB));
  int looks = 0;
  const auto before = std::exchange(between_looks, [&] {
    if (++looks == 3) chunks.clear();
  });
  const Chunk chunk = bench.take(32 * kMiB, 32 * kMiB, Clock::now() + std::chrono::seconds(60));
  between_looks = before;
  CHECK(chunk.size() == 32 * kMiB);
  CHECK(looks == 3);
}

}  // namespace
}  // namespace memsaver
