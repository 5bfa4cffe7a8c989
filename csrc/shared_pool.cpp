#include "shared_pool.h"

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

constexpr auto kLookPatience = std::chrono::seconds(1);

}  // namespace

std::uint64_t drawn_number() {
  std::random_device source;
  return ((std::uint64_t{source()} << 32) ^ source()) >> 1 | 1;
}

SharedPool::SharedPool(Driver& driver, Residents& residents)
    : driver_(driver), residents_(residents), client_(drawn_number()), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (bell_.get() < 0) throw DriverError("eventfd", errno, "no descriptor is left");
}

void SharedPool::throw_parted() const {
  throw BrokerError("no broker of the shared pool of " + driver_.name + ": " + parted_ +
                        ". Memory in use stays as it is; start another with `memsaver broker`, or with " +
                        "configure(pool='shared'), and this process joins it",
                    path_);
}

void SharedPool::throw_silent() const { throw BrokerError("the broker at " + path_ + " does not answer", path_); }

std::uint64_t SharedPool::open_locked(PoolRequest& request) {
  if (link_ == nullptr) throw_parted();
  requests_[++last_number_] = &request;
  return last_number_;
}

void SharedPool::close_locked(std::uint64_t number) { requests_.erase(number); }

void SharedPool::give_back_locked(Offer offer) {
  if (offer.file >= 0) ::close(offer.file);
  if (link_ == nullptr) return;
  if (offer.file >= 0) send_locked(message_of(Kind::dropped, {offer.id}));  // there is no handle of it here
  gifts_.push_back(offer.id);
  wake();
}

