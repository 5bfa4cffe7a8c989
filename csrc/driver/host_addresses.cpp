#include "driver/host_addresses.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>

namespace memsaver {
namespace {

[[noreturn]] void refuse(const char* call, const std::string& why) { throw DriverError(call, kInvalidValue, why); }

}  // namespace

Address HostAddresses::reserve(std::size_t size) {
  void* memory = ::mmap(nullptr, size + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_errno("reserve");
  const auto start = reinterpret_cast<Address>(memory);
  const Address aligned = round_up(start, kPage);
  if (aligned > start) ::munmap(memory, aligned - start);
  ::munmap(bytes_at(aligned + size), start + kPage - aligned);
  std::lock_guard lock(mutex_);
  reserved_[aligned] = size;
  return aligned;
}

void HostAddresses::unreserve(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  const auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != size) refuse("unreserve", "the range was not reserved as such");
  if (overlaps(address, size)) refuse("unreserve", "the range still holds mappings");
  reserved_.erase(found);
  ::munmap(bytes_at(address), size);
}

Handle HostAddresses::enter(HostChunk chunk, std::size_t size) {
  std::lock_guard lock(mutex_);
  memories_[++last_handle_] = {chunk.file.keep(), chunk.inode, size, 0, false};
  return last_handle_;
}

void HostAddresses::release(Handle handle) {
  std::lock_guard lock(mutex_);
  Physical& memory = find("release", handle);
  if (memory.released) refuse("release", "the handle was released before");
  memory.released = true;
  drop_if_unused(handle);
}

int HostAddresses::export_fd(Handle handle) {
  std::lock_guard lock(mutex_);
  const int copy = ::fcntl(find("export_fd", handle).file, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw_errno("export_fd");
  return copy;
}

void HostAddresses::map(Address address, std::size_t size, Handle handle) {
  std::lock_guard lock(mutex_);
  Physical& memory = find("map", handle);
  if (size != memory.size) refuse("map", "a chunk is mapped whole");
  if (!within_reservation(address, size)) refuse("map", "the address was not reserved");
  if (overlaps(address, size)) refuse("map", "the range holds a mapping");
  if (::mmap(bytes_at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory.file, 0) == MAP_FAILED)
    throw_errno("map");
  mapped_[address] = {size, handle, false};
  ++memory.mappings;
}

void HostAddresses::allow(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  check_whole_chunks("allow", address, size);
  if (::mprotect(bytes_at(address), size, PROT_READ | PROT_WRITE) != 0) throw_errno("allow");
  for (auto entry = mapped_.lower_bound(address); entry != mapped_.end() && entry->first < address + size; ++entry)
    entry->second.allowed = true;
}

bool HostAddresses::unmap(Address address, std::size_t size) {
  std::unique_lock lock(mutex_);
  const bool in_use = accessed(address, size);
  left_.wait(lock, [&] { return !accessed(address, size); });
  check_whole_chunks("unmap", address, size);
  if (::mmap(bytes_at(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED)
    throw_errno("unmap");
  for (auto entry = mapped_.lower_bound(address); entry != mapped_.end() && entry->first < address + size;) {
    const Handle handle = entry->second.handle;
    entry = mapped_.erase(entry);
    --memories_.at(handle).mappings;
    drop_if_unused(handle);
  }
  return !in_use;
}

bool HostAddresses::is_mapped(Address address) {
  std::lock_guard lock(mutex_);
  return mapped_.contains(address);
}

HostAddresses::Access HostAddresses::access(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  if (!accessible(address, size)) return nullptr;
  const auto entry = accessed_.insert(accessed_.end(), {address, address + size});
  return {this, [entry](void* addresses) {
            auto& all = *static_cast<HostAddresses*>(addresses);
            std::lock_guard held(all.mutex_);
            all.accessed_.erase(entry);
            all.left_.notify_all();
          }};
}

HostAddresses::Physical& HostAddresses::find(const char* call, Handle handle) {
  const auto found = memories_.find(handle);
  if (found == memories_.end()) refuse(call, "there is no such handle");
  return found->second;
}

void HostAddresses::drop_if_unused(Handle handle) {
  const Physical& memory = memories_.at(handle);
  if (!memory.released || memory.mappings > 0) return;
  ::close(memory.file);
  ledger_.discharge(memory.inode);
  memories_.erase(handle);
}

bool HostAddresses::within_reservation(Address address, std::size_t size) const {
  auto after = reserved_.upper_bound(address);
  if (after == reserved_.begin()) return false;
  --after;
  return address + size <= after->first + after->second;
}

bool HostAddresses::overlaps(Address address, std::size_t size) const {
  auto next = mapped_.lower_bound(address);
  if (next != mapped_.end() && next->first < address + size) return true;
  return next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
}

bool HostAddresses::accessible(Address address, std::size_t size) const {
  const Address end = address + size;
  auto next = mapped_.upper_bound(address);
  if (next != mapped_.begin()) --next;
  for (; address < end; ++next) {
    if (next == mapped_.end() || next->first > address) return false;
    if (!next->second.allowed) return false;
    address = next->first + next->second.size;
  }
  return true;
}

bool HostAddresses::accessed(Address address, std::size_t size) const {
  return std::any_of(accessed_.begin(), accessed_.end(),
                     [&](const Range& range) { return range.begin < address + size && range.end > address; });
}

void HostAddresses::check_whole_chunks(const char* call, Address address, std::size_t size) const {
  Address covered = address;
  for (auto entry = mapped_.find(address);
       entry != mapped_.end() && entry->first == covered && covered < address + size; ++entry)
    covered += entry->second.size;
  if (covered != address + size) refuse(call, "the range is not made of whole mapped chunks");
}

}  // namespace memsaver
