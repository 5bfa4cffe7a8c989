#include "support.h"

namespace memsaver {
namespace {

using test::at;
using test::Mapped;

int code_of(auto call) {
  try {
    call();
  } catch (const DriverError& error) {
    return error.code;
  }
  return 0;
}

// Resets the host device at the end of a test, also if it fails.
struct Orders {
  ~Orders() { controls_reset(); }
};

TEST_CASE("host driver: threads map and unmap side by side") {
  Driver& driver = test::driver();
  const std::size_t free = driver.memory().free;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      for (unsigned round = 0; round < 20; ++round) {
        const Mapped memory(driver, kPage);
        const std::vector<std::byte> data = test::random_bytes(4096, thread * 1000 + round);
        driver.copy_in(memory.address, data.data(), data.size());
        driver.wait(driver.mark(Direction::in));
        wrong += std::memcmp(at(memory.address), data.data(), data.size()) != 0;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(driver.memory().free == free);
}

TEST_CASE("host driver: a context dies under threads that launch, copy, map and wait, and by an unmap under work") {
  Driver& driver = test::driver();
  const Mapped memory(driver, kPage), written(driver, kPage);
  const Address place = driver.reserve(kPage);
  const Handle handle = driver.create(kPage);
  std::atomic<int> wrong = 0, rounds = 0;
  {
    const Orders orders;
    void* stream = controls_stream(0);
    std::vector<std::byte> data(kPage);
    const auto until_it_dies = [&](auto act) {
      return std::thread([&, act] {
        try {
          for (;; ++rounds) act();
        } catch (const DriverError& error) {
          wrong += !error.context_lost;
        }
      });
    };
    std::thread threads[] = {
        until_it_dies([&] {
          controls_write(stream, written.address, kPage, 1, 0.0001);
          driver.synchronize();
        }),
        until_it_dies([&] {
          driver.copy_out(data.data(), memory.address, kPage);
          driver.wait(driver.mark(Direction::out));
        }),
        until_it_dies([&] { driver.done(driver.record()); }),
    };
    while (rounds < 100) std::this_thread::yield();
    driver.map(place, kPage, handle);
    driver.allow(place, kPage);
    // Enough work that some is queued, or under way, when the memory goes.
    for (int round = 0; round < 20; ++round) controls_write(stream, place, kPage, 3, 0);
    code_of([&] { driver.unmap(place, kPage); });
    for (std::thread& thread : threads) thread.join();
    CHECK(code_of([&] { driver.release(handle); }) == 700);
  }
  CHECK(wrong == 0);
  driver.release(handle);
  driver.unreserve(place, kPage);
}

}  // namespace
}  // namespace memsaver
