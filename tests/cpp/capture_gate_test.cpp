#include <doctest/doctest.h>

#include "regions/device_wait.h"

namespace memsaver {
namespace {

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
