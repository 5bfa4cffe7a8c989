// A demand of this process at the broker: what is still to come of it, and what has come and is not taken yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "chunk.h"
#include "wire.h"

namespace memsaver {

// A chunk that was granted, and is not imported yet or again.
struct Offer {
  std::uint64_t id;
  std::size_t size;
  bool scrub;
  int file;               // -1: there is a handle
  std::uint64_t meeting;  // with the broker that granted it
};

class PoolRequest;

// What requests share with their pool, and ask of it. What is called ..._locked is called with `mutex_` held.
class RequestHost {
 public:
  virtual ~RequestHost() = default;

 protected:
  friend class PoolRequest;
  virtual std::uint64_t open_locked(PoolRequest& request) = 0;  // returns its number. Throws BrokerError
  virtual void close_locked(std::uint64_t number) = 0;
  virtual void send_locked(wire::Message message) = 0;
  virtual void give_back_locked(Offer offer) = 0;
  virtual Chunk import(Offer offer) = 0;  // without the lock
  [[noreturn]] virtual void throw_parted() const = 0;
  [[noreturn]] virtual void throw_silent() const = 0;  // the broker does not answer

  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

// Guarded by its pool's mutex.
class PoolRequest final : public ChunkRequest {
 public:
  // Asks for these, if any. Throws BrokerError.
  PoolRequest(RequestHost& pool, const Needs& needs, Deadline deadline);
  ~PoolRequest() override;
  Chunk next(std::size_t limit, std::size_t fresh, bool wait) override;
  // Turns what has come into chunks as well: next() without waiting then makes no call of the driver.
  bool gather() override;

  // Called by the pool's thread.
  void offered_locked(Offer offer, std::size_t limit);
  void stalled_locked(std::uint64_t messages, std::size_t left);
  void refused_locked() { refused_ = true; }
  void parted_locked();

 private:
  void ask_locked(wire::Kind kind, const Needs& needs);
  bool give_up_largest_locked();
  bool stalled_locked() const { return stalled_at_ == messages_; }
  bool comes_locked(std::size_t limit) const { return !to_come_.empty() && to_come_.begin()->first <= limit; }
  void came_locked(std::size_t limit, std::size_t bytes);
  void exchange_locked(std::size_t bytes);
  bool wait_locked(std::unique_lock<std::mutex>& lock);

  RequestHost& pool_;
  const Deadline deadline_;
  std::uint64_t number_ = 0;                     // 0: nothing was asked for
  std::map<std::size_t, std::size_t> to_come_;   // bytes, by their limit
  std::uint64_t messages_ = 0, stalled_at_ = 0;  // of this demand: sent, and when it stalled
  Clock::time_point answered_;
  std::vector<Offer> stock_;
  std::vector<Chunk> ready_;  // the caller's alone
  bool fruitless_ = false;    // the last `more` has brought nothing yet
  bool refused_ = false, parted_ = false;
};

}  // namespace memsaver
