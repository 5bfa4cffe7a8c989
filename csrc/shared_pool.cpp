#include "shared_pool.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

namespace memsaver {
namespace {

using wire::Kind;
using wire::Message;

constexpr auto kPatience = std::chrono::seconds(10);  // for a broker that is there and says nothing
constexpr auto kLookPatience = std::chrono::seconds(1);
constexpr auto kSearch = std::chrono::milliseconds(100);  // between two looks for a new broker
constexpr auto kLongestSearch = std::chrono::milliseconds(5000);

std::uint64_t drawn() {
  std::random_device source;
  return ((std::uint64_t{source()} << 32) ^ source()) >> 1 | 1;
}

Message message_of(Kind kind, std::vector<std::uint64_t> words, std::string text = {}) {
  return {kind, std::move(words), std::move(text), {}};
}

}  // namespace

// Guarded by the pool's mutex.
class SharedPool::Request final : public ChunkRequest {
 public:
  Request(SharedPool& pool, const Needs& needs, Deadline deadline) : pool_(pool), deadline_(deadline) {
    if (needs.empty()) return;
    std::lock_guard lock(pool_.mutex_);
    if (pool_.link_ == nullptr) pool_.throw_parted();
    number_ = ++pool_.last_number_;
    pool_.requests_[number_] = this;
    ask_locked(Kind::want, merged(needs));
  }

  ~Request() override {
    ready_.clear();  // go back by way of the pool, which locks
    if (number_ == 0) return;
    std::lock_guard lock(pool_.mutex_);
    pool_.requests_.erase(number_);
    for (Offer& offer : std::exchange(stock_, {})) pool_.give_back_locked(offer);
    if (!parted_) pool_.send_locked(message_of(Kind::close, {number_}));
  }

  Chunk next(std::size_t limit, std::size_t fresh, bool wait) override {
    if (Chunk chunk = take_ready(limit)) return chunk;
    std::unique_lock lock(pool_.mutex_);
    for (;;) {
      if (parted_) pool_.throw_parted();
      if (const std::optional<Offer> offer = take_locked(limit)) {
        lock.unlock();
        return pool_.import(*offer);
      }
      if (refused_) throw ChunkNeverAvailable("ask", 2, "more than the shared pool has in all");
      if (!wait || number_ == 0) throw ChunkUnavailable("ask", 2, "the shared pool has not given such a chunk");
      if (!comes_locked(limit)) {  // what still does, and what is here, may all be larger than this place
        if (!give_up_largest_locked() && fruitless_)
          throw ChunkNeverAvailable("ask", 2, "the layout needs more than the shared pool has in all");
        const std::size_t size = chunk_class(limit);
        fruitless_ = true;
        ask_locked(Kind::more, {{size, std::min(size, fresh), size}});
      }
      if (stalled_locked()) {
        if (give_up_largest_locked()) continue;  // its memory may serve as smaller chunks
        if (Clock::now() >= deadline_ || waiting_is_over)
          throw ChunkUnavailable("ask", 2, "the shared pool has no chunk to give");
      }
      if (wait_locked(lock)) continue;
      lock.unlock();
      between_looks();
      lock.lock();
    }
  }

