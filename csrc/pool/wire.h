// The protocol between a broker and its clients, over a Unix socket of type SOCK_SEQPACKET: one message is one packet.
//
// A packet is a head `u32 kind, u32 words`, then `u64 words[words]`, then text to its end; all little-endian.
// Descriptors travel beside it (SCM_RIGHTS), in the order in which the words mention them. Python reads the numbers
// below from the core, so this is their one place.
//
// Versions. A broker and a client work together if their versions are equal. The head, the first word of `hello` and of
// `welcome`, and `refused` stay the same, so that a refusal names both. The version grows by 1 with each change of a
// message.
//
//   client -> broker
//   hello     version, client, pid                 text: the device's uuid. `client`: a random number, the same for the
//                                                  life of the process; `pid`: in the client's own pid namespace
//   sentinel  + descriptors                        after welcome, before each message about memory: the read end of the
//                                                  process's sentinel (csrc/pool/sentinel.h), and a pidfd of each child
//                                                  that may have the driver's descriptors without the sentinel. Sent
//                                                  several times if one packet cannot hold them
//   inventory {chunk, size}...  + descriptors      after welcome: the used chunks of an earlier broker. Ends with a
//                                                  packet of fewer than kMostChunks chunks, an empty one if needed
//   restore   attachment, pid, chunk...  + descriptors  after inventory: an attachment to this client's memory, made
//                                                  under an earlier broker, and the descriptors of its `attach_request`
//   attachments  attachment...                     after inventory: the attachments of this client to others' memory
//   demand    request, {limit, fresh, bytes}...    opens a demand: `bytes` in chunks of at most `limit`, and of at most
//                                                  `fresh` if they have to be created. Demands are served in the order
//                                                  in which they were opened
//   exchange  request, {limit, fresh, bytes}...    adds parts at the front of an open demand, and removes as many bytes
//                                                  of its other parts, those with the largest limit first. Bytes beyond
//                                                  these enlarge the demand
//   close     request                              closes a demand, complete or not
//   give_back {chunk, foreign}...                  returns chunks to the pool. Their contents are not needed any more.
//                                                  `foreign` 1: the chunk may still hold bytes of another process
//   dropped   chunk...                             answers drop: this client has released its handles of these chunks
//   usage     serial                               -> usage
//   status    serial                               -> status
//   report    ledger, {allocated, mapped, backup, state, policy}...   answers query. text: the regions' tags, joined
//                                                  by '\n'. `ledger` 1: a message `ledger` follows
//   ledger                                         follows report. text: JSON, see memsaver/ledger
//   reclaimed more, unused                         answers reclaim, and follows another `reclaimed` with `more` 1. What
//                                                  could be returned without a wait has been given back. `more`: 1 if
//                                                  more comes by itself. `unused`: bytes that no tensor uses and that
//                                                  stay; text: their parts and the reasons
//   attach    serial, client, pid, residence       requests an attachment to another client's memory. text: `tag '\n'
//                                                  policy '\n' offset '\n' size ['\n' offset '\n' size]...`
//   attach_reply  request, attachment, more, {offset, chunk, size}...   answers attach_request; attachment 0: refused,
//                                                  and the text is the reason. `more`: 1 if another packet follows
//   detach    attachment                           ends an attachment
//   trim      serial, bytes                        releases idle chunks to the driver until at most `bytes` are idle
//                                                  -> trimmed
//
//   broker -> client
//   welcome   version, capacity
//   refused   code, request                        text: the reason. `request`: the first word of the refused message.
//                                                  `over_capacity`: the demand exceeds the pool's capacity.
//                                                  `not_attached`: the attachment was refused. All other codes
//                                                  are followed by the end of the connection
//   grant     request, messages, parts, {limit, remaining}..., {chunk, size, flags}...  + descriptors   of the chunks
//                                                  with flag `has_descriptor`, of which this client has no handle.
//                                                  `messages`: the number of messages about this demand (demand and
//                                                  exchange) that the broker has received. Then `remaining` bytes are
//                                                  still to be granted in chunks of at most `limit`, in so many
//                                                  `parts`. 0: the next grant of this demand has these numbers
//   stalled   request, messages, {limit, remaining}...   nothing can be granted now. Without parts: the demand is
//                                                  complete
//   drop      chunk...                             requests the release of the handles of these chunks, which the
//                                                  client does not hold -> dropped
//   query                                          -> report
//   reclaim   bytes                                a demand waits for so many bytes: requests the memory that the
//                                                  client caches and does not use -> reclaimed
//   holders   request, more, {pid, held, unused}...   who holds the memory that a demand waits for, as far as it is
//                                                  known; `unused` as in reclaimed, or kUnknown. Text: a line for each,
//                                                  with the reasons. `more`: 1 if some of them will return memory by
//                                                  themselves. Sent for a stalled demand, when the clients have
//                                                  answered reclaim
//   usage     serial, available, capacity          `available`: idle bytes, and bytes that can be created
//   status    serial                               text: JSON, see memsaver/broker/status.py
//   attach_request  request, pid, residence  + descriptors   text: as in attach -> attach_reply. With a pidfd of the
//                                                  process that attaches, its sentinel, and the pidfds that it sent:
//                                                  the owner passes them to the next broker, since that process may
//                                                  have exited before the next broker starts
//   attached  serial, attachment, more, {offset, chunk, size}...  + a descriptor of each
//   detached  attachment                           the attachment has ended
//   trimmed   serial, bytes                        the released bytes
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"

