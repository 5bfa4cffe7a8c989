#include "backup/pinned_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <thread>

#include "backup/host_memory.h"

namespace memsaver {
namespace {

constexpr std::size_t kHostPage = 4096;
constexpr unsigned kMostThreads = 16;
constexpr std::size_t kFirstRange = std::size_t{64} << 30;  // of addresses

// The system's limit of locked memory, for errors: the driver's error does not name it.
std::string lock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; this process may lock " + std::to_string(limit.rlim_cur) + " bytes of memory (RLIMIT_MEMLOCK)";
}

// The kernel provides and zeroes a page at its first touch. One thread reaches 2 GiB/s, so several touch. `writes`: a
// read of memory without a file would get a page that all memory shares; a write to a file would change it.
void touch(std::byte* data, std::size_t size, bool writes) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::min<std::size_t>({cores, kMostThreads, size / kPage + 1});
  const std::size_t share = round_up(size / count + 1, kPage);
  const auto touch_share = [=](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(size, begin + share); at += kHostPage) {
      auto& byte = *reinterpret_cast<volatile std::byte*>(data + at);
      if (writes)
        byte = std::byte{0};
      else
        static_cast<void>(static_cast<std::byte>(byte));
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t begin = share; begin < size; begin += share) {
    try {
      threads.emplace_back(touch_share, begin);
    } catch (const std::system_error&) {
      touch_share(begin);  // no thread is available
    }
  }
  touch_share(0);
}

Address address_of(const std::byte* data) { return reinterpret_cast<Address>(data); }
Range range_of(HostArena::Extent extent) { return {address_of(extent.data), extent.size}; }
HostArena::Extent extent_of(Range range) { return {reinterpret_cast<std::byte*>(range.offset), range.size}; }

// A range of addresses of `wish` bytes, or of `least` bytes if that fails; nullopt if both fail. At least one page
// behind it stays unused, so that no two ranges touch.
std::optional<Range> reserve_addresses(std::size_t wish, std::size_t least) {
  for (const std::size_t span : {wish, least}) {
    void* reserved = ::mmap(nullptr, span + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) continue;
    const auto start = round_up(reinterpret_cast<std::uintptr_t>(reserved), kPage);
    return Range{start, span};
  }
  return std::nullopt;
}

