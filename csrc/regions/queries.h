// Requests of the threads of the pools to threads of Python. No thread of a pool may wait for the GIL, so it only notes
// the request.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace memsaver {

class Queries {
 public:
  // Notes a query. Returns whether a thread has called next(), and answers.
  bool note(const std::string& query);
  // Waits for a query and returns it; nullopt: the interpreter exits.
  std::optional<std::string> next();
  void stop();  // ends next(), for good

 private:
  std::mutex mutex_;  // no other lock is taken under it
  std::condition_variable changed_;
  std::set<std::string> noted_;
  bool served_ = false, stopped_ = false;
};

// None is ever destroyed, as Core.
Queries& ledger_queries();  // names of devices: a broker wants the ledger of this process, which has figures of torch
Queries& cache_queries();   // names of devices: see reclaimer.h. kWaitMark and a name: a call waits for memory there
constexpr char kWaitMark = '!';

}  // namespace memsaver
