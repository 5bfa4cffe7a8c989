// A client's end of the socket to a broker: sends and receives packets with descriptors. Only the constructor and
// expect() wait.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "base/files.h"
#include "base/scoped.h"
#include "pool/wire.h"

namespace memsaver {

constexpr auto kAnswerTimeout = std::chrono::seconds(10);  // for an answer of a connected broker

class Link : Immovable {
 public:
  // Throws BrokerError if no broker accepts connections at this path.
  explicit Link(const std::string& path);

  const std::string path;
  int descriptor() const { return socket_.get(); }

  // Sends a message now if the socket accepts it, else at a later flush(). A message to a broker that has ended is
  // lost: receive() reports the end.
  void send(wire::Message message);
  bool flush();  // false: messages are left for the next call
  // The next packet, if there is one. Throws BrokerError if the broker has ended the connection or sent a malformed
  // packet.
  std::optional<wire::Message> receive();
  // Waits for the next packet. Throws BrokerError if none comes, or if it is of another kind, such as a refusal.
  wire::Message expect(wire::Kind kind, std::chrono::milliseconds timeout);

 private:
  File socket_;
  std::deque<wire::Message> unsent_;
};

}  // namespace memsaver
