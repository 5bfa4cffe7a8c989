// The protocol between a broker and its clients, and between the owner and the receivers of a sent tensor, over a Unix
// socket of type SOCK_SEQPACKET: one message is one packet.
//
// A packet is a head `u32 kind, u32 words`, then `u64 words[words]`, then text to its end; all little-endian.
// Descriptors travel beside it (SCM_RIGHTS), in the order in which the words mention them. Python reads the numbers
// below from the core, so this is their one place.
//
// Versions. Two processes work together if their versions are equal. The head, the first word of `hello` and of
// `welcome`, and `refused` stay the same, so that a refusal names both. The version grows by 1 with each change of a
// message.
//
//   client -> broker, and receiver -> owner
//   hello     version, client, pid  + descriptor   text: the device's uuid for a broker, else empty. `client`: a random
//                                                  number, the same for the life of the process; `pid`: in the client's
//                                                  own pid namespace. The descriptor: the read end of the process's
//                                                  sentinel (csrc/pool/link.h); a tool, which gets no memory, has
//                                                  none -> welcome
//   client -> broker
//   inventory {chunk, size}...                     after welcome, before each other message about memory: the chunks in
//                                                  use, also those of an earlier broker. Ends with a packet of fewer
//                                                  than kMostChunks chunks, an empty one if needed. The driver exports
//                                                  no imported memory: a broker has no descriptor of a chunk of an
//                                                  earlier one, lends it to no other client, and requests `drop` when
//                                                  it is given back
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
//   report                                         answers query. text: JSON, see memsaver/ledger
//   reclaimed more, unused                         answers reclaim, and follows another `reclaimed` with `more` 1. What
//                                                  could be returned without a wait has been given back. `more`: 1 if
//                                                  more comes by itself. `unused`: bytes that no tensor uses and that
//                                                  stay; text: their parts and the reasons
//   offers    bytes                                of the chunks that this client holds, those that lazy pauses offer
//   descriptors serial, chunk...                   requests a descriptor of each of these chunks, at most
//                                                  kMostDescriptors, which this client holds, to lend them itself
//                                                  -> descriptors
//   trim      serial, bytes                        releases idle chunks to the driver until at most `bytes` are idle
//                                                  -> trim
//
//   broker -> client
//   welcome   version, capacity                    of an owner: version, 0
//   refused   code, request                        text: the reason. `request`: the first word of the refused message.
//                                                  `over_capacity`: the demand exceeds the pool's capacity.
//                                                  `no_descriptor`: there is none of a chunk in `descriptors`.
//                                                  `failed`: the owner has raised an error; text: JSON. All other codes
//                                                  are followed by the end of the connection
//   grant     request, messages, parts, {limit, remaining}..., {chunk, size, flags}...  + descriptors   of the chunks
//                                                  with flag `has_descriptor`, of which this client has no handle.
//                                                  `messages`: the number of messages about this demand (demand and
//                                                  exchange) that the broker has received. Then `remaining` bytes are
//                                                  still to be granted in chunks of at most `limit`, in so many
//                                                  `parts`. 0: the next grant of this demand has these numbers
//   stalled   request, messages, offers, {limit, remaining}...   nothing can be granted now. `offers`: bytes that
//                                                  clients offer. Without parts: the demand is complete
//   drop      chunk...                             requests the release of the handles of these chunks, which the
//                                                  client does not hold -> dropped
//   query                                          -> report
//   reclaim   bytes, request                       a demand waits. 0 bytes: requests the memory that the client
//                                                  caches and does not use. Else requests so many bytes of its offered
//                                                  chunks; `request`: of the demand, if it is the client's own ->
//                                                  reclaimed
//   holders   request, more, {pid, held, unused}...   who holds the memory that a demand waits for, as far as it is
//                                                  known; `unused` as in reclaimed, or kUnknown. Text: a line for each,
//                                                  with the reasons. `more`: 1 if some of them will return memory by
//                                                  themselves. Sent for a stalled demand, when the clients have
//                                                  answered reclaim
//   usage     serial, available, capacity          `available`: idle bytes, and bytes that can be created
//   status    serial                               text: JSON, see memsaver/broker/status.py
//   descriptors serial  + descriptors              of the chunks of the request, in its order
//   trim      serial, bytes                        the released bytes
//
//   receiver -> owner, see memsaver/_torch/ipc
//   receive   serial, claim, residence             claims a storage. `claim`: a random number of the receiver; 0: it
//                                                  has the storage already. text: the storage's token, the device's
//                                                  UUID and the tag, a line each -> lent
//   chunks    serial, claim, first                 -> slots, from the chunk with this index on
//   release   claim                                also of a claim that was refused. Claims outlive a connection
//
//   owner -> receiver
//   lent      serial, first, span, count           the claim has so many chunks, within `span` bytes from `first` on
//   slots     serial, {offset, size}...  + descriptors
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"

namespace memsaver::wire {

constexpr std::uint64_t kVersion = 15;
constexpr std::uint64_t kUnknown = ~std::uint64_t{0};         // bytes that are not known
constexpr std::size_t kLongestPacket = std::size_t{1} << 16;  // bytes
constexpr std::size_t kMostDescriptors = 250;                 // in one packet; the kernel allows 253
constexpr std::size_t kMostChunks = 250;                      // in one packet

// name, number
#define MEMSAVER_MESSAGES(define)                                                                                      \
  define(hello, 1) define(inventory, 3) define(demand, 4) define(exchange, 5) define(close, 6) define(give_back, 7)    \
      define(dropped, 8) define(usage, 9) define(status, 10) define(report, 11) define(trim, 12) define(reclaimed, 13) \
          define(descriptors, 14) define(offers, 15) define(receive, 21) define(chunks, 22) define(release, 23)        \
              define(welcome, 101) define(refused, 102) define(grant, 103) define(stalled, 104) define(drop, 105)      \
                  define(query, 106) define(reclaim, 107) define(holders, 108) define(lent, 121) define(slots, 122)

#define MEMSAVER_REFUSALS(define)                                                                                      \
  define(version, 1) define(malformed, 2) define(user, 3) define(device, 4) define(over_capacity, 5) define(failed, 6) \
      define(exhausted, 7) define(pid_namespace, 8) define(no_descriptor, 9)

#define MEMSAVER_ENUMERATOR(name, number) name = (number),
enum class Kind : std::uint32_t { MEMSAVER_MESSAGES(MEMSAVER_ENUMERATOR) };
enum class Refusal : std::uint64_t { MEMSAVER_REFUSALS(MEMSAVER_ENUMERATOR) };
#undef MEMSAVER_ENUMERATOR

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
