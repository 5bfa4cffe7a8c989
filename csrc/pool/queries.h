// Requests of threads of the core to a thread of Python. A thread that must not wait for the GIL only notes them.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace memsaver {

class Queries {
 public:
  // Notes a query, with the device that it is about. Returns whether a thread has called next(), and answers.
  // "caches": return the memory that torch caches, see regions/reclaimer.h. "report": send the broker a report of this
  // process. "wait": a call has waited long for memory of the shared pool. "copies": offered contents were copied;
  // after the device come the nanoseconds of the begin and of the end, and the bytes.
  bool note(const std::string& kind, const std::string& text) {
    std::lock_guard lock(mutex_);
    if (!served_ || stopped_) return false;
    noted_.emplace(kind, text);
    changed_.notify_all();
    return true;
  }
  // Waits for a query and returns it; nullopt: the interpreter exits.
  std::optional<std::pair<std::string, std::string>> next() {
    std::unique_lock lock(mutex_);
    served_ = true;
    changed_.wait(lock, [this] { return stopped_ || !noted_.empty(); });
    if (stopped_) return std::nullopt;
    return std::move(noted_.extract(noted_.begin()).value());
  }
  void stop() {  // ends next(), for good
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;  // no other lock is taken under it
  std::condition_variable changed_;
  std::set<std::pair<std::string, std::string>> noted_;
  bool served_ = false, stopped_ = false;
};

inline Queries& queries() {
  static auto* only = new Queries;  // never destroyed, as Core
  return *only;
}

}  // namespace memsaver
