// The words that broker and clients exchange, over a Unix socket of type SOCK_SEQPACKET: one message, one packet.
//
// A packet is `u32 kind, u32 count, u64 words[count]`, then text to its end; little-endian. Descriptors travel beside
// it (SCM_RIGHTS) in the order in which the words speak of them. Python reads the numbers below from the core, so this
// is their one place.
//
//   client -> broker
//   hello     version, client                      text: the device's uuid. `client`: drawn at random, kept for life
//   want      request, {limit, fresh, bytes}...    opens a demand: `bytes` in chunks of at most `limit` each, and of at
//                                                  most `fresh` where they have to be made. Demands are served in the
//                                                  order in which they were opened
//   more      request, {limit, fresh, bytes}...    asks for this before the rest of an open demand, and instead of as
//                                                  many bytes of the rest, those of the largest limit first; what the
//                                                  rest does not have is added
//   close     request                              ends a demand, served or not
//   give      chunk...                             hands chunks back. Their contents are no longer of interest
//   dropped   chunk...                             answers drop: this client holds no handle of them any more
//   bring     {chunk, size}...  + descriptors      after welcome: chunks that this client still uses, held from the
//                                                  broker that was here before; ends with a packet of less than the
//                                                  most descriptors, an empty one if need be
//   owed      lease, pid, chunk...                 after bring: an attachment to this client's memory that goes on
//   holds     lease...                             after bring: the attachments of this client to others' memory
//   scrub     0 or 1                               whether this client wants its chunks zeroed for the next owner;
//                                                  0 until it says so
//   look      serial                               -> figures
//   status    serial                               -> status
//   report    {allocated, mapped, backup, state, policy}...   answers query. text: the regions' tags, joined by '\n'
//   attach    serial, client, pid, residence       a lease of another client's memory. text: `tag '\n' policy '\n'
//                                                  offset '\n' size ['\n' offset '\n' size]...`
//   leased    serial, lease, more, {offset, chunk, size}...   answers lease; lease 0: refused, and text says why.
//                                                  `more`: 1 where another packet of the same follows
//   detach    lease                                ends an attachment
//   trim      serial, bytes                        lets idle chunks go until at most `bytes` of them are kept ->
//   trimmed
//
//   broker -> client
//   welcome   version, capacity
//   refused   code, request                        text: why. Code `no_room` ends a demand that can never be served,
//   and
//                                                  `no_lease` an attach (request: its serial); all other codes come
//                                                  last: the broker hangs up
//   grant     request, {chunk, size, flags, limit}...  + descriptors   of those with flag `has_descriptor`, which this
//                                                  client has no handle of yet. `limit`: of what it was asked for as
//   stalled   request, count, left                 nothing more to be had now, after `count` messages of this demand
//                                                  (want and more): `left` bytes are still to come; 0: it is served
//   drop      chunk...                             release the handles of these: they are not held by this client
//   query                                          -> report
//   figures   serial, available, capacity, {pid, held}...   `available`: idle bytes, and what could be made
//   status    serial                               text: JSON, see memsaver/pool.py
//   lease     serial, pid, residence               text: as in attach -> leased
//   attached  serial, lease, more, {offset, chunk, size}...  + a descriptor of each
//   unlease   lease                                the attachment has ended
//   trimmed   serial, bytes                        bytes that went
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace memsaver::wire {

constexpr std::uint64_t kVersion = 2;
constexpr std::size_t kLongestPacket = std::size_t{1} << 16;  // bytes
constexpr std::size_t kMostDescriptors = 250;                 // in one packet; the kernel allows 253
constexpr std::size_t kMostChunks = 250;                      // in one packet

// name, number
#define MEMSAVER_MESSAGES(say)                                                                                      \
  say(hello, 1) say(want, 2) say(more, 3) say(close, 4) say(give, 5) say(dropped, 6) say(bring, 7) say(owed, 8)     \
      say(scrub, 9) say(look, 10) say(status, 11) say(report, 12) say(attach, 13) say(leased, 14) say(detach, 15)   \
          say(trim, 16) say(holds, 17) say(welcome, 101) say(refused, 102) say(grant, 103) say(stalled, 104)        \
              say(drop, 105) say(query, 106) say(figures, 107) say(lease, 108) say(attached, 109) say(unlease, 110) \
                  say(trimmed, 111)

#define MEMSAVER_REFUSALS(say) \
  say(version, 1) say(malformed, 2) say(user, 3) say(device, 4) say(no_room, 5) say(no_lease, 6) say(exhausted, 7)

enum class Kind : std::uint32_t {
#define MEMSAVER_ENUMERATOR(name, number) name = (number),
  MEMSAVER_MESSAGES(MEMSAVER_ENUMERATOR)
};

enum class Refusal : std::uint64_t {
  MEMSAVER_REFUSALS(MEMSAVER_ENUMERATOR)
#undef MEMSAVER_ENUMERATOR
};

// Of a chunk in `grant`.
constexpr std::uint64_t kHasDescriptor = 1;
constexpr std::uint64_t kScrub = 2;  // its last owner was another, and one of the two wants it zeroed

struct Message {
  Kind kind;
  std::vector<std::uint64_t> words;
  std::string text;
  std::vector<int> descriptors;  // who receives a message closes them
};

inline Message message_of(Kind kind, std::vector<std::uint64_t> words, std::string text = {}) {
  return {kind, std::move(words), std::move(text), {}};
}

}  // namespace memsaver::wire
