// A client's end of the socket to a broker: packets out, packets in, descriptors beside them. Nothing here waits, but
// for connect() and expect().
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "files.h"
#include "wire.h"

namespace memsaver {

constexpr auto kPatience = std::chrono::seconds(10);  // for a broker that is there and says nothing

class Link {
 public:
  // Throws BrokerError where nobody listens.
  explicit Link(const std::string& path);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const std::string path;
  int descriptor() const { return socket_.get(); }

  // Sends now what the socket takes, and keeps the rest for flush(). Owns the message's descriptors. What a broker that
  // has gone does not get is lost: receive() tells.
  void send(wire::Message message);
  bool flush();  // false: there is more to send when the socket takes it
  // The next packet, if there is one. Throws BrokerError when the broker has hung up, or sends what cannot be read.
  std::optional<wire::Message> receive();
  // Waits for a packet of this kind, the next to come. Throws BrokerError for any other, such as a refusal.
  wire::Message expect(wire::Kind kind, std::chrono::milliseconds patience);

 private:
  File socket_;
  std::deque<wire::Message> unsent_;
};

// Closes the descriptors that come with a message.
void close_all(std::vector<int>& descriptors);

}  // namespace memsaver
