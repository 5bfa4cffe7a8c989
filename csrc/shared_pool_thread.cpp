// The pool's thread, and how it meets brokers and parts from them.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "shared_pool.h"

namespace memsaver {
namespace {

using wire::Kind;
using wire::Message;
using wire::message_of;

constexpr auto kLongestSearch = std::chrono::milliseconds(5000);

}  // namespace

bool SharedPool::joined() const {
  std::lock_guard lock(mutex_);
  return link_ != nullptr;
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
  link->send(message_of(Kind::hello, {wire::kVersion, client_}, driver_.uuid()));
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
  const std::uint64_t lease = drawn_number();
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

}  // namespace memsaver
