#include "host/addresses.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

namespace memsaver::host {
namespace {

// Of a chunk's file. The capacity of its device follows.
constexpr std::string_view kFileName = "memsaver-";

[[noreturn]] void refuse(const std::string& why) { throw Refused(kInvalidValue, why); }

// Addresses without memory and without access. MAP_FIXED: it replaces the former mapping.
Address map_nothing(Address at, std::size_t size, int fixed) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed;
  void* memory = ::mmap(bytes_at(at), size, PROT_NONE, flags, -1, 0);
  if (memory == MAP_FAILED) refuse_by_errno("mmap");
  return reinterpret_cast<Address>(memory);
}

}  // namespace

std::size_t capacity_of(int file) {
  char link[64] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const std::string prefix = "/memfd:" + std::string(kFileName);
  if (::readlink(path.c_str(), link, sizeof link - 1) < 0 || !std::string_view(link).starts_with(prefix))
    refuse("the descriptor is not of memory of a host device");
  return std::strtoull(link + prefix.size(), nullptr, 10);
}

Address Addresses::reserve(std::size_t size, std::size_t alignment, Address at) {
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

void Addresses::unreserve(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  const auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != size) refuse("the range was not reserved as such");
  if (!overlapping(mapped_, {address, size}).empty()) refuse("the range still holds mappings");
  reserved_.erase(found);
  ::munmap(bytes_at(address), size);
}

Handle Addresses::create(Ledger& ledger, std::size_t size) {
  File file(::memfd_create((std::string(kFileName) + std::to_string(ledger.capacity())).c_str(), MFD_CLOEXEC));
  if (file.get() < 0) refuse_by_errno("memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) refuse_by_errno("ftruncate");
  return enter(ledger, std::move(file), size);
}

Handle Addresses::import(Ledger& ledger, int file) {
  File copy(::fcntl(file, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) refuse_by_errno("fcntl");
  return enter(ledger, std::move(copy), 0);
}

// `size`: of a new chunk. 0: the memory exists already.
Handle Addresses::enter(Ledger& ledger, File file, std::size_t size) {
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

Handle Addresses::retain(Address address) {
  std::lock_guard lock(mutex_);
  const auto found = entry_at(mapped_, address);
  if (found == mapped_.end()) refuse("nothing is mapped there");
  ++chunks_.at(found->second.handle).references;
  return found->second.handle;
}

void Addresses::release(Handle handle) {
  std::lock_guard lock(mutex_);
  Chunk& chunk = find(handle);
  if (chunk.references == 0) refuse("the handle was released before");
  --chunk.references;
  drop_if_unused(handle);
}

int Addresses::export_fd(Handle handle) {
  std::lock_guard lock(mutex_);
  const Chunk& chunk = find(handle);
  if (chunk.is_imported) refuse("invalid argument");
  const int copy = ::fcntl(chunk.file.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) refuse_by_errno("fcntl");
  return copy;
}

void Addresses::map(Address address, std::size_t size, Handle handle) {
  std::lock_guard lock(mutex_);
  Chunk& chunk = find(handle);
  if (size != chunk.size) refuse("a chunk is mapped whole");
  if (!within_reservation({address, size})) refuse("the address was not reserved");
  if (!overlapping(mapped_, {address, size}).empty()) refuse("the range holds a mapping");
  if (::mmap(bytes_at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk.file.get(), 0) == MAP_FAILED)
    refuse_by_errno("mmap");
  mapped_[address] = {size, handle, false};
  ++chunk.mappings;
}

void Addresses::allow(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  check_whole_chunks({address, size});
  if (::mprotect(bytes_at(address), size, PROT_READ | PROT_WRITE) != 0) refuse_by_errno("mprotect");
  for (auto& [begin, mapping] : overlapping(mapped_, {address, size})) mapping.allowed = true;
}

void Addresses::unmap(Address address, std::size_t size) {
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

Addresses::Access::Access(Addresses& all, Address address, std::size_t size)
    : all_(all), range_([&] {
        const std::lock_guard lock(all.mutex_);
        began_legal_ = all.accessible({address, size});
        return all.accessed_.insert(all.accessed_.end(), {address, began_legal_ ? size : 0});  // else it is not made
      }()) {}

Addresses::Access::~Access() {
  const std::lock_guard lock(all_.mutex_);
  all_.accessed_.erase(range_);
  all_.left_.notify_all();
}

bool Addresses::Access::is_legal() const {
  const std::lock_guard lock(all_.mutex_);
  return began_legal_ && all_.accessible(*range_);
}

void Addresses::wait_for_accesses() {
  std::unique_lock lock(mutex_);
  left_.wait(lock, [this] { return accessed_.empty(); });
}

Addresses::Chunk& Addresses::find(Handle handle) {
  const auto found = chunks_.find(handle);
  if (found == chunks_.end()) refuse("there is no such handle");
  return found->second;
}

void Addresses::drop_if_unused(Handle handle) {
  const Chunk& chunk = chunks_.at(handle);
  if (chunk.references > 0 || chunk.mappings > 0) return;
  chunk.ledger->discharge(chunk.inode);
  chunks_.erase(handle);
}

bool Addresses::within_reservation(Range range) const {
  const auto found = entry_at(reserved_, range.offset);
  return found != reserved_.end() && range.end() <= found->first + found->second;
}

bool Addresses::accessible(Range range) const {
  std::size_t end = range.offset;
  for (const auto& [begin, mapping] : overlapping(mapped_, range)) {
    if (begin > end || !mapping.allowed) return false;
    end = begin + mapping.size;
  }
  return end >= range.end();
}

bool Addresses::accessed(Range range) const {
  return std::any_of(accessed_.begin(), accessed_.end(), [&](const Range& each) {
    return each.size > 0 && each.offset < range.end() && each.end() > range.offset;
  });
}

void Addresses::check_whole_chunks(Range range) const {
  std::size_t covered = range.offset;
  for (const auto& [begin, mapping] : overlapping(mapped_, range)) {
    if (begin != covered) break;
    covered += mapping.size;
  }
  if (covered != range.end() || !within_reservation(range))
    refuse("the range is not made of whole mapped chunks of one reservation");
}

}  // namespace memsaver::host
