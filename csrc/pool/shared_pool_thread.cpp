// The pool's thread: connects to brokers, restores this process's state there, and handles their messages.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pool/queries.h"
#include "pool/shared_pool.h"

namespace memsaver {
namespace {

using wire::Kind;
using wire::Message;
using wire::message_of;
using wire::Refusal;

constexpr auto kLongestSearch = std::chrono::milliseconds(5000);

// The parts of a demand: bytes by their limit.
std::map<std::size_t, std::size_t> parts_of(const std::vector<std::uint64_t>& words, std::size_t at, std::size_t end) {
  std::map<std::size_t, std::size_t> parts;
  for (; at + 1 < end; at += 2) parts[words[at]] += words[at + 1];
  return parts;
}

}  // namespace

// Checks the socket as well: the thread may not have read the end of the connection yet, and a caller that joins the
// next broker cannot wait for it.
bool SharedPool::joined() {
  std::lock_guard lock(mutex_);
  if (link_ == nullptr) return false;
  pollfd end = {link_->descriptor(), 0, 0};
  if (::poll(&end, 1, 0) <= 0 || (end.revents & (POLLHUP | POLLERR)) == 0) return true;
  disconnect_locked("it has ended");
  wake();
  return false;
}

void SharedPool::join(const std::string& path) {
  std::lock_guard only(connecting_);
  if (joined()) return;
  if (!worker_.started()) worker_.start([this] { serve(); });
  restore_state(connect(path));
}

// `accepted`: set when the broker has accepted the connection, also if it refuses the client then.
std::unique_ptr<Link> SharedPool::connect(const std::string& path, bool* accepted) const {
  auto link = std::make_unique<Link>(path);
  if (accepted != nullptr) *accepted = true;
  const auto pid = static_cast<std::uint64_t>(::getpid());
  Message hello = message_of(Kind::hello, {wire::kVersion, client_, pid}, driver_.uuid());
  hello.descriptors.push_back(sentinel());
  link->send(std::move(hello));
  link->expect(Kind::welcome, kAnswerTimeout);
  return link;
}

// Sends the chunks of this process to a broker that may be a new one. A chunk that is returned before the lock is taken
// goes to the driver, and one that is returned after it to this broker.
void SharedPool::restore_state(std::unique_ptr<Link> connected) {
  std::lock_guard lock(mutex_);
  send_inventory_locked(*connected);
  if (offers_ > 0) connected->send(message_of(Kind::offers, {offers_}));
  path_ = connected->path;
  link_ = std::move(connected);
  ++connections_;
  changed_.notify_all();
}

void SharedPool::send_inventory_locked(Link& link) const {
  Message part = message_of(Kind::inventory, {});
  for (const auto& [id, entry] : chunks_) {
    if (!entry.in_use) continue;
    part.words.insert(part.words.end(), {id, entry.size});
    if (part.words.size() == 2 * wire::kMostChunks) link.send(std::exchange(part, message_of(Kind::inventory, {})));
  }
  link.send(std::move(part));  // fewer than kMostChunks: the end of the inventory
}

// Forgets the chunks that are not in use here. Without a broker they belong to no process.
void SharedPool::forget_returned_locked() {
  returned_.clear();
  for (auto entry = chunks_.begin(); entry != chunks_.end();)
    entry = entry->second.in_use ? std::next(entry) : forget_locked(entry);
}

// The thread releases the handle later, because the caller holds the lock and the driver may take long.
SharedPool::Entries::iterator SharedPool::forget_locked(Entries::iterator entry) {
  released_.emplace_back(driver_, entry->second.handle, entry->second.size, nullptr);  // its end releases the handle
  numbers_.erase(entry->second.handle);
  return chunks_.erase(entry);
}

void SharedPool::release_handles() {
  std::vector<Chunk> released;  // before the lock, so that its end comes after it
  std::lock_guard lock(mutex_);
  released = std::exchange(released_, {});
}

void SharedPool::disconnect_locked(const std::string& reason) {
  link_.reset();
  silent_ = false;
  reason_ = reason;
  forget_returned_locked();
  for (auto& [id, entry] : chunks_) entry.is_older = true;
  for (auto& [number, request] : requests_) request->disconnected_locked();
  for (auto& [number, call] : calls_) call.ended = true;
  changed_.notify_all();
}

void SharedPool::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(::write(bell_.get(), &one, sizeof one));
}

void SharedPool::serve() {
  while (!waiting_is_over()) {
    try {
      release_handles();
      if (!serve_once()) reconnect();
    } catch (const std::exception& error) {
      std::lock_guard lock(mutex_);
      disconnect_locked(error.what());
    }
  }
}

// Waits for messages in either direction, sends and handles them. Returns false if there is no connection.
bool SharedPool::serve_once() {
  pollfd ready[] = {{-1, POLLIN, 0}, {bell_.get(), POLLIN, 0}};
  {
    std::lock_guard lock(mutex_);
    if (link_ == nullptr) return false;
    send_returned_locked();
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
      if (message) silent_ = false;
    }
    if (!message) break;
    handle(std::move(*message));
  }
  return true;
}

