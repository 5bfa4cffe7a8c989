#include "backup.h"

#include <sys/mman.h>

#include <algorithm>
#include <system_error>
#include <thread>

namespace memsaver {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr std::size_t kLargestSlab = std::size_t{1} << 30;  // one registration each
constexpr unsigned kMostThreads = 16;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The kernel hands out and zeroes a page at its first touch: one thread does 2 GiB/s, so several do it.
void touch(std::byte* data, std::size_t size) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::min<std::size_t>({cores, kMostThreads, size / kPage + 1});
  const std::size_t share = round_up(size / count + 1, kHostPage);
  const auto touch_share = [=](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(size, begin + share); at += kHostPage)
      *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  };
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (std::size_t begin = 0; begin < size; begin += share) {
    try {
      threads.emplace_back(touch_share, begin);
    } catch (const std::system_error&) {
      touch_share(begin);  // the system has no thread left to give
    }
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

std::vector<HostArena::Extent> HostArena::take(std::size_t bytes) {
  bytes = round_up(bytes, kHostPage);
  std::lock_guard lock(mutex_);
  const std::size_t idle = held_ - used_;
  if (idle < bytes) {
    for (const Slab& slab : grow(bytes - idle)) {
      slabs_[slab.data] = slab.size;
      free_[slab.data] = slab.size;
      held_ += slab.size;
    }
  }
  std::vector<Extent> taken;
  std::size_t missing = bytes;
  while (missing > 0) {
    const auto first = free_.begin();
    const std::size_t size = std::min(missing, first->second);
    std::byte* data = first->first;
    const std::size_t rest = first->second - size;
    free_.erase(first);
    if (rest > 0) free_[data + size] = rest;
    taken.push_back({data, size});
    missing -= size;
  }
  used_ += bytes;
  return taken;
}

void HostArena::put(const std::vector<Extent>& extents) {
  std::lock_guard lock(mutex_);
  for (const Extent& extent : extents) {
    used_ -= extent.size;
    put_locked(extent);
  }
}

void HostArena::put_locked(Extent extent) {
  auto next = free_.lower_bound(extent.data);
  if (next != free_.end() && next->first == extent.data + extent.size && !slabs_.contains(next->first)) {
    extent.size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && !slabs_.contains(extent.data)) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.data) {
      before->second += extent.size;
      return;
    }
  }
  free_[extent.data] = extent.size;
}

std::vector<HostArena::Slab> HostArena::grow(std::size_t bytes) {
  std::vector<Slab> grown;
  try {
    for (std::size_t missing = round_up(bytes, kPage); missing > 0;) {
      const std::size_t size = std::min(missing, kLargestSlab);
      void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw Error("the system has no memory to map");
      ::madvise(memory, size, MADV_HUGEPAGE);  // a wish: without it pinning is slower, and as right
      auto* data = static_cast<std::byte*>(memory);
      touch(data, size);
      try {
        driver_.pin(data, size);
      } catch (...) {
        ::munmap(data, size);
        throw;
      }
      grown.push_back({data, size});
      missing -= size;
    }
  } catch (const std::exception& error) {
    discard(grown);
    throw BackupError("cannot get " + std::to_string(bytes) + " more bytes of pinned host memory (" +
                          std::to_string(held_) + " held): " + error.what(),
                      bytes, held_);
  }
  return grown;
}

void HostArena::discard(const std::vector<Slab>& slabs) noexcept {
  for (const Slab& slab : slabs) {
    try {
      driver_.unpin(slab.data);
    } catch (const std::exception&) {
      continue;  // still registered with the driver: the memory must stay
    }
    ::munmap(slab.data, slab.size);
  }
}

std::size_t HostArena::held_bytes() const {
  std::lock_guard lock(mutex_);
  return held_;
}

std::size_t HostArena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

Backup::Backup(HostArena& arena, std::vector<Range> live) : arena_(arena), live_(std::move(live)), bytes_(0) {
  for (const Range& range : live_) bytes_ += range.size;
  extents_ = arena_.take(bytes_);
}

std::vector<Backup::Piece> Backup::pieces() const {
  std::vector<Piece> found;
  auto extent = extents_.begin();
  std::size_t used_of_extent = 0;
  for (const Range& range : live_) {
    for (std::size_t done = 0; done < range.size;) {
      const std::size_t size = std::min(range.size - done, extent->size - used_of_extent);
      found.push_back({range.offset + done, extent->data + used_of_extent, size});
      done += size;
      used_of_extent += size;
      if (used_of_extent == extent->size) {
        ++extent;
        used_of_extent = 0;
      }
    }
  }
  return found;
}

}  // namespace memsaver
