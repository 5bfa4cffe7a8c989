// The addresses of the host devices: reservations, chunks and their mappings, and accesses under way.
//
// The semantics are those of CUDA's virtual memory calls. A chunk is an unnamed file of memory with an entry in the
// ledger of its device. Wrong arguments throw Refused.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

#include "base/files.h"
#include "base/ranges.h"
#include "base/scoped.h"
#include "host/ledger.h"

namespace memsaver::host {

using Address = cuda::DevicePointer;
using Handle = cuda::AllocationHandle;

inline std::byte* bytes_at(Address address) { return reinterpret_cast<std::byte*>(address); }

class Addresses : Immovable {
 public:
  Address reserve(std::size_t size, std::size_t alignment, Address at);  // `at`: there, if it is free. 0: anywhere
  void unreserve(Address address, std::size_t size);

  // Chunks by handle. A handle counts its references. The memory is freed when it has none and no mapping.
  Handle create(Ledger& ledger, std::size_t size);
  Handle import(Ledger& ledger, int file);  // duplicates the descriptor
  Handle retain(Address address);           // the handle of the chunk that is mapped there, with one more reference
  void release(Handle handle);
  int export_fd(Handle handle);  // not of imported memory, as on a GPU

  void map(Address address, std::size_t size, Handle handle);
  void allow(Address address, std::size_t size);
  // Waits for accesses under way, since a fault would end the process. On a GPU they are illegal.
  void unmap(Address address, std::size_t size);

  // An access of work to a range, under way while the object lives.
  class Access : Immovable {
   public:
    Access(Addresses& all, Address address, std::size_t size);
    ~Access();
    bool is_legal() const;  // the whole range was mapped with access from the beginning until now

   private:
    Addresses& all_;
    bool began_legal_ = false;
    const std::list<Range>::iterator range_;
  };
  void wait_for_accesses();  // until none is under way

 private:
  struct Chunk {
    File file;
    std::uint64_t inode;  // its key in the ledger
    std::size_t size;
    Ledger* ledger;
    bool is_imported;
    std::size_t references = 1;
    std::size_t mappings = 0;
  };
  struct Mapping {
    std::size_t size;
    Handle handle;
    bool allowed;
  };

  Handle enter(Ledger& ledger, File file, std::size_t size);
  Chunk& find(Handle handle);
  void drop_if_unused(Handle handle);
  bool within_reservation(Range range) const;
  bool accessible(Range range) const;
  bool accessed(Range range) const;
  void check_whole_chunks(Range range) const;

  std::mutex mutex_;
  std::condition_variable left_;  // an access ended
  std::map<Address, std::size_t> reserved_;
  std::map<Address, Mapping> mapped_;
  std::unordered_map<Handle, Chunk> chunks_;
  std::list<Range> accessed_;
  Handle last_handle_ = 0;
};

// The capacity of the device of a chunk's descriptor. Throws Refused for other descriptors.
std::size_t capacity_of(int file);

}  // namespace memsaver::host
