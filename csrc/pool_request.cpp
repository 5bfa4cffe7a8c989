#include "pool_request.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "link.h"

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

// The largest of these that is no larger than `limit`, and the first of such.
template <typename Piece, typename Size>
std::optional<Piece> take_largest(std::vector<Piece>& pieces, Size size, std::size_t limit) {
  auto best = pieces.end();
  for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
    const std::size_t bytes = std::invoke(size, *piece);
    if (bytes <= limit && (best == pieces.end() || bytes > std::invoke(size, *best))) best = piece;
  }
  if (best == pieces.end()) return std::nullopt;
  std::optional<Piece> found(std::move(*best));
  pieces.erase(best);
  return found;
}

}  // namespace

PoolRequest::PoolRequest(RequestHost& pool, const Needs& needs, Deadline deadline) : pool_(pool), deadline_(deadline) {
  if (needs.empty()) return;
  std::lock_guard lock(pool_.mutex_);
  number_ = pool_.open_locked(*this);
  ask_locked(Kind::want, merged(needs));
}

PoolRequest::~PoolRequest() {
  ready_.clear();  // go back by way of the pool, which locks
  if (number_ == 0) return;
  std::lock_guard lock(pool_.mutex_);
  pool_.close_locked(number_);
  for (Offer& offer : std::exchange(stock_, {})) pool_.give_back_locked(offer);
  if (!parted_) pool_.send_locked(message_of(Kind::close, {number_}));
}

Chunk PoolRequest::next(std::size_t limit, std::size_t fresh, bool wait) {
  if (std::optional<Chunk> chunk = take_largest(ready_, &Chunk::size, limit)) return std::move(*chunk);
  std::unique_lock lock(pool_.mutex_);
  for (;;) {
    if (parted_) pool_.throw_parted();
    if (const std::optional<Offer> offer = take_largest(stock_, &Offer::size, limit)) {
      lock.unlock();
      return pool_.import(*offer);
    }
    if (refused_) throw ChunkNeverAvailable("ask", "more than the shared pool has in all");
    if (!wait || number_ == 0) throw ChunkUnavailable("ask", "the shared pool has not given such a chunk");
    if (!comes_locked(limit)) {  // what still does, and what is here, may all be larger than this place
      if (!give_up_largest_locked() && fruitless_)
        throw ChunkNeverAvailable("ask", "the layout needs more than the shared pool has in all");
      const std::size_t size = chunk_class(limit);
      fruitless_ = true;
      ask_locked(Kind::more, {{size, std::min(size, fresh), size}});
    }
    if (stalled_locked()) {
      if (give_up_largest_locked()) continue;  // its memory may serve as smaller chunks
      if (Clock::now() >= deadline_ || waiting_is_over)
        throw ChunkUnavailable("ask", "the shared pool has no chunk to give");
    }
    if (wait_locked(lock)) continue;
    lock.unlock();
    between_looks();
    lock.lock();
  }
}

bool PoolRequest::gather() {
  std::unique_lock lock(pool_.mutex_);
  bool all = true;
  while (!to_come_.empty() && !refused_ && !parted_) {
    if (stalled_locked() || waiting_is_over) {
      all = false;
      break;
    }
    wait_locked(lock);
  }
  while (!stock_.empty() && !parted_) {
    const Offer offer = stock_.back();
    stock_.pop_back();
    lock.unlock();
    ready_.push_back(pool_.import(offer));
    lock.lock();
  }
  if (parted_) pool_.throw_parted();
  return all && !refused_;
}

void PoolRequest::offered_locked(Offer offer, std::size_t limit) {
  came_locked(limit, offer.size);
  answered_ = Clock::now();
  fruitless_ = false;
  stock_.push_back(offer);
}

void PoolRequest::stalled_locked(std::uint64_t messages, std::size_t left) {
  answered_ = Clock::now();
  if (messages != messages_) return;
  stalled_at_ = left > 0 ? messages : 0;
  if (left == 0) to_come_.clear();  // a grant and `more` may have crossed on the way
}

void PoolRequest::parted_locked() {
  for (Offer& offer : std::exchange(stock_, {}))
    if (offer.file >= 0) ::close(offer.file);
  parted_ = true;
}

void PoolRequest::ask_locked(wire::Kind kind, const Needs& needs) {
  std::vector<std::uint64_t> words = {number_};
  for (const Need& need : needs) {
    words.insert(words.end(), {need.limit, need.fresh, need.bytes});
    if (kind == Kind::more) exchange_locked(need.bytes);
    to_come_[need.limit] += need.bytes;
  }
  ++messages_;
  answered_ = Clock::now();
  pool_.send_locked(message_of(kind, std::move(words)));
}

bool PoolRequest::give_up_largest_locked() {
  const std::optional<Offer> largest = take_largest(stock_, &Offer::size, std::numeric_limits<std::size_t>::max());
  if (largest) pool_.give_back_locked(*largest);
  return largest.has_value();
}

void PoolRequest::came_locked(std::size_t limit, std::size_t bytes) {
  const auto found = to_come_.find(limit);
  if (found == to_come_.end()) return;
  found->second -= std::min(found->second, bytes);
  if (found->second == 0) to_come_.erase(found);
}

// What `more` asks for replaces as much of what was to come, the largest first; the broker counts alike.
void PoolRequest::exchange_locked(std::size_t bytes) {
  while (bytes > 0 && !to_come_.empty()) {
    const auto [limit, left] = *to_come_.rbegin();
    came_locked(limit, bytes);
    bytes -= std::min(bytes, left);
  }
}

// True when something has come meanwhile.
bool PoolRequest::wait_locked(std::unique_lock<std::mutex>& lock) {
  const bool told = pool_.changed_.wait_for(lock, kBetweenLooks) == std::cv_status::no_timeout;
  if (!stalled_locked() && !to_come_.empty() && !refused_ && !parted_ && Clock::now() > answered_ + kPatience)
    pool_.throw_silent();
  return told;
}

}  // namespace memsaver