void SharedPool::flush_gifts_locked() {
  const std::vector<std::uint64_t> gifts = std::exchange(gifts_, {});
  for (std::size_t at = 0; at < gifts.size(); at += wire::kMostChunks) {
    const std::size_t end = std::min(gifts.size(), at + wire::kMostChunks);
    link_->send(message_of(Kind::give, {gifts.begin() + static_cast<std::ptrdiff_t>(at),
                                        gifts.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
}

void SharedPool::send(Message message) {
  std::lock_guard lock(mutex_);
  send_locked(std::move(message));
}

// In the order of what happened: what was given back is said first.
void SharedPool::send_locked(Message message) {
  if (link_ == nullptr) return close_all(message.descriptors);
  flush_gifts_locked();
  link_->send(std::move(message));
  if (!link_->flush()) wake();
}

std::unique_ptr<ChunkRequest> SharedPool::ask(const Needs& needs, Deadline deadline) {
  return std::make_unique<PoolRequest>(static_cast<RequestHost&>(*this), needs, deadline);
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
    gifts_.push_back(number->second);
    chunks_.at(number->second).lent = false;
    static_cast<void>(std::move(chunk).keep());
    if (gifts_.size() == 1) wake();
  } catch (const std::exception&) {
    // Without memory for a number the broker learns of it when this process ends.
  }
}

// What a chunk came with is turned into a handle here, by the thread that wants it.
Chunk SharedPool::import(Offer offer) {
  Handle handle = 0;
  {
    std::lock_guard lock(mutex_);
    if (link_ == nullptr || meetings_ != offer.meeting) {
      if (offer.file >= 0) ::close(offer.file);
      throw_parted();
    }
    if (offer.file < 0) {
      const auto found = chunks_.find(offer.id);
      if (found == chunks_.end()) {
        part_locked("it granted a chunk of which this process has no handle");
        wake();
        throw_parted();
      }
      handle = found->second.handle;
      found->second.lent = true;
    }
  }
  if (offer.file >= 0) {
    try {
      handle = driver_.import_fd(offer.file, offer.size);
    } catch (...) {
      std::lock_guard lock(mutex_);
      give_back_locked(offer);
      throw;
    }
    ::close(offer.file);
    std::lock_guard lock(mutex_);
    if (link_ == nullptr || meetings_ != offer.meeting) {
      Chunk(driver_, handle, offer.size, nullptr);
      throw_parted();
    }
    chunks_[offer.id] = {handle, offer.size, true};
    numbers_[handle] = offer.id;
  }
  Chunk chunk(driver_, handle, offer.size, this);
  if (offer.scrub) scrub(handle, offer.size);
  return chunk;
}

void SharedPool::scrub(Handle handle, std::size_t size) {
  std::lock_guard lock(scrubbing_);
  // Where a call fails these addresses may still hold the chunk: others then take their place.
  const Address scratch = std::exchange(scratch_, 0);
  const Address at = scratch != 0 ? scratch : driver_.reserve(kChunkClasses.front());
  driver_.map(at, size, handle);
  driver_.allow(at, size);
  driver_.fill(at, size, 0);
  driver_.wait(driver_.mark(Direction::in));
  driver_.unmap(at, size);
  scratch_ = at;
}

std::vector<Message> SharedPool::ask_broker(Message message, Deadline deadline, const std::string& who, bool looks) {
  std::unique_lock lock(mutex_);
  if (link_ == nullptr) throw_parted();
  const std::uint64_t serial = ++last_number_;
  message.words.insert(message.words.begin(), serial);
  Question& question = questions_[serial];  // stays where it is
  const std::uint64_t meeting = meetings_;
  send_locked(std::move(message));
  std::exception_ptr interrupt;
  while (!question.answered && Clock::now() < deadline && !waiting_is_over && !interrupt) {
    changed_.wait_until(lock, std::min<Clock::time_point>(deadline, Clock::now() + kBetweenLooks));
    if (!looks || question.answered) continue;
    lock.unlock();
    try {
      between_looks();
    } catch (...) {
      interrupt = std::current_exception();
    }
    lock.lock();
  }
  Question answer = std::move(question);
  questions_.erase(serial);
  const bool parted = link_ == nullptr || meetings_ != meeting;
  if (answer.answered && !parted && answer.code == 0 && !interrupt) return std::move(answer.answer);
  for (Message& part : answer.answer) {
    close_all(part.descriptors);
    if (part.kind == Kind::attached) detach_locked(part.words.at(1));  // nobody will use it
  }
  if (interrupt) std::rethrow_exception(interrupt);
  if (answer.code != 0) throw Error(answer.answer.back().text);
  if (parted) throw_parted();
  throw BrokerError("no answer from " + who + " at " + path_, path_);
}

// Others find what was given back here as soon as they ask, and not when this pool's thread comes to it.
void SharedPool::settle() {
  std::lock_guard lock(mutex_);
  if (link_ != nullptr) flush_gifts_locked();
}

Supply SharedPool::look() {
  const Message figures =
      ask_broker(message_of(Kind::look, {}), Clock::now() + kLookPatience, "the broker", false).back();
  Supply supply{figures.words.at(1), {}};
  for (std::size_t at = 3; at + 1 < figures.words.size(); at += 2)
    supply.holders.push_back({static_cast<int>(figures.words[at]), figures.words[at + 1]});
  return supply;
}

std::string SharedPool::status() {
  return ask_broker(message_of(Kind::status, {}), Clock::now() + kPatience, "the broker", true).back().text;
}

void SharedPool::set_scrub(bool wanted) {
  std::lock_guard lock(mutex_);
  scrub_ = wanted;
  send_locked(message_of(Kind::scrub, {wanted ? 1U : 0U}));
}

Lease SharedPool::attach(std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
                         Deadline deadline) {
  const std::string who = "process " + std::to_string(pid) + ", asked through the broker";
  const auto answers = ask_broker(message_of(Kind::attach, {owner, static_cast<std::uint64_t>(pid), residence}, key),
                                  deadline, who, true);
  Lease lease;
  for (const Message& answer : answers) {
    lease.number = answer.words.at(1);
    std::size_t file = 0;
    for (std::size_t at = 3; at + 2 < answer.words.size(); at += 3)
      lease.parts.push_back({answer.words[at], answer.words[at + 2], answer.descriptors.at(file++)});
  }
  return lease;
}

void SharedPool::detach(std::uint64_t lease) {
  std::lock_guard lock(mutex_);
  detach_locked(lease);
}

void SharedPool::detach_locked(std::uint64_t lease) {
  attached_.erase(lease);
  if (link_ == nullptr)
    detached_.push_back(lease);
  else
    send_locked(message_of(Kind::detach, {lease}));
}

}  // namespace memsaver
