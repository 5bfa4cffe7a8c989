// A demand of this process at the broker, and the granted chunks that its caller has not taken yet. The broker records
// the bytes that are still to be granted, and reports them with each answer.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory/chunk.h"
#include "pool/wire.h"

namespace memsaver {

// A granted chunk that is not a Chunk yet.
struct Grant {
  std::uint64_t id;
  std::size_t size;
  bool foreign;              // another client had it last
  int file;                  // -1: this process has a handle of the chunk
  std::uint64_t connection;  // the number of the connection on which the grant came
};

constexpr auto kLongWait = std::chrono::seconds(1);

class SharedPool;

// Guarded by its pool's mutex.
class PoolRequest final : public ChunkRequest {
 public:
  // Opens a demand for these needs, if there are any. Throws BrokerError.
  PoolRequest(SharedPool& pool, const Needs& needs, Deadline deadline, Deadline whole);
  ~PoolRequest() override;
  Chunk next(std::size_t limit, std::size_t fresh, WaitFor wait) override;
  std::uint64_t number() const override { return number_; }
  std::optional<MemoryWait> waited() const override;

  // Called by the pool's thread.
  void granted_locked(Grant grant) {
    nothing_since_exchange_ = is_hopeless_ = false;
    heard_ = Clock::now();
    grants_.push_back(grant);
  }
  // Records the bytes that the broker has still to grant, by their limit, after it received so many messages of this
  // demand.
  void update_locked(std::uint64_t messages, std::map<std::size_t, std::size_t> remaining) {
    answered_ = Clock::now();
    answered_messages_ = messages;  // fewer than were sent: another answer follows
    remaining_ = std::move(remaining);
  }
  void stalled_locked(std::uint64_t messages, std::map<std::size_t, std::size_t> remaining, bool offers) {
    update_locked(messages, std::move(remaining));
    if (!remaining_.empty()) stalled_messages_ = messages;
    offers_ = offers;
    heard_ = Clock::now();
  }
  void refused_locked() { refused_ = true; }
  void disconnected_locked();
  // The broker has named the holders. `more`: some of them will return memory by themselves.
  void holders_locked(bool more, std::vector<std::pair<int, std::size_t>> holders) {
    is_hopeless_ = !more;
    heard_ = Clock::now();
    if (waited_ && waited_->holders.empty()) waited_->holders = std::move(holders);
  }
  // For reports: bytes that are still to be granted, 0 if the request does not wait, and the seconds since its begin.
  std::size_t waiting_locked() const {
    std::size_t bytes = 0;
    if (!disconnected_ && stalled_locked())
      for (const auto& [limit, remaining] : remaining_) bytes += remaining;
    return bytes;
  }
  double seconds_locked() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  void send_parts_locked(wire::Kind kind, const Needs& needs);
  bool give_back_largest_locked();
  bool stalled_locked() const { return stalled_messages_ == sent_messages_; }
  bool complete_locked() const { return answered_messages_ == sent_messages_ && remaining_.empty(); }
  // Whether the broker may still grant a chunk of at most `limit`.
  bool expects_locked(std::size_t limit) const {
    return answered_messages_ != sent_messages_ || (!remaining_.empty() && remaining_.begin()->first <= limit);
  }
  bool expects_offers_locked() const;  // the broker asks clients for the chunks that they offer
  bool wait_locked(std::unique_lock<std::mutex>& lock);

  SharedPool& pool_;
  const Deadline deadline_, whole_;
  std::uint64_t number_ = 0;                      // 0: no demand was opened
  std::map<std::size_t, std::size_t> remaining_;  // bytes to be granted, by their limit, at the broker's last answer
  std::uint64_t sent_messages_ = 0;               // of this demand
  std::uint64_t answered_messages_ = 0;           // of these, received by the broker before its last answer
  std::uint64_t stalled_messages_ = 0;            // of these, received before the broker reported a stall
  Clock::time_point answered_;                    // time of the last answer; at first, of the last message
  const Clock::time_point began_ = Clock::now();
  bool is_hopeless_ = false;      // others have returned their cached memory, since the last grant and the last message
  bool offers_ = false;           // clients offered chunks at the last stall
  Clock::time_point heard_ = {};  // the last grant, stall or report of the holders
  bool is_long_ = false;          // and a thread of Python was told
  std::optional<MemoryWait> waited_;
  std::vector<Grant> grants_;
  bool nothing_since_exchange_ = false;  // no chunk was granted since the last `exchange`
  bool refused_ = false, disconnected_ = false;
};

}  // namespace memsaver