  // Turns what has come into chunks as well: next() without waiting then makes no call of the driver.
  bool gather() override {
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

  // Called by the pool's thread.
  void offered_locked(Offer offer, std::size_t limit) {
    came_locked(limit, offer.size);
    answered_ = Clock::now();
    fruitless_ = false;
    stock_.push_back(offer);
  }
  void stalled_locked(std::uint64_t messages, std::size_t left) {
    answered_ = Clock::now();
    if (messages != messages_) return;
    stalled_at_ = left > 0 ? messages : 0;
    if (left == 0) to_come_.clear();  // a grant and `more` may have crossed on the way
  }
  void refused_locked() { refused_ = true; }
  void parted_locked() {
    for (Offer& offer : std::exchange(stock_, {}))
      if (offer.file >= 0) ::close(offer.file);
    parted_ = true;
  }

 private:
  static Needs merged(const Needs& needs) {
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

  void ask_locked(Kind kind, const Needs& needs) {
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

  Chunk take_ready(std::size_t limit) {
    auto best = ready_.end();
    for (auto chunk = ready_.begin(); chunk != ready_.end(); ++chunk)
      if (chunk->size() <= limit && (best == ready_.end() || chunk->size() > best->size())) best = chunk;
    if (best == ready_.end()) return Chunk();
    Chunk found = std::move(*best);
    ready_.erase(best);
    return found;
  }

  // The largest that fits.
  std::optional<Offer> take_locked(std::size_t limit) {
    auto best = stock_.end();
    for (auto offer = stock_.begin(); offer != stock_.end(); ++offer)
      if (offer->size <= limit && (best == stock_.end() || offer->size > best->size)) best = offer;
    if (best == stock_.end()) return std::nullopt;
    const Offer found = *best;
    stock_.erase(best);
    return found;
  }

  bool give_up_largest_locked() {
    if (stock_.empty()) return false;
    const auto largest = std::max_element(stock_.begin(), stock_.end(),
                                          [](const Offer& one, const Offer& other) { return one.size < other.size; });
    pool_.give_back_locked(*largest);
    stock_.erase(largest);
    return true;
  }

  bool stalled_locked() const { return stalled_at_ == messages_; }

  bool comes_locked(std::size_t limit) const { return !to_come_.empty() && to_come_.begin()->first <= limit; }

  void came_locked(std::size_t limit, std::size_t bytes) {
    const auto found = to_come_.find(limit);
    if (found == to_come_.end()) return;
    found->second -= std::min(found->second, bytes);
    if (found->second == 0) to_come_.erase(found);
  }

  // What `more` asks for replaces as much of what was to come, the largest first; the broker counts alike.
  void exchange_locked(std::size_t bytes) {
    while (bytes > 0 && !to_come_.empty()) {
      const auto [limit, left] = *to_come_.rbegin();
      came_locked(limit, bytes);
      bytes -= std::min(bytes, left);
    }
  }

  // True when something has come meanwhile.
  bool wait_locked(std::unique_lock<std::mutex>& lock) {
    const bool told = pool_.changed_.wait_for(lock, kBetweenLooks) == std::cv_status::no_timeout;
    if (!stalled_locked() && !to_come_.empty() && !refused_ && !parted_ && Clock::now() > answered_ + kPatience)
      throw BrokerError("the broker at " + pool_.path_ + " does not answer", pool_.path_);
    return told;
  }

  SharedPool& pool_;
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

SharedPool::SharedPool(Driver& driver, Residents& residents)
    : driver_(driver), residents_(residents), client_(drawn()), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (bell_.get() < 0) throw DriverError("eventfd", errno, "no descriptor is left");
}

bool SharedPool::joined() const {
  std::lock_guard lock(mutex_);
  return link_ != nullptr;
}

void SharedPool::throw_parted() const {
  throw BrokerError("no broker of the shared pool of " + driver_.name + ": " + parted_ +
                        ". Memory in use stays as it is; start another with `memsaver broker`, or with " +
                        "configure(pool='shared'), and this process joins it",
                    path_);
}

void SharedPool::join(const std::string& path) {
  std::lock_guard only(meeting_);
  if (joined()) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  introduce(meet(path));
}

std::unique_ptr<Link> SharedPool::meet(const std::string& path, bool* there) const {
  auto link = std::make_unique<Link>(path);
  if (there != nullptr) *there = true;
  link->send(message_of(Kind::hello, {wire::kVersion, client_, 0}, driver_.uuid()));
  const Message welcome = link->expect(Kind::welcome, kPatience);
  if (welcome.words.empty() || welcome.words[0] != wire::kVersion)
    throw BrokerError(
        "the broker at " + path + " speaks another version of the protocol, not " + std::to_string(wire::kVersion),
        path);
  return link;
}

// Brings what is in use here to a broker that may not know it.
void SharedPool::introduce(std::unique_ptr<Link> link) {
  std::vector<Residents::Owed> owed = residents_.owed();
  std::lock_guard lock(mutex_);
  Message bring = message_of(Kind::bring, {});
  const auto send_part = [&] { link->send(std::exchange(bring, message_of(Kind::bring, {}))); };
  try {
    std::size_t brought = 0;
    for (const auto& [id, entry] : chunks_) {
      if (!entry.lent) continue;
      bring.words.insert(bring.words.end(), {id, entry.size});
      bring.descriptors.push_back(driver_.export_fd(entry.handle));
      if (++brought % wire::kMostDescriptors == 0) send_part();
    }
    if (brought % wire::kMostDescriptors == 0 || !bring.words.empty()) send_part();
  } catch (...) {
    close_all(bring.descriptors);
    throw;
  }
  for (const Residents::Owed& lease : owed) {
    std::vector<std::uint64_t> words = {lease.lease, static_cast<std::uint64_t>(lease.pid)};
    for (const Handle chunk : lease.chunks)
      if (const auto found = numbers_.find(chunk); found != numbers_.end()) words.push_back(found->second);
    link->send(message_of(Kind::owed, std::move(words)));
  }
  link->send(message_of(Kind::holds, {attached_.begin(), attached_.end()}));
  link->send(message_of(Kind::scrub, {scrub_ ? 1U : 0U}));
  path_ = link->path;
  link_ = std::move(link);
  ++meetings_;
  for (const std::uint64_t lease : std::exchange(detached_, {})) send_locked(message_of(Kind::detach, {lease}));
  changed_.notify_all();
}

// The broker has gone. Whatever is not in use here is nobody's now.
void SharedPool::part_locked(const std::string& why) {
  link_.reset();
  parted_ = why;
  gifts_.clear();
  for (auto entry = chunks_.begin(); entry != chunks_.end();) {
    if (entry->second.lent) {
      ++entry;
      continue;
    }
    Chunk(driver_, entry->second.handle, entry->second.size, nullptr);  // whose end releases it
    numbers_.erase(entry->second.handle);
    entry = chunks_.erase(entry);
  }
  for (auto& [number, request] : requests_) request->parted_locked();
  for (auto& [number, question] : questions_) question.answered = true;
  changed_.notify_all();
}

void SharedPool::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(::write(bell_.get(), &one, sizeof one));
}

void SharedPool::serve() {
  while (!waiting_is_over) {
    try {
      if (!serve_once()) rejoin();
    } catch (const std::exception& error) {
      std::lock_guard lock(mutex_);
      part_locked(error.what());
    }
  }
}

// Waits for the broker, or for something to tell it, and hears all it has said. False where there is none.
bool SharedPool::serve_once() {
  pollfd ready[] = {{-1, POLLIN, 0}, {bell_.get(), POLLIN, 0}};
  {
    std::lock_guard lock(mutex_);
    if (link_ == nullptr) return false;
    flush_gifts_locked();
    ready[0].fd = link_->descriptor();
    if (!link_->flush()) ready[0].events |= POLLOUT;
  }
  ::poll(ready, 2, -1);
  if (ready[1].revents != 0) {
    std::uint64_t rings = 0;
    static_cast<void>(::read(bell_.get(), &rings, sizeof rings));
  }
  while (ready[0].revents != 0) {
    std::optional<Message> message;
    {
      std::lock_guard lock(mutex_);
      if (link_ != nullptr) message = link_->receive();
    }
    if (!message) break;
    handle(std::move(*message));
  }
  return true;
}

void SharedPool::stop() {
  wake();
  if (thread_.joinable()) thread_.join();
}

void SharedPool::rejoin() {
  std::string path;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, search_, [this] { return link_ != nullptr || waiting_is_over.load(); });
    if (link_ != nullptr || waiting_is_over || path_.empty()) return;
    path = path_;
  }
  std::lock_guard only(meeting_);
  if (joined()) return;
  bool there = false;
  try {
    introduce(meet(path, &there));
    search_ = kSearch;
  } catch (const std::exception&) {
    // Not there yet: the next need for a chunk says so. One that is there and refuses is asked less and less often.
    search_ = there ? std::min(2 * search_, kLongestSearch) : kSearch;
  }
}

void SharedPool::handle(Message message) {
  switch (message.kind) {
    case Kind::grant: granted(std::move(message)); return;
    case Kind::drop: drop(message.words); return;
    case Kind::query: report(); return;
    case Kind::lease: lend(message); return;
    case Kind::unlease: residents_.returned(message.words.at(0)); return;
    default: break;
  }
  std::lock_guard lock(mutex_);
  if (message.kind == Kind::stalled) {
    const auto found = requests_.find(message.words.at(0));
    if (found != requests_.end()) found->second->stalled_locked(message.words.at(1), message.words.at(2));
  } else if (message.kind == Kind::refused) {
    const auto code = static_cast<wire::Refusal>(message.words.at(0));
    if (code == wire::Refusal::no_room) {
      const auto found = requests_.find(message.words.at(1));
      if (found != requests_.end()) found->second->refused_locked();
    } else if (const auto asked = questions_.find(message.words.at(1));
               code == wire::Refusal::no_lease && asked != questions_.end()) {
      asked->second.code = message.words[0];
      asked->second.answer.push_back(std::move(message));
      asked->second.answered = true;
    } else if (code != wire::Refusal::no_lease) {
      part_locked("it refuses: " + message.text);
    }
  } else if (!message.words.empty()) {  // figures, status, attached, trimmed
    const auto asked = questions_.find(message.words[0]);
    if (asked == questions_.end()) {
      if (message.kind == Kind::attached) send_locked(message_of(Kind::detach, {message.words.at(1)}));  // too late
      close_all(message.descriptors);
    } else {
      if (message.kind == Kind::attached) attached_.insert(message.words.at(1));
      asked->second.answered = message.kind != Kind::attached || message.words.at(2) == 0;
      asked->second.answer.push_back(std::move(message));
    }
  }
  changed_.notify_all();
}

void SharedPool::granted(Message message) {
  std::lock_guard lock(mutex_);
  const auto found = requests_.find(message.words.at(0));
  std::size_t file = 0;
  for (std::size_t at = 1; at + 3 < message.words.size(); at += 4) {
    const std::uint64_t flags = message.words[at + 2];
    Offer offer{message.words[at], message.words[at + 1], (flags & wire::kScrub) != 0, -1, meetings_};
    if ((flags & wire::kHasDescriptor) != 0) offer.file = message.descriptors.at(file++);
    if (found != requests_.end())
      found->second->offered_locked(offer, message.words[at + 3]);
    else
      give_back_locked(offer);
  }
  changed_.notify_all();
}

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

void SharedPool::drop(const std::vector<std::uint64_t>& ids) {
  std::lock_guard lock(mutex_);
  for (const std::uint64_t id : ids) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end() || found->second.lent) continue;
    Chunk(driver_, found->second.handle, found->second.size, nullptr);  // whose end releases it
    numbers_.erase(found->second.handle);
    chunks_.erase(found);
  }
  send_locked(message_of(Kind::dropped, ids));
}