namespace memsaver::wire {

constexpr std::uint64_t kVersion = 7;
constexpr std::uint64_t kUnknown = ~std::uint64_t{0};         // bytes that are not known
constexpr std::size_t kLongestPacket = std::size_t{1} << 16;  // bytes
constexpr std::size_t kMostDescriptors = 250;                 // in one packet; the kernel allows 253
constexpr std::size_t kMostChunks = 250;                      // in one packet

// name, number
#define MEMSAVER_MESSAGES(define)                                                                              \
  define(hello, 1) define(sentinel, 2) define(inventory, 3) define(restore, 4) define(attachments, 5)          \
      define(demand, 6) define(exchange, 7) define(close, 8) define(give_back, 9) define(dropped, 10)          \
          define(usage, 12) define(status, 13) define(report, 14) define(attach, 15) define(attach_reply, 16)  \
              define(detach, 17) define(trim, 18) define(welcome, 101) define(refused, 102) define(grant, 103) \
                  define(stalled, 104) define(drop, 105) define(query, 106) define(attach_request, 107)        \
                      define(attached, 108) define(detached, 109) define(trimmed, 110) define(ledger, 20)      \
                          define(reclaimed, 21) define(reclaim, 111) define(holders, 112)

#define MEMSAVER_REFUSALS(define)                                                                    \
  define(version, 1) define(malformed, 2) define(user, 3) define(device, 4) define(over_capacity, 5) \
      define(not_attached, 6) define(exhausted, 7) define(pid_namespace, 8)

#define MEMSAVER_ENUMERATOR(name, number) name = (number),
enum class Kind : std::uint32_t { MEMSAVER_MESSAGES(MEMSAVER_ENUMERATOR) };
enum class Refusal : std::uint64_t { MEMSAVER_REFUSALS(MEMSAVER_ENUMERATOR) };
#undef MEMSAVER_ENUMERATOR

constexpr bool is_defined(Kind kind) {
  switch (kind) {
#define MEMSAVER_CASE(name, number) case Kind::name:
    MEMSAVER_MESSAGES(MEMSAVER_CASE)
#undef MEMSAVER_CASE
    return true;
  }
  return false;
}

// Of a chunk in `grant`.
constexpr std::uint64_t kHasDescriptor = 1;
constexpr std::uint64_t kForeign = 2;  // it may hold bytes of another process than the client's

struct Message {
  Kind kind;
  std::vector<std::uint64_t> words;
  std::string text;
  std::vector<File> descriptors;
};

inline Message message_of(Kind kind, std::vector<std::uint64_t> words, std::string text = {}) {
  return {kind, std::move(words), std::move(text), {}};
}

}  // namespace memsaver::wire
