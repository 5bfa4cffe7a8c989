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
  // Throws BrokerError if no broker accepts connections at this path within kAnswerTimeout.
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

// The sentinel: the descriptor by which a broker detects that no kernel of this process can run any more.
//
// The exit of a process is not enough. A child that was forked after CUDA was initialised holds the driver's
// descriptors, and with them the channels in which its parent's kernels run on (seen on an H100, driver 580; they end
// when the child has closed the descriptors or has exited). So each client has a sentinel: a pipe whose write end it
// holds until its exit, and which its forked children inherit together with the driver's descriptors. The broker has
// the read end: it hangs up when the last of these processes has closed the write end. Both kinds of descriptors are
// closed by exec, so a program that a client starts delays nothing. The broker looks for children that were forked
// before the sentinel was opened, when it gets the read end.
//
// A copy of the read end of this process's sentinel. The first call opens the pipe. Throws DriverError if there is no
// free descriptor.
File sentinel();

}  // namespace memsaver