void SharedPool::report() {
  Message message = message_of(Kind::report, {});
  for (const Residents::Row& row : residents_.rows()) {
    if (8 * message.words.size() + message.text.size() > wire::kLongestPacket - 1024) break;
    message.words.insert(message.words.end(), {row.allocated, row.mapped, row.backed_up, row.state, row.policy});
    message.text += (message.words.size() > 5 ? "\n" : "") + row.tag;
  }
  send(std::move(message));
}

void SharedPool::lend(const Message& message) {
  const std::uint64_t lease = drawn();
  try {
    const auto placed =
        residents_.lend(message.text, message.words.at(2), lease, static_cast<int>(message.words.at(1)));
    // A chunk that was freed meanwhile is one that the broker is told of before the answer.
    std::lock_guard lock(mutex_);
    std::vector<Message> answers = {message_of(Kind::leased, {message.words.at(0), lease, 0})};
    for (const Placed& chunk : placed) {
      const auto number = numbers_.find(chunk.handle);
      if (number == numbers_.end() || !chunks_.at(number->second).lent)
        throw Error("it holds memory that did not come from the shared pool, or does no more");
      if (answers.back().words.size() >= 3 + 3 * wire::kMostDescriptors) {
        answers.back().words[2] = 1;
        answers.push_back(message_of(Kind::leased, {message.words.at(0), lease, 0}));
      }
      answers.back().words.insert(answers.back().words.end(), {chunk.offset, number->second, chunk.size});
    }
    for (Message& answer : answers) send_locked(std::move(answer));
  } catch (const Error& error) {
    residents_.returned(lease);
    send(message_of(Kind::leased, {message.words.at(0), 0, 0}, error.what()));
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
  return std::make_unique<Request>(*this, needs, deadline);
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
