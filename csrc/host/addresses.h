// The addresses of the host devices: reservations, chunks and their mappings, and accesses under way.
//
// The semantics are those of CUDA's virtual memory calls. A chunk is an unnamed file of memory with an entry in the
// ledger of its device. Wrong arguments throw Refused.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/files.h"
#include "base/ranges.h"
#include "base/scoped.h"
#include "host/ledger.h"

namespace memsaver::host {

using Address = cuda::DevicePointer;
using Handle = cuda::AllocationHandle;

inline std::byte* bytes_at(Address address) { return reinterpret_cast<std::byte*>(address); }

// Of a chunk's file. The capacity of its device follows.
inline constexpr std::string_view kFileName = "memsaver-";

[[noreturn]] inline void refuse(const std::string& why) { throw Refused(kInvalidValue, why); }

// Addresses without memory and without access. MAP_FIXED: it replaces the former mapping.
inline Address map_nothing(Address at, std::size_t size, int fixed) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed;
  void* memory = ::mmap(bytes_at(at), size, PROT_NONE, flags, -1, 0);
  if (memory == MAP_FAILED) refuse_by_errno("mmap");
  return reinterpret_cast<Address>(memory);
}

class Addresses : Immovable {
 public:
  Address reserve(std::size_t size, std::size_t alignment, Address at) {  // `at`: there, if it is free. 0: anywhere
    Address found = map_nothing(at, size, 0);
    if (found % alignment != 0) {
      ::munmap(bytes_at(found), size);
      const Address start = map_nothing(0, size + alignment, 0);
      found = (start + alignment - 1) / alignment * alignment;
      if (found > start) ::munmap(bytes_at(start), found - start);
      ::munmap(bytes_at(found + size), start + alignment - found);
    }
    std::lock_guard lock(mutex_);
    reserved_[found] = size;
    return found;
  }
  void unreserve(Address address, std::size_t size) {
    std::lock_guard lock(mutex_);
    const auto found = reserved_.find(address);
    if (found == reserved_.end() || found->second != size) refuse("the range was not reserved as such");
    if (!overlapping(mapped_, {address, size}).empty()) refuse("the range still holds mappings");
    reserved_.erase(found);
    ::munmap(bytes_at(address), size);
  }

