// Makes a chosen driver or file call fail, so that tests reach every failure point of a transition. Disarmed unless a
// test arms it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

namespace memsaver {

class Faults {
 public:
  // The `nth` call from now (1: the next) throws, once. If `only` is given, calls of this name are counted alone.
  // `kind`: "error"; "memory": the error of a full device; "after": the call succeeds and then reports an error;
  // "lost": the context is dead from this call on.
  void arm(std::uint64_t nth, const std::string& kind, const std::string& only = "");
  void disarm();
  std::uint64_t calls() const { return calls_; }  // since arm() or disarm()

  // Makes a driver call. `undo` releases the result (a handle, a descriptor, addresses) if an injected error follows
  // the call.
  template <typename Act>
  auto around(const char* call, Act act) {
    return around(call, std::move(act), [](const auto&) {});
  }
  template <typename Act, typename Undo>
  auto around(const char* call, Act act, Undo undo) {
    const bool fails = begin(call);
    if constexpr (std::is_void_v<decltype(act())>) {
      act();
      if (fails) fail_after(call);
    } else {
      auto made = act();
      if (fails) {
        undo(made);
        fail_after(call);
      }
      return made;
    }
  }
  // For a call that is made elsewhere: "after" acts as "error".
  void check(const char* call);

 private:
  enum class Kind { error, memory, after, lost };
  bool begin(const char* call);  // throws errors that come before the call; true: the error comes after it
  [[noreturn]] static void fail_after(const char* call);

  std::mutex mutex_;
  std::atomic<std::uint64_t> calls_ = 0;
  std::uint64_t fail_at_ = 0;  // 0: disarmed
  Kind kind_ = Kind::error;
  std::string only_;
};
Faults& faults();

}  // namespace memsaver
