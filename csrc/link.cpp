#include "link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace memsaver {
namespace {

using wire::Message;

struct Header {
  std::uint32_t kind;
  std::uint32_t count;
};

std::string packed(const Message& message) {
  const Header header{static_cast<std::uint32_t>(message.kind), static_cast<std::uint32_t>(message.words.size())};
  std::string packet(reinterpret_cast<const char*>(&header), sizeof header);
  packet.append(reinterpret_cast<const char*>(message.words.data()), message.words.size() * sizeof(std::uint64_t));
  return packet + message.text;
}

Message unpacked(const std::string& path, const std::string& packet, std::vector<int> descriptors) {
  Header header{};
  if (packet.size() < sizeof header) throw BrokerError("the broker's packet is too short to be read", path);
  std::memcpy(&header, packet.data(), sizeof header);
  const std::size_t words = std::size_t{header.count} * sizeof(std::uint64_t);
  if (packet.size() < sizeof header + words) throw BrokerError("the broker's packet ends before its words do", path);
  Message message{static_cast<wire::Kind>(header.kind), std::vector<std::uint64_t>(header.count), {}, {}};
  std::memcpy(message.words.data(), packet.data() + sizeof header, words);
  message.text = packet.substr(sizeof header + words);
  message.descriptors = std::move(descriptors);
  return message;
}

// False where the socket takes no more now.
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
    std::memcpy(CMSG_DATA(rights), message.descriptors.data(), bytes);
  }
  for (;;) {
    if (::sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) break;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS) return false;
    ::shutdown(socket, SHUT_RDWR);  // the broker has gone, or what it should hear cannot be said: receive() tells
    break;
  }
  close_all(message.descriptors);
  return true;
}

}  // namespace

void close_all(std::vector<int>& descriptors) {
  for (const int file : std::exchange(descriptors, {}))
    if (file >= 0) ::close(file);
}

Link::Link(const std::string& to) : path(to), socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw BrokerError("'" + path + "' is too long for a socket", path);
  std::memcpy(address.sun_path, path.data(), path.size());
  if (socket_.get() < 0 || ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw BrokerError("there is no broker at " + path + ": " + std::strerror(errno), path);
}

Link::~Link() {
  for (Message& message : unsent_) close_all(message.descriptors);
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
  std::vector<int> descriptors;
  for (cmsghdr* rights = size < 0 ? nullptr : CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    descriptors.resize(count);
    std::memcpy(descriptors.data(), CMSG_DATA(rights), count * sizeof(int));
  }
  if (size <= 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    close_all(descriptors);
    throw BrokerError(size <= 0 ? "the broker at " + path + " has gone"
                                : "this process is out of descriptors for what the broker at " + path + " sends",
                      path);
  }
  packet.resize(static_cast<std::size_t>(size));
  try {
    return unpacked(path, packet, descriptors);
  } catch (...) {
    close_all(descriptors);
    throw;
  }
}

Message Link::expect(wire::Kind kind, std::chrono::milliseconds patience) {
  pollfd ready{socket_.get(), POLLIN, 0};
  int found = 0;
  do {
    found = ::poll(&ready, 1, static_cast<int>(patience.count()));
  } while (found < 0 && errno == EINTR);
  std::optional<Message> message = found > 0 ? receive() : std::nullopt;
  if (!message) throw BrokerError("the broker at " + path + " does not answer", path);
  if (message->kind == kind) return std::move(*message);
  close_all(message->descriptors);
  throw BrokerError("the broker at " + path + " refuses: " + message->text, path);
}

}  // namespace memsaver
