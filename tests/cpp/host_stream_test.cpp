#include "driver/host_stream.h"

#include "support.h"

namespace memsaver {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Streams have threads that live as long as the process.
HostStream& fresh_stream() { return *new HostStream; }

struct VirtualTime {
  VirtualTime() { use_virtual_clock(true); }
  ~VirtualTime() { use_virtual_clock(false); }
};

TEST_CASE("host stream: work runs in order, and a wait returns when it has") {
  HostStream& stream = fresh_stream();
  std::vector<int> ran;
  for (int number = 0; number < 100; ++number) stream.submit([&ran, number] { ran.push_back(number); });
  CHECK(stream.submitted() == 100);
  stream.wait(100);
  CHECK(stream.done(100));
  for (int number = 0; number < 100; ++number) CHECK(ran.at(static_cast<std::size_t>(number)) == number);
}

TEST_CASE("host stream: held work runs at its release, and later work waits") {
  HostStream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  stream.submit([&] { ++ran; }, kNever);
  stream.submit([&] { ++ran; });
  CHECK_FALSE(stream.done(1));
  CHECK(ran == 0);
  stream.release();
  CHECK(ran == 2);
  CHECK(stream.done(2));
}

TEST_CASE("host stream: on a virtual clock work runs at its time, and a wait advances the clock") {
  const VirtualTime time;
  HostStream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  stream.submit([&] { ++ran; }, now() + seconds(10));
  stream.submit([&] { ++ran; }, now() + seconds(3));  // behind the first
  stream.submit([&] { ++ran; }, now() + seconds(12));
  sleep_for(seconds(9));
  CHECK_FALSE(stream.done(1));
  CHECK(ran == 0);
  sleep_for(seconds(1));
  CHECK(stream.done(2));
  CHECK(ran == 2);
  const Deadline began = now();
  stream.wait(3);
  CHECK(now() - began == seconds(2));
  CHECK(ran == 3);
}

TEST_CASE("host stream: abandoned work never runs, and no wait includes it") {
  HostStream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  stream.submit([&] { ++ran; }, kNever);
  stream.submit([&] { ++ran; });
  std::thread waiter([&] { stream.wait(2); });
  stream.abandon();
  CHECK(stream.done(2));
  stream.release();  // the end of this test where it fails
  waiter.join();
  CHECK(ran == 0);
  stream.submit([&] { ran += 10; });
  stream.wait(3);
  CHECK(ran == 10);
}

TEST_CASE("host stream: work under way is waited for when the rest is abandoned") {
  HostStream& stream = fresh_stream();
  std::atomic<bool> began = false, go_on = false, ended = false;
  stream.submit([&] {
    began = true;
    while (!go_on) std::this_thread::yield();
    ended = true;
  });
  stream.submit([] {}, kNever);
  while (!began) std::this_thread::yield();
  stream.abandon();
  CHECK_FALSE(stream.done(1));
  go_on = true;
  stream.wait(2);
  CHECK(ended);
}

TEST_CASE("host stream: threads submit, wait and release side by side") {
  HostStream& stream = fresh_stream();
  std::atomic<int> ran = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 100; ++round) {
        stream.submit([&] { ++ran; }, thread == 0 ? kNever : now() + milliseconds(round % 2));
        const std::uint64_t number = stream.submitted();
        stream.release();
        stream.wait(number);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(ran == 300);
}

}  // namespace
}  // namespace memsaver
