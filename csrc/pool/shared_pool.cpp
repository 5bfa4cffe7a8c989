#include "pool/shared_pool.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

namespace memsaver {
namespace {

using wire::Kind;
using wire::Message;
using wire::message_of;

constexpr auto kUsageTimeout = std::chrono::seconds(1);
constexpr auto kDescriptorsTimeout = std::chrono::seconds(5);  // less than a receiver waits for the owner

std::uint64_t drawn_number() {
  std::random_device source;
  return ((std::uint64_t{source()} << 32) ^ source()) >> 1 | 1;  // never 0
}

}  // namespace

SharedPool::SharedPool(Driver& driver, ReclaimFrom reclaim)
    : driver_(driver),
      reclaim_(std::move(reclaim)),
      client_(drawn_number()),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (bell_.get() < 0) throw DriverError("eventfd", errno, "no descriptor is left");
}

void SharedPool::throw_disconnected() const {
  throw BrokerError("no broker of the shared pool of " + driver_.name + ": " + reason_ +
                        ". Memory in use stays as it is; start another with `memsaver broker`, or with " +
                        "configure(pool='shared'), and this process joins it",
                    path_);
}

// Asks for figures, which the broker sends as soon as it runs: the next message ends the silence.
void SharedPool::throw_unanswered_locked() {
  if (!std::exchange(silent_, true)) send_locked(message_of(Kind::usage, {++last_number_}));
  throw BrokerError("the broker at " + path_ + " does not answer", path_);
}

void SharedPool::give_back_locked(Grant grant) {
  if (grant.file >= 0) ::close(grant.file);
  if (link_ == nullptr || connections_ != grant.connection) return;         // a later broker does not know the chunk
  if (grant.file >= 0) send_locked(message_of(Kind::dropped, {grant.id}));  // it was not imported
  returned_.insert(returned_.end(), {grant.id, grant.foreign});
  wake();
}

