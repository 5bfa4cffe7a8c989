#include "pool/pool_request.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "pool/queries.h"
#include "pool/shared_pool.h"

namespace memsaver {
namespace {

using wire::Kind;
using wire::message_of;

Needs merged(const Needs& needs) {
  Needs found;
  for (const Need& need : needs) {
    const auto same = std::find_if(found.begin(), found.end(), [&](const Need& other) {
      return other.limit == need.limit && other.fresh == need.fresh;
    });
    if (same != found.end())
      same->bytes += need.bytes;
    else
      found.push_back(need);
  }
  return found;
}

}  // namespace

PoolRequest::PoolRequest(SharedPool& pool, const Needs& needs, Deadline deadline, Deadline whole)
    : pool_(pool), deadline_(deadline), whole_(whole) {
  if (needs.empty()) return;
  std::lock_guard lock(pool_.mutex_);
  number_ = pool_.open_locked(*this);
  send_parts_locked(Kind::demand, merged(needs));
}

// The broker learns the end before the chunks return: it would grant them to this demand again.
PoolRequest::~PoolRequest() {
  if (number_ == 0) return;
  std::lock_guard lock(pool_.mutex_);
  pool_.requests_.erase(number_);
  if (!disconnected_) pool_.send_locked(message_of(Kind::close, {number_}));
  for (Grant& grant : grants_) pool_.give_back_locked(grant);
}

Chunk PoolRequest::next(std::size_t limit, std::size_t fresh, WaitFor wait) {
  std::unique_lock lock(pool_.mutex_);
  for (;;) {
    if (disconnected_) pool_.throw_disconnected();
    if (const std::optional<Grant> grant = take_largest(grants_, &Grant::size, limit)) {
      lock.unlock();
      return pool_.import(*grant);
    }
    if (refused_) throw ChunkNeverAvailable("ask", "more than the shared pool has in all");
    const bool expects_offers = wait == WaitFor::offers && expects_offers_locked();
    const bool ends = (stalled_locked() && !expects_offers) || waiting_is_over();
    if (number_ == 0 || (wait <= WaitFor::offers && ends) || (wait == WaitFor::none && complete_locked()))
      throw ChunkUnavailable("ask", "the shared pool has granted no such chunk");
    if (wait != WaitFor::none && !expects_locked(limit)) {
      // All granted chunks, and all that are to come, may be too large for this place.
      if (!give_back_largest_locked() && nothing_since_exchange_)
        throw ChunkNeverAvailable("ask", "the layout needs more than the shared pool has in all");
      const std::size_t size = chunk_class(limit);
      nothing_since_exchange_ = true;
      send_parts_locked(Kind::exchange, {{size, std::min(size, fresh), size}});
    }
    if (stalled_locked()) {
      if (give_back_largest_locked()) continue;  // the broker may replace it by smaller chunks
      if (waiting_is_over() ||
          (!expects_offers_locked() && (Clock::now() >= deadline_ || (wait == WaitFor::caches && is_hopeless_))))
        throw ChunkUnavailable("ask", "the shared pool has no free chunk");
    }
    if (wait_locked(lock)) continue;
    lock.unlock();
    WaitsEndWith::look();
    lock.lock();
  }
}

bool PoolRequest::expects_offers_locked() const {
  const Clock::time_point at = Clock::now();
  return offers_ && !is_hopeless_ && at < whole_ && at < heard_ + kAnswerTimeout;
}

void PoolRequest::disconnected_locked() {
  for (Grant& grant : std::exchange(grants_, {}))
    if (grant.file >= 0) ::close(grant.file);
  disconnected_ = true;
}

void PoolRequest::send_parts_locked(wire::Kind kind, const Needs& needs) {
  std::vector<std::uint64_t> words = {number_};
  for (const Need& need : needs) words.insert(words.end(), {need.limit, need.fresh, need.bytes});
  ++sent_messages_;
  is_hopeless_ = false;
  answered_ = Clock::now();
  pool_.send_locked(message_of(kind, std::move(words)));
}

bool PoolRequest::give_back_largest_locked() {
  const std::optional<Grant> largest = take_largest(grants_, &Grant::size, std::numeric_limits<std::size_t>::max());
  if (largest) pool_.give_back_locked(*largest);
  return largest.has_value();
}

std::optional<MemoryWait> PoolRequest::waited() const {
  std::lock_guard lock(pool_.mutex_);
  return waited_;
}

// Waits for a change. Returns false if none was notified within kBetweenLooks.
bool PoolRequest::wait_locked(std::unique_lock<std::mutex>& lock) {
  const std::size_t lacks = waiting_locked();
  if (!waited_ && lacks > 0) waited_ = MemoryWait{lacks, Clock::now(), Clock::now()};
  if (!is_long_ && lacks > 0 && Clock::now() >= began_ + kLongWait) {
    is_long_ = true;
    queries().note("wait", pool_.driver_.name);
  }
  const bool notified = pool_.changed_.wait_for(lock, kBetweenLooks) == std::cv_status::no_timeout;
  if (waited_) waited_->ended = Clock::now();
  if (!stalled_locked() && !complete_locked() && !refused_ && !disconnected_ &&
      (Clock::now() > answered_ + kAnswerTimeout || pool_.silent_))
    pool_.throw_unanswered_locked();
  return notified;
}

}  // namespace memsaver
