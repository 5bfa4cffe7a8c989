#include "host/addresses.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

namespace memsaver::host {
namespace {

// Of a chunk's file. The capacity of its device follows.
constexpr std::string_view kFileName = "memsaver-";

[[noreturn]] void refuse(const std::string& why) { throw Refused(kInvalidValue, why); }

struct stat status_of(int file) {
  struct stat status{};
  if (::fstat(file, &status) != 0) refuse_by_errno("fstat");
  return status;
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

Address Addresses::reserve(std::size_t size, std::size_t alignment) {
  void* memory = ::mmap(nullptr, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) refuse_by_errno("mmap");
  const auto start = reinterpret_cast<Address>(memory);
  const Address aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) ::munmap(memory, aligned - start);
  ::munmap(bytes_at(aligned + size), start + alignment - aligned);
  std::lock_guard lock(mutex_);
  reserved_[aligned] = size;
  return aligned;
}

void Addresses::unreserve(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  const auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != size) refuse("the range was not reserved as such");
  if (overlaps(address, size)) refuse("the range still holds mappings");
  reserved_.erase(found);
  ::munmap(bytes_at(address), size);
}

Handle Addresses::create(Ledger& ledger, std::size_t size) {
  File file(::memfd_create((std::string(kFileName) + std::to_string(ledger.capacity())).c_str(), MFD_CLOEXEC));
  if (file.get() < 0) refuse_by_errno("memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) refuse_by_errno("ftruncate");
  const std::uint64_t inode = status_of(file.get()).st_ino;
  if (!ledger.charge(inode, size)) throw Refused(kOutOfMemory, "the host device is full");
  return enter(ledger, std::move(file), inode, size);
}

Handle Addresses::import(Ledger& ledger, int file) {
  const struct stat status = status_of(file);
  File copy(::fcntl(file, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) refuse_by_errno("fcntl");
  const auto size = static_cast<std::size_t>(status.st_size);
  ledger.charge_imported(status.st_ino, size);
  return enter(ledger, std::move(copy), status.st_ino, size);
}

Handle Addresses::enter(Ledger& ledger, File file, std::uint64_t inode, std::size_t size) {
  std::lock_guard lock(mutex_);
  chunks_[++last_handle_] = {file.keep(), inode, size, &ledger};
  return last_handle_;
}

void Addresses::adopt(Handle handle) {
  std::lock_guard lock(mutex_);
  const Chunk& chunk = find(handle);
  chunk.ledger->adopt(chunk.inode);
}

Handle Addresses::retain(Address address) {
  std::lock_guard lock(mutex_);
  auto found = mapped_.upper_bound(address);
  if (found == mapped_.begin() || (--found)->first + found->second.size <= address) refuse("nothing is mapped there");
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
  const int copy = ::fcntl(find(handle).file, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) refuse_by_errno("fcntl");
  return copy;
}

void Addresses::map(Address address, std::size_t size, Handle handle) {
  std::lock_guard lock(mutex_);
  Chunk& chunk = find(handle);
  if (size != chunk.size) refuse("a chunk is mapped whole");
  if (!within_reservation(address, size)) refuse("the address was not reserved");
  if (overlaps(address, size)) refuse("the range holds a mapping");
  if (::mmap(bytes_at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk.file, 0) == MAP_FAILED)
    refuse_by_errno("mmap");
  mapped_[address] = {size, handle, false};
  ++chunk.mappings;
}

void Addresses::allow(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  check_whole_chunks(address, size);
  if (::mprotect(bytes_at(address), size, PROT_READ | PROT_WRITE) != 0) refuse_by_errno("mprotect");
  for (auto entry = mapped_.lower_bound(address); entry != mapped_.end() && entry->first < address + size; ++entry)
    entry->second.allowed = true;
}

bool Addresses::unmap(Address address, std::size_t size) {
  std::unique_lock lock(mutex_);
  const bool in_use = accessed(address, size);
  left_.wait(lock, [&] { return !accessed(address, size); });
  check_whole_chunks(address, size);
  if (::mmap(bytes_at(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED)
    refuse_by_errno("mmap");
  for (auto entry = mapped_.lower_bound(address); entry != mapped_.end() && entry->first < address + size;) {
    const Handle handle = entry->second.handle;
    entry = mapped_.erase(entry);
    --chunks_.at(handle).mappings;
    drop_if_unused(handle);
  }
  return !in_use;
}

Addresses::Access Addresses::access(Address address, std::size_t size) {
  std::lock_guard lock(mutex_);
  if (!accessible(address, size)) return nullptr;
  const auto entry = accessed_.insert(accessed_.end(), {address, address + size});
  return {this, [entry](void* addresses) {
            auto& all = *static_cast<Addresses*>(addresses);
            std::lock_guard held(all.mutex_);
            all.accessed_.erase(entry);
            all.left_.notify_all();
          }};
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
  ::close(chunk.file);
  chunk.ledger->discharge(chunk.inode);
  chunks_.erase(handle);
}

bool Addresses::within_reservation(Address address, std::size_t size) const {
  auto after = reserved_.upper_bound(address);
  if (after == reserved_.begin()) return false;
  --after;
  return address + size <= after->first + after->second;
}

bool Addresses::overlaps(Address address, std::size_t size) const {
  auto next = mapped_.lower_bound(address);
  if (next != mapped_.end() && next->first < address + size) return true;
  return next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
}

bool Addresses::accessible(Address address, std::size_t size) const {
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

bool Addresses::accessed(Address address, std::size_t size) const {
  return std::any_of(accessed_.begin(), accessed_.end(),
                     [&](const Range& range) { return range.begin < address + size && range.end > address; });
}

void Addresses::check_whole_chunks(Address address, std::size_t size) const {
  Address covered = address;
  for (auto entry = mapped_.find(address);
       entry != mapped_.end() && entry->first == covered && covered < address + size; ++entry)
    covered += entry->second.size;
  if (covered != address + size) refuse("the range is not made of whole mapped chunks");
}

}  // namespace memsaver::host