void SharedPool::send_returned_locked() {
  const std::vector<std::uint64_t> words = std::exchange(returned_, {});
  for (std::size_t at = 0; at < words.size(); at += 2 * wire::kMostChunks) {
    const std::size_t end = std::min(words.size(), at + 2 * wire::kMostChunks);
    link_->send(message_of(Kind::give_back, {words.begin() + static_cast<std::ptrdiff_t>(at),
                                             words.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
}

void SharedPool::send(Message message) {
  std::lock_guard lock(mutex_);
  send_locked(std::move(message));
}

// Sends the chunks that were given back first, since they were given back before this message was made.
void SharedPool::send_locked(Message message) {
  if (link_ == nullptr) return;
  send_returned_locked();
  link_->send(std::move(message));
  if (!link_->flush()) wake();
}

void SharedPool::take_back(Chunk chunk) noexcept {
  try {
    std::lock_guard lock(mutex_);
    const auto number = numbers_.find(chunk.handle());
    if (number == numbers_.end()) return;  // its end releases it
    if (link_ == nullptr) {
      chunks_.erase(number->second);
      numbers_.erase(number);
      return;
    }
    if (returned_.empty()) wake();
    returned_.insert(returned_.end(), {number->second, chunk.foreign()});
    chunks_.at(number->second).in_use = false;
    static_cast<void>(std::move(chunk).keep());
  } catch (const std::exception&) {
    // No host memory for the number: the broker gets the chunk back at the end of this process.
  }
}

// Called by the thread that needs the chunk, so that the pool's thread makes no call of the driver.
Chunk SharedPool::import(Grant grant) {
  Handle handle = 0;
  {
    std::lock_guard lock(mutex_);
    if (link_ == nullptr || connections_ != grant.connection) {
      if (grant.file >= 0) ::close(grant.file);
      throw_disconnected();
    }
    if (grant.file < 0) {
      const auto found = chunks_.find(grant.id);
      if (found == chunks_.end()) {
        disconnect_locked("it granted a chunk of which this process has no handle");
        wake();
        throw_disconnected();
      }
      handle = found->second.handle;
      found->second.in_use = true;
    }
  }
  if (grant.file >= 0) {
    try {
      handle = driver_.import_fd(grant.file);
    } catch (...) {
      std::lock_guard lock(mutex_);
      give_back_locked(grant);
      throw;
    }
    ::close(grant.file);
    Chunk unknown;  // before the lock, so that its end releases the handle after it
    std::lock_guard lock(mutex_);
    if (link_ == nullptr || connections_ != grant.connection) {
      unknown = Chunk(driver_, handle, grant.size, nullptr);
      throw_disconnected();
    }
    chunks_[grant.id] = {handle, grant.size, true};
    numbers_[handle] = grant.id;
  }
  return Chunk(driver_, handle, grant.size, this, grant.foreign);
}

Message SharedPool::call_broker(Kind kind, Deadline deadline, bool interruptible,
                                const std::vector<std::uint64_t>& words) {
  std::unique_lock lock(mutex_);
  if (link_ == nullptr) throw_disconnected();
  if (silent_) throw_unanswered_locked();
  const std::uint64_t serial = ++last_number_;
  Call& call = calls_[serial];  // a map keeps the addresses of its elements
  Message question = message_of(kind, {serial});
  question.words.insert(question.words.end(), words.begin(), words.end());
  send_locked(std::move(question));
  try {
    wait_until(lock, changed_, deadline, [&] { return call.ended; }, interruptible, false);
  } catch (...) {
    lock.lock();
    calls_.erase(serial);
    throw;
  }
  Call answered = std::move(call);
  calls_.erase(serial);
  if (answered.answer && answered.answer->kind == Kind::refused)
    throw BrokerError("the broker at " + path_ + " refuses: " + answered.answer->text, path_);
  if (answered.answer) return std::move(*answered.answer);
  if (answered.ended) throw_disconnected();
  throw BrokerError("no answer from the broker at " + path_, path_);
}

Supply SharedPool::look() {
  const std::vector<std::uint64_t> usage = call_broker(Kind::usage, Clock::now() + kUsageTimeout, false).words;
  Supply supply{usage.at(1)};
  std::lock_guard lock(mutex_);
  for (const Holder& holder : holders_)
    if (holder.unused.value_or(0) > 0) supply.unused.push_back({holder.pid, *holder.unused, holder.why});
  return supply;
}

std::pair<std::vector<SharedPool::Wait>, std::vector<SharedPool::Holder>> SharedPool::waits() {
  std::pair<std::vector<Wait>, std::vector<Holder>> found;
  std::lock_guard lock(mutex_);
  for (const auto& [number, request] : requests_)
    if (const std::size_t bytes = request->waiting_locked()) found.first.push_back({bytes, request->seconds_locked()});
  if (!found.first.empty()) found.second = holders_;
  return found;
}

std::vector<File> SharedPool::descriptors_of(const std::vector<Handle>& handles) {
  std::vector<std::uint64_t> chunks;
  std::vector<bool> is_pooled;
  std::string path;
  {
    std::lock_guard lock(mutex_);
    path = path_;
    for (const Handle handle : handles) {
      const auto number = numbers_.find(handle);
      is_pooled.push_back(number != numbers_.end());
      if (is_pooled.back()) chunks.push_back(number->second);
    }
  }
  std::vector<File> granted;
  if (!chunks.empty())
    granted = call_broker(Kind::descriptors, Clock::now() + kDescriptorsTimeout, false, chunks).descriptors;
  if (granted.size() != chunks.size())
    throw BrokerError("the broker has sent " + std::to_string(granted.size()) + " descriptors, expected " +
                          std::to_string(chunks.size()),
                      path);
  std::vector<File> files;
  for (std::size_t i = 0, next = 0; i < handles.size(); ++i)
    files.push_back(is_pooled[i] ? std::move(granted[next++]) : File(driver_.export_fd(handles[i])));
  return files;
}

}  // namespace memsaver
