#include "host/stream.h"
#include "support.h"

namespace memsaver {
namespace {

using host::Stream;

// Streams have threads that live as long as the process.
Stream& fresh_stream() { return *new Stream; }

TEST_CASE("host stream: work runs in order, and a wait returns when it has") {
  Stream& stream = fresh_stream();
  std::vector<int> ran;
  for (int number = 0; number < 100; ++number) stream.submit([&ran, number] { ran.push_back(number); });
  CHECK(stream.submitted() == 100);
  stream.wait(100);
  CHECK(stream.done(100));
  for (int number = 0; number < 100; ++number) CHECK(ran.at(static_cast<std::size_t>(number)) == number);
}

TEST_CASE("host stream: abandoned work never runs, and no wait includes it") {
  Stream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  std::atomic<bool> began = false, go_on = false;
  stream.submit([&] {
    began = true;
    while (!go_on) std::this_thread::yield();
  });
  stream.submit([&] { ++ran; });
  while (!began) std::this_thread::yield();
  stream.abandon();
  CHECK_FALSE(stream.done(1));  // under way
  go_on = true;
  stream.wait(2);
  CHECK(ran == 0);
  stream.submit([&] { ran += 10; });
  stream.wait(3);
  CHECK(ran == 10);
}

TEST_CASE("host stream: threads submit and wait side by side") {
  Stream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread)
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        stream.submit([&] { ++ran; });
        stream.wait(stream.submitted());
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(ran == 300);
}

}  // namespace
}  // namespace memsaver