// Releases the memory. The addresses stay reserved.
void drop_memory(HostArena::Extent extent) {
  ::mmap(extent.data, extent.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace

HostArena::HostArena(Driver& driver, HostBudget& budget)
    : driver_(driver),
      budget_(budget),
      nodes_(driver.gpu_memory_is_host_memory() ? std::optional(nodes_with_cpus()) : std::nullopt) {
  if (nodes_) budget.use_nodes_with_cpus();
}

void HostArena::check(std::size_t bytes) const {
  const std::size_t idle = idle_bytes();
  bytes = round_up(bytes, kHostPage);
  if (bytes > idle) budget_.check(round_up(bytes - idle, kPage));
}

std::optional<HostArena::Extent> HostArena::take_idle(std::size_t bytes, bool whole) {
  std::lock_guard lock(mutex_);
  const auto taken = idle_.take(bytes, whole);
  if (!taken) return std::nullopt;
  return extent_of(*taken);
}

HostArena::Extent HostArena::take_some(std::size_t bytes) {
  bytes = round_up(bytes, kHostPage);
  if (const auto extent = take_idle(bytes, false)) return *extent;
  std::lock_guard growing(growing_);
  for (;;) {
    if (const auto extent = take_idle(bytes, false)) return *extent;  // another thread may have made some
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

void HostArena::put(Extent extent) {
  std::lock_guard lock(mutex_);
  idle_.put(range_of(extent));
}

std::byte* HostArena::slab_end(const std::byte* data) const {
  std::lock_guard lock(mutex_);
  const auto slab = entry_at(slabs_, address_of(data));
  return reinterpret_cast<std::byte*>(slab->first + slab->second);
}

// Each range doubles the reserved addresses: few ranges, since no extent spans two, and addresses are left for other
// devices.
std::byte* HostArena::take_addresses(std::size_t size) {
  std::lock_guard lock(mutex_);
  auto found = addresses_.take(size);
  if (!found) {
    const auto range = reserve_addresses(std::max(size, reserved_ == 0 ? kFirstRange : reserved_), size);
    if (!range)
      throw BackupError("the system has no addresses for " + std::to_string(size) +
                            " bytes more of pinned host memory (" + std::to_string(held_) + " bytes held)",
                        size, held_, 0, true);
    reserved_ += range->size;
    addresses_.put(*range);
    found = addresses_.take(size);
  }
  return extent_of(*found).data;
}

HostArena::Extent HostArena::make(std::size_t bytes, std::size_t wanted) {
  std::byte* const data = take_addresses(bytes);
  std::size_t made = 0;
  try {
    while (made < bytes) made += make_slab(data + made, budget_.slab(bytes - made), wanted);
  } catch (const Error&) {
    if (made > 0) put({data, made});
    std::lock_guard lock(mutex_);
    addresses_.put({address_of(data) + made, bytes - made});
    throw;
  }
  return {data, bytes};
}

void HostArena::map_memory(std::byte* data, std::size_t bytes, const std::optional<Source>& source) {
  const int flags = MAP_FIXED | (source ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  const auto [file, offset] = source.value_or(Source{-1, 0});
  if (::mmap(data, bytes, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(offset)) == MAP_FAILED)
    throw Error("the system has no memory to map");
  ::madvise(data, bytes, MADV_HUGEPAGE);  // optional: without it pinning is slower
  ::madvise(data, bytes, MADV_DONTFORK);  // a fork would copy pinned pages at once, and a child must not use them
  if (nodes_) bind_to_nodes(data, bytes, *nodes_);
}

std::size_t HostArena::make_slab(std::byte* data, std::size_t bytes, std::size_t wanted) {
  budget_.take(bytes);
  try {
    fill_slab(data, bytes, wanted, std::nullopt);
  } catch (const BackupError&) {
    budget_.put(bytes);
    throw;
  }
  std::lock_guard lock(mutex_);
  slabs_[address_of(data)] = bytes;
  held_ += bytes;
  return bytes;
}

void HostArena::fill_slab(std::byte* data, std::size_t bytes, std::size_t wanted, const std::optional<Source>& source) {
  try {
    map_memory(data, bytes, source);
    if (!nodes_) prefer_node(data, bytes, driver_.host_node());
    touch(data, bytes, !source);
    if (nodes_) check_nodes(data, *nodes_);
    try {
      driver_.pin(data, bytes);
    } catch (const DriverError&) {
      try {
        driver_.unpin(data);  // a registration may succeed and yet report an error of other work
      } catch (const DriverError&) {
        // It was not registered.
      }
      throw;
    }
  } catch (const std::exception& error) {
    drop_memory({data, bytes});
    const std::size_t held = held_bytes();
    const bool is_refused = dynamic_cast<const DriverError*>(&error) != nullptr;  // to pin what the system has given
    throw BackupError("cannot get " + std::to_string(wanted) + " bytes more of pinned host memory (" +
                          std::to_string(held) + " bytes held): " + error.what() + (is_refused ? lock_limit() : ""),
                      wanted, held, 0, true);
  }
}

std::byte* HostArena::map_file(int file, std::size_t offset, std::size_t bytes) {
  std::byte* const data = take_addresses(bytes);
  try {
    fill_slab(data, bytes, bytes, Source{file, offset});
  } catch (const BackupError&) {
    std::lock_guard lock(mutex_);
    addresses_.put({address_of(data), bytes});
    throw;
  }
  common_ += bytes;
  return data;
}

bool HostArena::unmap_file(Extent extent) {
  try {
    driver_.unpin(extent.data);
  } catch (const std::exception&) {
    return false;  // still registered with the driver: the memory must be kept
  }
  drop_memory(extent);
  common_ -= extent.size;
  std::lock_guard lock(mutex_);
  addresses_.put(range_of(extent));
  return true;
}

std::size_t HostArena::release_idle() {
  std::lock_guard growing(growing_);
  Ranges slabs;  // not idle meanwhile, so that no thread takes them
  {
    std::lock_guard lock(mutex_);
    for (const auto& [begin, size] : slabs_)
      if (idle_.take_at({begin, size})) slabs.push_back({begin, size});
  }
  std::size_t released = 0;
  for (const Range& slab : slabs) {
    const Extent extent = extent_of(slab);
    try {
      driver_.unpin(extent.data);
    } catch (const std::exception&) {
      put(extent);  // still registered with the driver: the memory must be kept
      continue;
    }
    drop_memory(extent);
    std::lock_guard lock(mutex_);
    slabs_.erase(slab.offset);
    held_ -= slab.size;
    addresses_.put(slab);
    budget_.put(slab.size);
    released += slab.size;
  }
  return released;
}

}  // namespace memsaver
