// Queries of brokers for the ledger of this process. The threads of the pools note them. A thread of Python answers,
// since the ledger has figures of torch, and no thread of a pool may wait for the GIL.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace memsaver {

class LedgerQueries {
 public:
  // Notes a query for a device. Returns whether a thread has called next(), and answers.
  bool note(const std::string& device);
  // Waits for a query. Returns its device; nullopt: the interpreter exits.
  std::optional<std::string> next();
  void stop();  // ends next(), for good

 private:
  std::mutex mutex_;  // no other lock is taken under it
  std::condition_variable changed_;
  std::set<std::string> noted_;
  bool served_ = false, stopped_ = false;
};

LedgerQueries& ledger_queries();  // never destroyed, as Core

}  // namespace memsaver
