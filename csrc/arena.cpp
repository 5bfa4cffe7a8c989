#include "arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <system_error>

#include "host_memory.h"

namespace memsaver {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr unsigned kMostThreads = 16;
constexpr std::size_t kLeastSpan = std::size_t{64} << 30;
constexpr std::size_t kSpanPerMemory = 4;              // addresses are free: leave room for what fragmentation strands
constexpr auto kPause = std::chrono::milliseconds(5);  // in a region's growth, before the arena follows

// The kernel hands out and zeroes a page at its first touch: one thread does 2 GiB/s, so several do it.
void touch(std::byte* data, std::size_t size) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::min<std::size_t>({cores, kMostThreads, size / kPage + 1});
  const std::size_t share = round_up(size / count + 1, kPage);
  const auto touch_share = [=](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(size, begin + share); at += kHostPage)
      *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  };
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (std::size_t begin = share; begin < size; begin += share) {
    try {
      threads.emplace_back(touch_share, begin);
    } catch (const std::system_error&) {
      touch_share(begin);  // the system has no thread left to give
    }
  }
  touch_share(0);
  for (auto& thread : threads) thread.join();
}

// A wish: pages of the node that the device's bus hangs on. Called by its number, as the library for it is seldom
// there.
void prefer_node(void* data, std::size_t size, int node) {
  constexpr int kPreferred = 1;
  constexpr int kMostNodes = std::numeric_limits<unsigned long>::digits;
  if (node < 0 || node >= kMostNodes - 1) return;
  const unsigned long mask = 1UL << node;
  ::syscall(SYS_mbind, data, size, kPreferred, &mask, kMostNodes, 0);
}

// A range for all slabs to come; for one where the process may not have so many addresses.
std::pair<std::byte*, std::size_t> reserve_addresses(std::size_t least) {
  const std::size_t many = std::max(kLeastSpan, kSpanPerMemory * host_memory().total / kPage * kPage);
  for (const std::size_t span : {many, least}) {
    void* reserved = ::mmap(nullptr, span + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) continue;
    const auto start = round_up(reinterpret_cast<std::uintptr_t>(reserved), kPage);
    return {reinterpret_cast<std::byte*>(start), span};
  }
  throw Error("the system has no addresses for " + std::to_string(least) + " bytes");
}

}  // namespace

void HostArena::check(std::size_t bytes) const {
  const std::size_t idle = idle_bytes();
  bytes = round_up(bytes, kHostPage);
  if (bytes > idle) budget_.check(round_up(bytes - idle, kPage));
}

std::optional<HostArena::Extent> HostArena::take_idle(std::size_t bytes, bool whole) {
  std::lock_guard lock(mutex_);
  return take_idle_locked(bytes, whole);
}

HostArena::Extent HostArena::take_some(std::size_t bytes) {
  bytes = round_up(bytes, kHostPage);
  if (const auto extent = take_idle(bytes, false)) return *extent;
  std::lock_guard growing(growing_);
  for (;;) {
    if (const auto extent = take_idle(bytes, false)) return *extent;  // also what the background made meanwhile
    put(make(budget_.slab(round_up(bytes, kPage)), bytes));
  }
}

HostArena::Extent HostArena::take_whole(std::size_t bytes) {
  bytes = round_up(bytes, kHostPage);
  if (const auto extent = take_idle(bytes, true)) return *extent;
  std::lock_guard growing(growing_);
  if (const auto extent = take_idle(bytes, true)) return *extent;
  const Extent made = make(round_up(bytes, kPage), bytes);
  if (made.size > bytes) put({made.data + bytes, made.size - bytes});
  return {made.data, bytes};
}

std::optional<HostArena::Extent> HostArena::take_idle_locked(std::size_t bytes, bool whole) {
  // The smallest that holds all of it, else the largest there is.
  auto best = idle_.end();
  for (auto entry = idle_.begin(); entry != idle_.end(); ++entry) {
    if (best == idle_.end()) {
      best = entry;
      continue;
    }
    const bool fits = entry->second >= bytes, best_fits = best->second >= bytes;
    if (fits ? !best_fits || entry->second < best->second : !best_fits && entry->second > best->second) best = entry;
  }
  if (best == idle_.end() || (whole && best->second < bytes)) return std::nullopt;
  const Extent taken{best->first, std::min(bytes, best->second)};
  const std::size_t rest = best->second - taken.size;
  idle_.erase(best);
  if (rest > 0) idle_[taken.data + taken.size] = rest;
  used_ += taken.size;
  return taken;
}

void HostArena::put(Extent extent) {
  std::lock_guard lock(mutex_);
  used_ -= extent.size;
  join_locked(idle_, extent);
}

void HostArena::join_locked(std::map<std::byte*, std::size_t>& extents, Extent extent) {
  auto next = extents.lower_bound(extent.data);
  if (next != extents.end() && next->first == extent.data + extent.size) {
    extent.size += next->second;
    next = extents.erase(next);
  }
  if (next != extents.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.data) {
      before->second += extent.size;
      return;
    }
  }
  extents[extent.data] = extent.size;
}

std::byte* HostArena::slab_end(const std::byte* data) const {
  std::lock_guard lock(mutex_);
  auto slab = slabs_.upper_bound(const_cast<std::byte*>(data));
  --slab;
  return slab->first + slab->second;
}