void SharedPool::stop(Deadline deadline) {
  wake();
  {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  worker_.join(deadline);
}

void SharedPool::reconnect() {
  std::string path;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, search_, [this] { return link_ != nullptr || waiting_is_over(); });
    if (link_ != nullptr || waiting_is_over() || path_.empty()) return;
    path = path_;
  }
  std::lock_guard only(connecting_);
  if (joined()) return;
  bool accepted = false;
  try {
    restore_state(connect(path, &accepted));
    search_ = kSearch;
  } catch (const std::exception&) {
    // No broker yet: the next request for a chunk raises an error. A broker that refuses is tried less and less often.
    search_ = accepted ? std::min(2 * search_, kLongestSearch) : kSearch;
  }
}

void SharedPool::handle(Message message) {
  switch (message.kind) {
    case Kind::grant: return handle_grant(std::move(message));
    case Kind::drop: return handle_drop(message.words);
    case Kind::query: queries().note("report", driver_.name); return;
    case Kind::reclaim: return reclaim_(message.words.at(0), message.words.at(1));
    default: break;
  }
  std::lock_guard lock(mutex_);
  if (message.kind == Kind::stalled) {
    const auto found = requests_.find(message.words.at(0));
    if (found != requests_.end())
      found->second->stalled_locked(message.words.at(1), parts_of(message.words, 3, message.words.size()),
                                    message.words.at(2) > 0);
  } else if (message.kind == Kind::holders) {
    handle_holders_locked(message);
  } else if (message.kind == Kind::refused) {
    handle_refusal_locked(std::move(message));
  } else {  // an answer
    const std::uint64_t serial = message.words.at(0);
    end_call_locked(serial, std::move(message));
  }
  changed_.notify_all();
}

void SharedPool::handle_holders_locked(const Message& message) {
  const auto found = requests_.find(message.words.at(0));
  if (found == requests_.end()) return;  // closed meanwhile
  holders_.clear();
  std::vector<std::pair<int, std::size_t>> others;
  std::size_t line = 0;
  for (std::size_t at = 2; at + 2 < message.words.size(); at += 3) {
    const std::size_t end = std::min(message.text.find('\n', line), message.text.size());
    const std::uint64_t unused = message.words[at + 2];
    holders_.push_back({static_cast<int>(message.words[at]), message.words[at + 1],
                        unused == wire::kUnknown ? std::nullopt : std::optional<std::size_t>(unused),
                        message.text.substr(line, end - line)});
    line = std::min(end + 1, message.text.size());
    if (holders_.back().pid != ::getpid()) others.emplace_back(holders_.back().pid, holders_.back().bytes);
  }
  found->second->holders_locked(message.words.at(1) != 0, std::move(others));
}

void SharedPool::handle_refusal_locked(Message message) {
  const auto code = static_cast<Refusal>(message.words.at(0));
  const std::uint64_t number = message.words.at(1);
  if (code == Refusal::over_capacity) {
    const auto found = requests_.find(number);
    if (found != requests_.end()) found->second->refused_locked();
  } else if (code == Refusal::no_descriptor) {
    end_call_locked(number, std::move(message));
  } else {
    disconnect_locked("it refuses: " + message.text);
  }
}

void SharedPool::end_call_locked(std::uint64_t serial, Message message) {
  const auto call = calls_.find(serial);
  if (call == calls_.end()) return;  // its caller has stopped waiting
  call->second.answer = std::move(message);
  call->second.ended = true;
}

void SharedPool::handle_grant(Message message) {
  std::lock_guard lock(mutex_);
  const auto found = requests_.find(message.words.at(0));
  std::size_t file = 0;
  const std::size_t chunks_at = std::min(message.words.size(), 3 + 2 * message.words.at(2));
  for (std::size_t at = chunks_at; at + 2 < message.words.size(); at += 3) {
    const std::uint64_t flags = message.words[at + 2];
    Grant grant{message.words[at], message.words[at + 1], (flags & wire::kForeign) != 0, -1, connections_};
    if ((flags & wire::kHasDescriptor) != 0) grant.file = message.descriptors.at(file++).keep();
    if (found != requests_.end())
      found->second->granted_locked(grant);
    else
      give_back_locked(grant);
  }
  if (found != requests_.end())
    found->second->update_locked(message.words.at(1), parts_of(message.words, 3, chunks_at));
  changed_.notify_all();
}

void SharedPool::handle_drop(const std::vector<std::uint64_t>& ids) {
  std::unique_lock lock(mutex_);
  for (const std::uint64_t id : ids) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end() || found->second.in_use) continue;
    forget_locked(found);
  }
  lock.unlock();
  release_handles();
  send(message_of(Kind::dropped, ids));  // after the release: the broker may give the memory to another process then
}

}  // namespace memsaver
