#include "regions/reclaimer.h"

#include <chrono>

#include "support.h"

namespace memsaver {
namespace {

using test::fresh_region;
using test::Segment;

constexpr auto kPatience = std::chrono::seconds(60);

// The rests that a pass tells, and a wait for its last one.
class Told {
 public:
  std::function<void(const Reclaimer::Rest&)> tell() {
    return [this](const Reclaimer::Rest& rest) {
      std::lock_guard lock(mutex_);
      rests_.push_back(rest);
      changed_.notify_all();
    };
  }
  Reclaimer::Rest last() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, kPatience, [this] { return !rests_.empty() && !rests_.back().more; }));
    return rests_.back();
  }
  Reclaimer::Rest first() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, kPatience, [this] { return !rests_.empty(); }));
    return rests_.front();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Reclaimer::Rest> rests_;
};

TEST_CASE("reclaimer: freed memory comes back, and memory in use stays") {
  Region& region = fresh_region(Policy::none);
  const Segment kept(region, 3 * kMiB, 1);
  {
    const Segment freed(region, 40 * kMiB, 2);
    freed.free();
  }
  CHECK(test::device().reclaimer.finish(now() + kPatience));
  CHECK(region.resting_bytes() == 0);
  CHECK(region.mapped_bytes() < 40 * kMiB);
  CHECK(kept.intact());
  kept.free();
  CHECK(test::device().reclaimer.finish(now() + kPatience));
  CHECK(region.mapped_bytes() == 0);
}

TEST_CASE("reclaimer: the rest is told while the device works, and at the end") {
  Region& region = fresh_region(Policy::none);
  test::device();
  void* stream = controls_stream(0);
  const Segment held(region, 8 * kMiB, 3);
  controls_touch(stream, reinterpret_cast<Address>(held.data()), held.size(), -1);
  held.free();
  Told told;
  test::device().reclaimer.request(told.tell());
  const Reclaimer::Rest first = told.first();
  CHECK(first.more);
  CHECK(first.unused == 8 * kMiB);
  CHECK(first.why == "8.0 MiB on which the device still works");
  CHECK(region.mapped_bytes() >= 8 * kMiB);
  controls_release(stream);
  const Reclaimer::Rest last = told.last();
  CHECK(last.unused == 0);
  CHECK(last.why.empty());
  CHECK(region.mapped_bytes() == 0);
}

TEST_CASE("reclaimer: a capture keeps everything") {
  Region& region = fresh_region(Policy::none);
  CaptureGate& gate = test::device().parts.gate;
  gate.capture_begins();
  const Segment held(region, 4 * kMiB, 4);
  held.free();
  Told told;
  test::device().reclaimer.request(told.tell());
  const Reclaimer::Rest rest = told.last();
  CHECK(rest.why.starts_with("a graph is being captured"));
  CHECK(region.mapped_bytes() >= 4 * kMiB);
  gate.capture_ends();
  test::device().resting.mark();
  CHECK(test::device().reclaimer.finish(now() + kPatience));
  CHECK(region.mapped_bytes() == 0);
}

TEST_CASE("reclaimer: passes beside allocations, frees and transitions of other threads") {
  Region &changing = fresh_region(Policy::none), &moving = fresh_region(Policy::host);
  const Segment kept(moving, 5 * kMiB, 5);
  std::atomic<bool> is_over = false;
  std::thread asking([&] {
    while (!is_over) {
      test::device().reclaimer.request([](const Reclaimer::Rest&) {});
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