std::byte* HostArena::take_addresses_locked(std::size_t size) {
  const auto fits = [&](const auto& entry) { return entry.second >= size; };
  auto found = std::find_if(addresses_.begin(), addresses_.end(), fits);
  if (found == addresses_.end()) found = addresses_.insert(reserve_addresses(size)).first;
  const auto [data, free_size] = *found;
  addresses_.erase(found);
  if (free_size > size) addresses_[data + size] = free_size - size;
  return data;
}

HostArena::Extent HostArena::make(std::size_t bytes, std::size_t wanted) {
  std::byte* data = nullptr;
  {
    std::lock_guard lock(mutex_);
    data = take_addresses_locked(bytes);
  }
  std::size_t made = 0;
  try {
    while (made < bytes) made += make_slab(data + made, budget_.slab(bytes - made), wanted);
  } catch (const Error&) {
    if (made > 0) put({data, made});
    std::lock_guard lock(mutex_);
    join_locked(addresses_, {data + made, bytes - made});
    throw;
  }
  return {data, bytes};
}

std::size_t HostArena::make_slab(std::byte* data, std::size_t bytes, std::size_t wanted) {
  budget_.take(bytes);
  try {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (::mmap(data, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED)
      throw Error("the system has no memory to map");
    ::madvise(data, bytes, MADV_HUGEPAGE);  // a wish: without it pinning is slower, and as right
    ::madvise(data, bytes, MADV_DONTFORK);  // a fork copies pinned pages at once, and a child may not use them anyway
    prefer_node(data, bytes, driver_.host_node());
    touch(data, bytes);
    driver_.pin(data, bytes);
  } catch (const std::exception& error) {
    ::mmap(data, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    budget_.put(bytes);
    const std::size_t held = held_bytes();
    throw BackupError("cannot get " + std::to_string(wanted) + " bytes more of pinned host memory (" +
                          std::to_string(held) + " bytes held): " + error.what(),
                      wanted, held, 0);
  }
  std::lock_guard lock(mutex_);
  slabs_[data] = bytes;
  held_ += bytes;
  used_ += bytes;
  return bytes;
}

std::size_t HostArena::release_idle() {
  std::lock_guard growing(growing_);
  std::vector<Extent> slabs;
  {
    std::lock_guard lock(mutex_);
    target_ = 0;  // what was wanted ahead is not, until a region grows again
    for (const auto& [data, size] : slabs_) {
      auto idle = idle_.upper_bound(data);
      if (idle == idle_.begin() || (--idle)->first + idle->second < data + size) continue;
      const Extent whole{idle->first, idle->second};
      idle_.erase(idle);
      if (whole.data < data) idle_[whole.data] = static_cast<std::size_t>(data - whole.data);
      std::byte* end = data + size;
      if (whole.data + whole.size > end) idle_[end] = static_cast<std::size_t>(whole.data + whole.size - end);
      used_ += size;  // nobody takes it meanwhile
      slabs.push_back({data, size});
    }
  }
  std::size_t released = 0;
  for (const Extent& slab : slabs) {
    bool gone = true;
    try {
      driver_.unpin(slab.data);
    } catch (const std::exception&) {
      gone = false;  // still registered with the driver: the memory must stay
    }
    if (gone) ::mmap(slab.data, slab.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    std::lock_guard lock(mutex_);
    used_ -= slab.size;
    if (!gone) {
      join_locked(idle_, slab);
      continue;
    }
    slabs_.erase(slab.data);
    held_ -= slab.size;
    join_locked(addresses_, slab);
    budget_.put(slab.size);
    released += slab.size;
  }
  return released;
}

void HostArena::start_background() {
  std::lock_guard lock(mutex_);
  if (background_.joinable() || stop_) return;
  try {
    background_ = std::thread([this] { run_background(); });
  } catch (const std::system_error&) {
    // Without a thread the first pause does it.
  }
}

void HostArena::grow_ahead(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes <= target_) return;
  target_ = bytes;
  wanted_.notify_all();
}

void HostArena::run_background() {
  std::unique_lock lock(mutex_);
  const auto missing = [this] { return target_ > held_ ? target_ - held_ : 0; };
  for (;;) {
    wanted_.wait(lock, [&] { return stop_ || missing() > 0; });
    // Regions grow in many small steps: better one large slab at their end than a small one for each.
    for (std::size_t seen = 0; !stop_ && missing() > seen && missing() < HostBudget::kLargestSlab;) {
      seen = missing();
      wanted_.wait_for(lock, kPause, [&] { return stop_; });
    }
    if (stop_) return;
    const std::size_t tried = target_;
    lock.unlock();
    bool made = true;
    {
      std::lock_guard growing(growing_);
      lock.lock();
      const std::size_t bytes = round_up(missing(), kPage);  // a pause may have made some of it meanwhile
      lock.unlock();
      try {
        budget_.check(bytes);  // a backup that cannot be had whole is not worth a part of it
        if (bytes > 0) {
          const std::size_t slab = budget_.slab(bytes);
          put(make(slab, slab));
        }
      } catch (const Error&) {
        made = false;
      }
    }
    lock.lock();
    if (!made && target_ == tried) target_ = 0;  // the next growth tries again
  }
}

void HostArena::stop_background() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wanted_.notify_all();
  }
  if (background_.joinable()) background_.join();
}

std::size_t HostArena::held_bytes() const {
  std::lock_guard lock(mutex_);
  return held_;
}

std::size_t HostArena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

std::size_t HostArena::idle_bytes() const {
  std::lock_guard lock(mutex_);
  return held_ - used_;
}

}  // namespace memsaver
