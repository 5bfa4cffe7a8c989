#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "regions/device_wait.h"

namespace memsaver {
namespace {

TEST_CASE("capture gate: a capture begins after all operations under way have ended") {
  CaptureGate gate;
  CaptureGate::Pass first(gate), second(gate);
  std::atomic<bool> begun = false;
  std::thread capture([&] {
    gate.capture_begins();
    begun = true;
  });
  first.end();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for a capture that does not wait
  CHECK(!begun);
  CHECK(!gate.capturing());
  second.end();
  capture.join();
  CHECK(gate.capturing());
}

TEST_CASE("capture gate: no operation begins before the last capture has ended") {
  CaptureGate gate;
  gate.capture_begins();
  gate.capture_begins();
  CHECK(!CaptureGate::Pass(gate));
  gate.capture_ends();
  CHECK(!CaptureGate::Pass(gate));
  gate.capture_ends();
  CHECK(CaptureGate::Pass(gate));
  gate.capture_ends();  // one too many is passed over
  CHECK(CaptureGate::Pass(gate));
}

}  // namespace
}  // namespace memsaver
