#include "pool/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

#include "base/clock.h"
#include "base/errors.h"

namespace memsaver {
namespace {

using wire::Message;

struct Head {
  std::uint32_t kind;
  std::uint32_t words;
};

std::string packed(const Message& message) {
  const Head head{static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.words.size())};
  std::string packet(reinterpret_cast<const char*>(&head), sizeof head);
  packet.append(reinterpret_cast<const char*>(message.words.data()), message.words.size() * sizeof(std::uint64_t));
  return packet + message.text;
}

// Keeps unknown kinds: the connection decides about them.
Message unpacked(const std::string& path, const std::string& packet, std::vector<File> descriptors) {
  Head head{};
  if (packet.size() < sizeof head) throw BrokerError("the broker's packet is shorter than a head", path);
  std::memcpy(&head, packet.data(), sizeof head);
  const std::size_t words = std::size_t{head.words} * sizeof(std::uint64_t);
  if (packet.size() < sizeof head + words)
    throw BrokerError("the broker's packet is shorter than its head announces", path);
  Message message = wire::message_of(static_cast<wire::Kind>(head.kind), std::vector<std::uint64_t>(head.words),
                                     packet.substr(sizeof head + words));
  std::memcpy(message.words.data(), packet.data() + sizeof head, words);
  message.descriptors = std::move(descriptors);
  return message;
}

// Returns false if the socket accepts no more now.
bool try_send(int socket, Message& message) {
  const std::string packet = packed(message);
  iovec data{const_cast<char*>(packet.data()), packet.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(wire::kMostDescriptors * sizeof(int))];
  if (!message.descriptors.empty()) {
    const std::size_t bytes = message.descriptors.size() * sizeof(int);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    int* sent = reinterpret_cast<int*>(CMSG_DATA(rights));
    for (const File& file : message.descriptors) *sent++ = file.get();
  }
  for (;;) {
    if (::sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) break;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS) return false;
    ::shutdown(socket, SHUT_RDWR);  // the broker has ended, or cannot get this message: receive() reports it
    break;
  }
  message.descriptors.clear();
  return true;
}

}  // namespace

Link::Link(const std::string& to) : path(to), socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw BrokerError("'" + path + "' is too long for a socket", path);
  std::memcpy(address.sun_path, path.data(), path.size());
  int result = socket_.get();
  if (result >= 0) {
    const Deadline deadline = Clock::now() + kAnswerTimeout;
    const timeval most{std::chrono::seconds(kAnswerTimeout).count(), 0};  // for a place in the broker's backlog
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
    do {
      result = ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    } while (result != 0 && errno == EINTR && Clock::now() < deadline);
  }
  if (result != 0 && (errno == EAGAIN || errno == EINTR))
    throw BrokerError("the broker at " + path + " does not accept connections", path);
  if (result != 0) throw BrokerError("there is no broker at " + path + ": " + std::strerror(errno), path);
}

void Link::send(Message message) {
  if (flush() && try_send(socket_.get(), message)) return;
  unsent_.push_back(std::move(message));
}

bool Link::flush() {
  while (!unsent_.empty() && try_send(socket_.get(), unsent_.front())) unsent_.pop_front();
  return unsent_.empty();
}

std::optional<Message> Link::receive() {
  std::string packet(wire::kLongestPacket, '\0');
  iovec data{packet.data(), packet.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(wire::kMostDescriptors * sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t size = 0;
  do {
    size = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
  std::vector<File> descriptors;
  for (cmsghdr* rights = size < 0 ? nullptr : CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const auto* received = reinterpret_cast<const int*>(CMSG_DATA(rights));
    const std::size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) descriptors.emplace_back(received[i]);
  }
  if (size <= 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
    throw BrokerError(size <= 0 ? "the broker at " + path + " has ended the connection"
                                : "this process has no free descriptor for a message of the broker at " + path,
                      path);
  packet.resize(static_cast<std::size_t>(size));
  return unpacked(path, packet, std::move(descriptors));
}

Message Link::expect(wire::Kind kind, std::chrono::milliseconds timeout) {
  pollfd ready{socket_.get(), POLLIN, 0};
  const Deadline deadline = Clock::now() + timeout;
  int found = 0;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    found = ::poll(&ready, 1, std::max(0, static_cast<int>(left.count())));
  } while (found < 0 && errno == EINTR);
  std::optional<Message> message = found > 0 ? receive() : std::nullopt;
  if (!message) throw BrokerError("the broker at " + path + " does not answer", path);
  if (message->kind == kind) return std::move(*message);
  throw BrokerError("the broker at " + path + " refuses: " + message->text, path);
}

File sentinel() {
  static std::mutex mutex;
  static int ends[2] = {-1, -1};  // never closed: the write end must stay open until the exit of the process
  std::lock_guard lock(mutex);
  if (ends[0] < 0 && ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw DriverError("pipe2", errno, std::strerror(errno));
  const int copy = ::fcntl(ends[0], F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw DriverError("fcntl", errno, std::strerror(errno));
  return File(copy);
}

}  // namespace memsaver
