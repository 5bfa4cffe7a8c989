// Excludes device-wide operations during graph captures: a device-wide wait or mark breaks a capture on any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace memsaver {

class CaptureGate {
 public:
  void capture_begins();  // waits for device-wide operations under way
  void capture_ends();
  bool capturing() const;

  // Permission for a device-wide operation, as long as it lives. False: a capture is under way.
  class Pass {
   public:
    explicit Pass(CaptureGate& gate);
    Pass(Pass&& other) noexcept;
    Pass& operator=(Pass&&) = delete;
    ~Pass() { end(); }
    explicit operator bool() const { return gate_ != nullptr; }
    void end();

   private:
    CaptureGate* gate_;
  };

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t captures_ = 0;
  std::size_t operations_ = 0;  // device-wide operations under way
};

}  // namespace memsaver
