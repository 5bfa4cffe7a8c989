// The pool that all processes on a GPU borrow from, on the side of a client: a source of chunks.
//
// Threads: a thread of the pool reads the broker's messages. It holds `mutex_` for bookkeeping only, and no thread
// waits for the broker, or calls the driver, with this lock held. Order of locks: Core::mutex, then `mutex_`. The
// thread takes other locks, through `reclaim`, with neither held.
//
// Handles: each chunk is imported once, at its first grant. Its handle is kept when the chunk is given back, until the
// broker sends `drop`. So a chunk that is granted again is only a number.
//
// The end of a broker: chunks in use are kept, since the handle keeps the memory. The handles of other chunks are
// released, and each demand fails with BrokerError. The thread searches for a new broker, and sends it an inventory of
// the chunks in use, without descriptors: the driver exports no imported memory, and kept ones would take a
// descriptor for each chunk, which forked children inherit.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "memory/chunk.h"
#include "pool/link.h"
#include "pool/pool_request.h"

namespace memsaver {

class SharedPool final : public ChunkSource {
 public:
  // `reclaim`: called by the pool's thread if the broker asks for cached memory, or for so many bytes of offered chunks
  // for a demand. It returns at once, and send_reclaimed() follows.
  using ReclaimFrom = std::function<void(std::size_t bytes, std::uint64_t demand)>;
  SharedPool(Driver& driver, ReclaimFrom reclaim);

  // Connects to the broker at this path, unless there is a connection. Throws BrokerError.
  void join(const std::string& path);
  bool joined();
  void stop(Deadline deadline);  // waits for the thread's end. interpreter_exits has to be set

  std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline, Deadline whole) override {
    return std::make_unique<PoolRequest>(*this, needs, deadline, whole);
  }
  void take_back(Chunk chunk) noexcept override;
  std::size_t idle_bytes() const override { return 0; }
  Supply look() override;
  // Other processes can have the chunks that were given back at once, and not only after the next turn of the thread.
  void settle() override {
    std::lock_guard lock(mutex_);
    if (link_ != nullptr) send_returned_locked();
  }

  // Descriptors of memory, which the caller closes: the broker's for chunks of the pool, since the driver exports no
  // imported memory, and the driver's for others. At most kMostDescriptors handles, which are in use. Throws
  // BrokerError, also for a chunk of a broker that has ended, and DriverError.
  std::vector<File> descriptors_of(const std::vector<Handle>& handles);

  std::string status(Clock::duration timeout) {  // of the broker: JSON
    return call_broker(wire::Kind::status, Clock::now() + timeout, true).text;
  }
  // Answers the broker's `query`.
  void send_report(const std::string& text) { send(wire::message_of(wire::Kind::report, {}, text)); }
  void send_reclaimed(bool more, std::size_t unused, const std::string& why) {  // answers the broker's `reclaim`
    send(wire::message_of(wire::Kind::reclaimed, {more ? 1U : 0U, unused}, why));
  }
  void send_offers(std::size_t bytes) {  // unless the broker has this figure
    std::lock_guard lock(mutex_);
    if (std::exchange(offers_, bytes) != bytes) send_locked(wire::message_of(wire::Kind::offers, {bytes}));
  }
  // The calls of this process that wait for memory, and from whom, as far as the broker has told.
  using Wait = std::pair<std::size_t, double>;  // bytes, seconds
  struct Holder {
    int pid;
    std::size_t bytes;
    std::optional<std::size_t> unused;
    std::string why;
  };
  std::pair<std::vector<Wait>, std::vector<Holder>> waits();
  std::size_t used_bytes() {  // of chunks of the pool that are in use here
    std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [id, entry] : chunks_)
      if (entry.in_use) bytes += entry.size;
    return bytes;
  }
  bool outlives_broker() {  // whether a chunk here is from before the present connection, if there is one
    std::lock_guard lock(mutex_);
    return std::any_of(chunks_.begin(), chunks_.end(), [](const auto& each) { return each.second.is_older; });
  }

 private:
  static constexpr std::chrono::milliseconds kSearch{100};  // between two searches for a new broker
  struct Entry {
    Handle handle;
    std::size_t size;
    bool in_use;            // false: the broker has the chunk, and this process only its handle
    bool is_older = false;  // than the present connection, if there is one
  };
  using Entries = std::unordered_map<std::uint64_t, Entry>;  // by the broker's number of the chunk
  struct Call {                                              // a message that waits for its answer
    bool ended = false;                                      // answered, or disconnected
    std::optional<wire::Message> answer;                     // or the refusal
  };

  friend class PoolRequest;
  std::uint64_t open_locked(PoolRequest& request) {  // returns its number. Throws BrokerError
    if (link_ == nullptr) throw_disconnected();
    if (silent_) throw_unanswered_locked();
    requests_[++last_number_] = &request;
    return last_number_;
  }
  void send_locked(wire::Message message);
  void give_back_locked(Grant grant);
  Chunk import(Grant grant);  // without the lock
  [[noreturn]] void throw_disconnected() const;
  [[noreturn]] void throw_unanswered_locked();  // an answer is late, or was late and has not come since

  // In shared_pool_thread.cpp: the thread, connections and their ends.
  void serve();
  bool serve_once();
  void reconnect();
  std::unique_ptr<Link> connect(const std::string& path, bool* accepted = nullptr) const;
  void restore_state(std::unique_ptr<Link> connected);
  void send_inventory_locked(Link& link) const;
  void forget_returned_locked();
  void disconnect_locked(const std::string& reason);
  Entries::iterator forget_locked(Entries::iterator entry);
  void release_handles();
  void handle(wire::Message message);
  void handle_grant(wire::Message message);
  void handle_refusal_locked(wire::Message message);
  void end_call_locked(std::uint64_t serial, wire::Message answer);
  void handle_holders_locked(const wire::Message& message);
  void handle_drop(const std::vector<std::uint64_t>& ids);
  void wake() const;

  void send(wire::Message message);
  void send_returned_locked();
  wire::Message call_broker(wire::Kind kind, Deadline deadline, bool interruptible,
                            const std::vector<std::uint64_t>& words = {});

  Driver& driver_;
  const ReclaimFrom reclaim_;
  const std::uint64_t client_;
  const File bell_;        // an eventfd that wakes the thread
  std::mutex connecting_;  // held by the one thread that connects; taken before `mutex_`
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string path_;
  std::unique_ptr<Link> link_;                     // null: no connection
  std::uint64_t connections_ = 0;                  // so far, the present one included
  std::string reason_ = "no connection was made";  // of the missing connection
  bool silent_ = false;  // a demand was not answered in time, and the broker has sent nothing since: calls fail at once
  Entries chunks_;
  std::unordered_map<Handle, std::uint64_t> numbers_;
  std::vector<Chunk> released_;          // handles that the thread is to release
  std::vector<std::uint64_t> returned_;  // words of the next `give_back`
  std::size_t offers_ = 0;               // of the last `offers`
  std::map<std::uint64_t, PoolRequest*> requests_;
  std::map<std::uint64_t, Call> calls_;
  std::vector<Holder> holders_;                 // of the last `holders`; empty while no request waits
  std::uint64_t last_number_ = 0;               // of requests and calls
  std::chrono::milliseconds search_ = kSearch;  // until the next search for a broker
  Worker worker_;
};

}  // namespace memsaver
