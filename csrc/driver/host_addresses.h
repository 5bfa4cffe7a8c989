// The addresses of the host driver's device: reservations, mappings of chunks, and accesses under way.
//
// The semantics are those of CUDA's virtual memory calls. Wrong arguments throw DriverError.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "driver/driver.h"
#include "driver/host_chunk.h"
#include "driver/host_ledger.h"

namespace memsaver {

inline std::byte* bytes_at(Address address) { return reinterpret_cast<std::byte*>(address); }

class HostAddresses {
 public:
  explicit HostAddresses(HostLedger& ledger) : ledger_(ledger) {}
  HostAddresses(const HostAddresses&) = delete;
  HostAddresses& operator=(const HostAddresses&) = delete;

  Address reserve(std::size_t size);
  void unreserve(Address address, std::size_t size);

  Handle enter(HostChunk chunk, std::size_t size);
  void release(Handle handle);
  int export_fd(Handle handle);

  void map(Address address, std::size_t size, Handle handle);
  void allow(Address address, std::size_t size);
  // False if work of the device was accessing the range. The call waits for this work, since a fault would end the
  // process. On a GPU such work is an illegal access.
  bool unmap(Address address, std::size_t size);

  bool is_mapped(Address address);

  // An access to a range, under way while the object lives. Null: a part of the range is not mapped, or has no access.
  using Access = std::shared_ptr<void>;
  Access access(Address address, std::size_t size);

 private:
  struct Physical {
    int file;
    std::uint64_t inode;
    std::size_t size;
    std::size_t mappings;
    bool released;
  };
  struct Mapping {
    std::size_t size;
    Handle handle;
    bool allowed;
  };
  struct Range {
    Address begin;
    Address end;
  };

  Physical& find(const char* call, Handle handle);
  void drop_if_unused(Handle handle);
  bool within_reservation(Address address, std::size_t size) const;
  bool overlaps(Address address, std::size_t size) const;
  bool accessible(Address address, std::size_t size) const;
  bool accessed(Address address, std::size_t size) const;
  void check_whole_chunks(const char* call, Address address, std::size_t size) const;

  HostLedger& ledger_;
  std::mutex mutex_;
  std::condition_variable left_;  // an access ended
  std::map<Address, std::size_t> reserved_;
  std::map<Address, Mapping> mapped_;
  std::unordered_map<Handle, Physical> memories_;
  std::list<Range> accessed_;
  Handle last_handle_ = 0;
};

}  // namespace memsaver