  // Chunks by handle. A handle counts its references. The memory is freed when it has none and no mapping.
  Handle create(Ledger& ledger, std::size_t size) {
    File file(::memfd_create((std::string(kFileName) + std::to_string(ledger.capacity())).c_str(), MFD_CLOEXEC));
    if (file.get() < 0) refuse_by_errno("memfd_create");
    if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) refuse_by_errno("ftruncate");
    return enter(ledger, std::move(file), size);
  }
  Handle import(Ledger& ledger, int file) {  // duplicates the descriptor
    File copy(::fcntl(file, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) refuse_by_errno("fcntl");
    return enter(ledger, std::move(copy), 0);
  }
  Handle retain(Address address) {  // the handle of the chunk that is mapped there, with one more reference
    std::lock_guard lock(mutex_);
    const auto found = entry_at(mapped_, address);
    if (found == mapped_.end()) refuse("nothing is mapped there");
    ++chunks_.at(found->second.handle).references;
    return found->second.handle;
  }
  void release(Handle handle) {
    std::lock_guard lock(mutex_);
    Chunk& chunk = find(handle);
    if (chunk.references == 0) refuse("the handle was released before");
    --chunk.references;
    drop_if_unused(handle);
  }
  int export_fd(Handle handle) {  // not of imported memory, as on a GPU
    std::lock_guard lock(mutex_);
    const Chunk& chunk = find(handle);
    if (chunk.is_imported) refuse("invalid argument");
    const int copy = ::fcntl(chunk.file.get(), F_DUPFD_CLOEXEC, 0);
    if (copy < 0) refuse_by_errno("fcntl");
    return copy;
  }

  void map(Address address, std::size_t size, Handle handle) {
    std::lock_guard lock(mutex_);
    Chunk& chunk = find(handle);
    if (size != chunk.size) refuse("a chunk is mapped whole");
    if (address % kGranularity != 0) refuse("the address is not a multiple of 2 MiB");
    if (!within_reservation({address, size})) refuse("the address was not reserved");
    if (!overlapping(mapped_, {address, size}).empty()) refuse("the range holds a mapping");
    if (::mmap(bytes_at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk.file.get(), 0) == MAP_FAILED)
      refuse_by_errno("mmap");
    mapped_[address] = {size, handle, false};
    ++chunk.mappings;
  }
  void allow(Address address, std::size_t size) {
    std::lock_guard lock(mutex_);
    check_whole_chunks({address, size});
    if (::mprotect(bytes_at(address), size, PROT_READ | PROT_WRITE) != 0) refuse_by_errno("mprotect");
    for (auto& [begin, mapping] : overlapping(mapped_, {address, size})) mapping.allowed = true;
  }
  // Waits for accesses under way, since a fault would end the process. On a GPU they are illegal.
  void unmap(Address address, std::size_t size) {
    std::unique_lock lock(mutex_);
    check_whole_chunks({address, size});
    for (auto& [begin, mapping] : overlapping(mapped_, {address, size})) mapping.allowed = false;
    left_.wait(lock, [&] { return !accessed({address, size}); });
    map_nothing(address, size, MAP_FIXED);
    const auto chunks = overlapping(mapped_, {address, size});
    for (const auto& [begin, mapping] : chunks) {
      --chunks_.at(mapping.handle).mappings;
      drop_if_unused(mapping.handle);
    }
    mapped_.erase(chunks.begin(), chunks.end());
  }

  // An access of work to a range, under way while the object lives.
  class Access : Immovable {
   public:
    Access(Addresses& all, Address address, std::size_t size)
        : all_(all), range_([&] {
            const std::lock_guard lock(all.mutex_);
            began_legal_ = all.accessible({address, size});
            return all.accessed_.insert(all.accessed_.end(),
                                        {address, began_legal_ ? size : 0});  // else it is not made
          }()) {}
    ~Access() {
      const std::lock_guard lock(all_.mutex_);
      all_.accessed_.erase(range_);
      all_.left_.notify_all();
    }
    bool is_legal() const {  // the whole range was mapped with access from the beginning until now
      const std::lock_guard lock(all_.mutex_);
      return began_legal_ && all_.accessible(*range_);
    }

   private:
    Addresses& all_;
    bool began_legal_ = false;
    const std::list<Range>::iterator range_;
  };
  void wait_for_accesses() {  // until none is under way
    std::unique_lock lock(mutex_);
    left_.wait(lock, [this] { return accessed_.empty(); });
  }

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

  // `size`: of a new chunk. 0: the memory exists already.
  Handle enter(Ledger& ledger, File file, std::size_t size) {
    struct stat status{};
    if (::fstat(file.get(), &status) != 0) refuse_by_errno("fstat");
    const auto bytes = static_cast<std::size_t>(status.st_size);
    if (size == 0)
      ledger.charge_imported(status.st_ino, bytes);
    else if (!ledger.charge(status.st_ino, bytes))
      throw Refused(kOutOfMemory, "the host device is full");
    std::lock_guard lock(mutex_);
    chunks_.try_emplace(++last_handle_, std::move(file), status.st_ino, bytes, &ledger, size == 0);
    return last_handle_;
  }
  Chunk& find(Handle handle) {
    const auto found = chunks_.find(handle);
    if (found == chunks_.end()) refuse("there is no such handle");
    return found->second;
  }
  void drop_if_unused(Handle handle) {
    const Chunk& chunk = chunks_.at(handle);
    if (chunk.references > 0 || chunk.mappings > 0) return;
    chunk.ledger->discharge(chunk.inode);
    chunks_.erase(handle);
  }
  bool within_reservation(Range range) const {
    const auto found = entry_at(reserved_, range.offset);
    return found != reserved_.end() && range.end() <= found->first + found->second;
  }
  bool accessible(Range range) const {
    std::size_t end = range.offset;
    for (const auto& [begin, mapping] : overlapping(mapped_, range)) {
      if (begin > end || !mapping.allowed) return false;
      end = begin + mapping.size;
    }
    return end >= range.end();
  }
  bool accessed(Range range) const {
    return std::any_of(accessed_.begin(), accessed_.end(), [&](const Range& each) {
      return each.size > 0 && each.offset < range.end() && each.end() > range.offset;
    });
  }
  void check_whole_chunks(Range range) const {
    std::size_t covered = range.offset;
    for (const auto& [begin, mapping] : overlapping(mapped_, range)) {
      if (begin != covered) break;
      covered += mapping.size;
    }
    if (covered != range.end() || !within_reservation(range))
      refuse("the range is not made of whole mapped chunks of one reservation");
  }

  std::mutex mutex_;
  std::condition_variable left_;  // an access ended
  std::map<Address, std::size_t> reserved_;
  std::map<Address, Mapping> mapped_;
  std::unordered_map<Handle, Chunk> chunks_;
  std::list<Range> accessed_;
  Handle last_handle_ = 0;
};

// The capacity of the device of a chunk's descriptor. Throws Refused for other descriptors.
inline std::size_t capacity_of(int file) {
  char link[64] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const std::string prefix = "/memfd:" + std::string(kFileName);
  if (::readlink(path.c_str(), link, sizeof link - 1) < 0 || !std::string_view(link).starts_with(prefix))
    refuse("the descriptor is not of memory of a host device");
  return std::strtoull(link + prefix.size(), nullptr, 10);
}

}  // namespace memsaver::host
