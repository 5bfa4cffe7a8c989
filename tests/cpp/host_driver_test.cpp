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

TEST_CASE("host driver: mapped memory is accessible, and the same wherever its handle is mapped") {
  Driver& driver = test::driver();
  const Mapped memory(driver, 2 * kPage);
  const Address other = driver.reserve(2 * kPage);
  driver.map(other, 2 * kPage, memory.handle);
  driver.allow(other, 2 * kPage);
  std::memset(at(memory.address), 5, 2 * kPage);
  CHECK(at(other)[2 * kPage - 1] == std::byte{5});
  driver.unmap(other, 2 * kPage);
  driver.unreserve(other, 2 * kPage);
}

TEST_CASE("host driver: a handle outlives its mappings, and mappings the handle") {
  Driver& driver = test::driver();
  const std::size_t free = driver.memory().free;
  const Address address = driver.reserve(kPage);
  const Handle handle = driver.create(kPage);
  driver.map(address, kPage, handle);
  driver.allow(address, kPage);
  driver.release(handle);
  CHECK(driver.memory().free == free - kPage);
  std::memset(at(address), 1, kPage);
  driver.unmap(address, kPage);
  CHECK(driver.memory().free == free);
  driver.unreserve(address, kPage);
}

TEST_CASE("host driver: calls with wrong ranges, sizes or handles are refused") {
  Driver& driver = test::driver();
  const Mapped memory(driver, 2 * kPage);
  const Handle other = driver.create(kPage);
  CHECK(code_of([&] { driver.map(memory.address, kPage, other); }) == 1);               // over a mapping
  CHECK(code_of([&] { driver.unmap(memory.address, kPage); }) == 1);                    // a part of a chunk
  CHECK(code_of([&] { driver.allow(memory.address + kPage, kPage); }) == 1);            // a part of a chunk
  CHECK(code_of([&] { driver.unreserve(memory.address, 2 * kPage); }) == 1);            // in use
  CHECK(code_of([&] { driver.create(kPage + 1); }) == 1);                               // no whole page
  CHECK(code_of([&] { driver.map(memory.address + 64 * kPage, kPage, 12345); }) == 1);  // no handle
  CHECK(code_of([&] { driver.create(round_up(driver.memory().free + 1, kPage)); }) == 2);
  driver.release(other);
  CHECK(code_of([&] { driver.release(other); }) == 1);
}

TEST_CASE("host driver: copies of one direction run in order, and a mark covers those before it") {
  Driver& driver = test::driver();
  const Mapped memory(driver, 4 * kMiB);
  const std::vector<std::byte> first = test::random_bytes(4 * kMiB, 1), second = test::random_bytes(4 * kMiB, 2);
  driver.copy_in(memory.address, first.data(), first.size());
  driver.copy_in(memory.address, second.data(), second.size());
  driver.fill(memory.address + 100, 50, 7);
  driver.copy_within(memory.address + kMiB, memory.address + 100, 50);
  const Driver::Ticket into = driver.mark(Direction::in);
  driver.wait(into);
  CHECK(driver.done(into));
  std::vector<std::byte> found(4 * kMiB);
  driver.copy_out(found.data(), memory.address, found.size());
  driver.wait(driver.mark(Direction::out));
  std::vector<std::byte> expected = second;
  std::memset(expected.data() + 100, 7, 50);
  std::memset(expected.data() + kMiB, 7, 50);
  CHECK(found == expected);
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

TEST_CASE("host driver: a call that reports an error afterwards has taken effect") {
  Driver& driver = test::driver();
  const Address address = driver.reserve(kPage);
  const Handle handle = driver.create(kPage);
  {
    const test::Armed armed(1, controls::Kind::after);
    CHECK(code_of([&] { driver.map(address, kPage, handle); }) == 999);
  }
  CHECK(code_of([&] { driver.map(address, kPage, handle); }) == 1);  // it holds a mapping
  const std::size_t free = driver.memory().free;
  {
    const test::Armed armed(1, controls::Kind::after);
    CHECK(code_of([&] { driver.create(kPage); }) == 999);
  }
  CHECK(driver.memory().free == free);  // no process has the handle
  driver.unmap(address, kPage);
  driver.release(handle);
  driver.unreserve(address, kPage);
}

}  // namespace
}  // namespace memsaver
