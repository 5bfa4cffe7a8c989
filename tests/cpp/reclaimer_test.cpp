#include "regions/reclaimer.h"

#include <chrono>

#include "support.h"

namespace memsaver {
namespace {

using test::fresh_region;
using test::Segment;

constexpr auto kPatience = std::chrono::seconds(60);

TEST_CASE("reclaimer: passes beside allocations, frees and transitions of other threads") {
  Region &changing = fresh_region(Policy::none), &moving = fresh_region(Policy::host);
  const Segment kept(moving, 5 * kMiB, 5);
  std::atomic<bool> is_over = false;
  std::thread asking([&] {
    while (!is_over) {
      test::device().reclaimer.finish(now());
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::thread allocating([&] {
    for (unsigned seed = 0; seed < 60; ++seed) {
      const Segment each(changing, (1 + seed % 7) * kMiB, seed);
      CHECK(each.intact());
      each.free();
    }
  });
  for (int turn = 0; turn < 10; ++turn) {
    test::move({&moving}, {});
    test::move({}, {&moving});
    CHECK(kept.intact());
  }
  allocating.join();
  is_over = true;
  asking.join();
  kept.free();
  CHECK(test::device().reclaimer.finish(now() + kPatience));
  CHECK(changing.mapped_bytes() + moving.mapped_bytes() == 0);
}

}  // namespace
}  // namespace memsaver
