#include <cstring>
#include <functional>

#include "support.h"

namespace memsaver {
namespace {

using test::at;
using test::Mapped;

int code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DriverError& error) {
    return error.code;
  }
  return 0;
}

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

// Resets the host device's delays and streams at the end of a test, also if it fails.
struct Orders {
  ~Orders() { controls::reset(); }
};

TEST_CASE("host driver: a wait for the device covers every stream, and a mark the work launched before it") {
  Driver& driver = test::driver();
  const Mapped memory(driver, kPage);
  const Orders orders;
  const cuda::Stream first = controls::new_stream(), second = controls::new_stream();
  controls::launch_write(first, memory.address, kPage, 1, kNever);
  const Driver::Ticket before = driver.record();
  controls::launch_write(second, memory.address, kPage, 2, kNever);
  std::vector<std::byte> found(16);
  int is_there = 0;
  controls::launch_read(second, memory.address, 16, kNever, found.data(), &is_there);
  const Driver::Ticket after = driver.record();
  CHECK_FALSE(driver.done(before));
  std::thread releaser([&] {
    controls::release_stream(first);
    controls::release_stream(second);
  });
  driver.synchronize();
  CHECK(driver.done(after));
  CHECK(is_there == 1);
  CHECK(found == std::vector<std::byte>(16, std::byte{2}));
  CHECK(at(memory.address)[kPage - 1] == std::byte{2});
  releaser.join();
}

TEST_CASE("host driver: an unmap of memory under work ends the context") {
  Driver& driver = test::driver();
  const std::size_t size = 8 * kMiB;
  const Address address = driver.reserve(size);
  const Handle handle = driver.create(size);
  driver.map(address, size, handle);
  driver.allow(address, size);
  {
    const Orders orders;
    const cuda::Stream stream = controls::new_stream();
    // Enough of it that some is queued, or under way, when the memory goes.
    for (int round = 0; round < 20; ++round) controls::launch_write(stream, address, size, 3, {});
    driver.unmap(address, size);
    CHECK(code_of([&] { driver.synchronize(); }) == 700);
    CHECK(code_of([&] { driver.release(handle); }) == 700);
  }
  driver.release(handle);
  driver.unreserve(address, size);
}

TEST_CASE("host driver: a context dies under threads that launch, copy, map and wait") {
  Driver& driver = test::driver();
  const Mapped memory(driver, kPage), written(driver, kPage);
  const Address place = driver.reserve(kPage);
  const Handle handle = driver.create(kPage);
  std::atomic<int> wrong = 0;
  {
    const Orders orders;
    const cuda::Stream stream = controls::new_stream();
    std::vector<std::byte> data(kPage);
    const auto until_it_dies = [&](auto act) {
      return std::thread([&wrong, act] {
        try {
          for (;;) act();
        } catch (const DriverError& error) {
          wrong += !error.context_lost;
        }
      });
    };
    std::thread threads[] = {
        until_it_dies([&] {
          controls::launch_write(stream, written.address, kPage, 1, now() + std::chrono::microseconds(100));
          driver.synchronize();
        }),
        until_it_dies([&] {
          driver.copy_out(data.data(), memory.address, kPage);
          driver.wait(driver.mark(Direction::out));
        }),
        until_it_dies([&] { driver.done(driver.record()); }),
        until_it_dies([&] {
          driver.map(place, kPage, handle);
          driver.unmap(place, kPage);
        }),
    };
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    controls::kill_context();
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(wrong == 0);
  try {
    driver.unmap(place, kPage);  // if it died between the two calls
  } catch (const DriverError&) {
  }
  driver.release(handle);
  driver.unreserve(place, kPage);
}

}  // namespace
}  // namespace memsaver
