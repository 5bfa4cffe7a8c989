// The pool that all processes on a GPU borrow from, as one of its clients sees it: a source of chunks, and the way by
// which processes attach to each other's memory.
//
// A thread of the pool's own reads what the broker says. It holds `mutex_` for bookkeeping alone; nobody waits for the
// broker under it. Order of locks: Core::mutex, then `mutex_`; the thread takes Core::mutex, through Residents, with
// neither held.
//
// Handles: each chunk is imported once, when it first comes, and its handle is kept when the chunk goes back, until the
// broker asks for it to be dropped: a chunk that comes again is only a number.
//
// When the broker dies, chunks in use stay as they are: the handle keeps the memory. All else is let go, every demand
// fails with BrokerError, and the thread looks for a new broker, to which it brings the chunks in use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "chunk.h"
#include "link.h"
#include "pool_request.h"

namespace memsaver {

// Where a chunk lies within a region.
struct Placed {
  std::size_t offset;
  Handle handle;
  std::size_t size;
};

// What a pool asks of its process: who lives in the memory. Called by the pool's thread.
class Residents {
 public:
  struct Row {
    std::string tag;
    std::uint64_t allocated, mapped, backed_up, state, policy;
  };
  struct Owed {  // an attachment to memory of this process
    std::uint64_t lease;
    int pid;
    std::vector<Handle> chunks;
  };
  virtual ~Residents() = default;
  virtual std::vector<Row> rows() = 0;
  // Lends the chunks under these ranges of a region; throws Error where it cannot. `key`: see attach() below.
  virtual std::vector<Placed> lend(const std::string& key, std::uint64_t residence, std::uint64_t lease, int pid) = 0;
  virtual void returned(std::uint64_t lease) = 0;
  virtual std::vector<Owed> owed() = 0;
};

// What attach() got. The descriptors are the caller's.
struct Lease {
  struct Part {
    std::size_t offset;
    std::size_t size;
    int file;
  };
  std::uint64_t number = 0;
  std::vector<Part> parts;
};

std::uint64_t drawn_number();  // at random, never 0

class SharedPool final : public ChunkSource, private RequestHost {
 public:
  SharedPool(Driver& driver, Residents& residents);

  // Connects to the broker at this path, unless it is connected. Throws BrokerError.
  void join(const std::string& path);
  bool joined() const;
  void stop();                                      // ends the thread, once waiting is over
  std::uint64_t client() const { return client_; }  // this process, to brokers
  void set_scrub(bool wanted);

  std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline) override;
  void take_back(Chunk chunk) noexcept override;
  std::size_t give_up(std::size_t) override { return 0; }
  std::size_t idle_bytes() const override { return 0; }
  Supply look() override;
  void settle() override;

  std::string status();  // of the broker: JSON
  // A lease of another process's memory. `key`: "tag\npolicy\noffset\nsize[\noffset\nsize]...". Throws Error where the
  // owner refuses, BrokerError where nobody answers in time.
  Lease attach(std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key, Deadline deadline);
  void detach(std::uint64_t lease);

 private:
  static constexpr std::chrono::milliseconds kSearch{100};  // between two looks for a new broker
  struct Entry {
    Handle handle;
    std::size_t size;
    bool lent;  // in use here; else the broker has it, and its handle waits
  };
  struct Question {
    bool answered = false;
    std::uint64_t code = 0;  // of a refusal
    std::vector<wire::Message> answer;
  };

  // As requests ask.
  std::uint64_t open_locked(PoolRequest& request) override;
  void close_locked(std::uint64_t number) override;
  void send_locked(wire::Message message) override;
  void give_back_locked(Offer offer) override;
  Chunk import(Offer offer) override;
  [[noreturn]] void throw_parted() const override;
  [[noreturn]] void throw_silent() const override;

  // In shared_pool_thread.cpp: what the thread does, and how a broker is met and parted from.
  void serve();
  bool serve_once();
  void rejoin();
  std::unique_ptr<Link> meet(const std::string& path, bool* there = nullptr) const;
  void introduce(std::unique_ptr<Link> link);
  void part_locked(const std::string& why);
  void handle(wire::Message message);
  void granted(wire::Message message);
  void lend(const wire::Message& message);
  void drop(const std::vector<std::uint64_t>& ids);
  void report();
  void wake() const;

  void send(wire::Message message);
  void flush_gifts_locked();
  std::vector<wire::Message> ask_broker(wire::Message message, Deadline deadline, const std::string& who, bool looks);
  void detach_locked(std::uint64_t lease);
  void scrub(Handle handle, std::size_t size);

  Driver& driver_;
  Residents& residents_;
  const std::uint64_t client_;
  const File bell_;     // an eventfd that wakes the thread
  std::mutex meeting_;  // one at a time meets a broker; taken before `mutex_`
  std::string path_;
  std::unique_ptr<Link> link_;  // null: no broker
  std::uint64_t meetings_ = 0;  // with brokers, this one included
  std::string parted_ = "it was never joined";
  bool scrub_ = false;
  std::unordered_map<std::uint64_t, Entry> chunks_;  // by the broker's number
  std::unordered_map<Handle, std::uint64_t> numbers_;
  std::vector<std::uint64_t> gifts_;  // to be given back
  std::map<std::uint64_t, PoolRequest*> requests_;
  std::map<std::uint64_t, Question> questions_;
  std::set<std::uint64_t> attached_;     // leases of others' memory
  std::vector<std::uint64_t> detached_;  // while there was no broker to tell
  std::uint64_t last_number_ = 0;        // of requests and questions
  std::mutex scrubbing_;
  Address scratch_ = 0;                         // addresses for one chunk
  std::chrono::milliseconds search_ = kSearch;  // until the next look for a broker
  std::thread thread_;
};

}  // namespace memsaver
