// A library with torch's allocator object: pools of blocks over the entry points of regions, and the three methods that
// csrc/torch/torch_pools.cpp calls, at their places in torch 2.11. As in torch, the end of a pool throws while a thread
// is routed to any pool, and a call for an unknown pool throws.
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace {

using Id = std::pair<unsigned long long, unsigned long long>;
using Alloc = void* (*)(std::ptrdiff_t, int, void*);
using Free = void (*)(void*, std::ptrdiff_t, int, void*);

struct Block {
  std::size_t size;
  bool live;
};
struct Pool {
  int uses;
  Alloc alloc;
  Free free;
  std::map<void*, Block> blocks;
};

std::recursive_mutex mutex;  // of torch's allocator: held over the calls of the entry points
std::map<Id, Pool> pools;
int routes = 0, calls = 0;

Pool& known(Id id) {
  const auto found = pools.find(id);
  if (found == pools.end()) throw std::runtime_error("no such pool");
  return found->second;
}

void empty_cache(void*, Id id) {
  const std::lock_guard lock(mutex);
  ++calls;
  const auto found = pools.find(id);
  if (found == pools.end() || found->second.uses > 0) return;
  if (routes > 0) throw std::runtime_error("captures_underway.empty()");
  Pool& pool = found->second;
  for (auto block = pool.blocks.begin(); block != pool.blocks.end();) {
    if (block->second.live) {
      ++block;
      continue;
    }
    pool.free(block->first, static_cast<std::ptrdiff_t>(block->second.size), 0, nullptr);
    block = pool.blocks.erase(block);
  }
  if (pool.blocks.empty()) pools.erase(found);
}

void release_pool(void*, std::int8_t, Id id) {
  const std::lock_guard lock(mutex);
  ++calls;
  --known(id).uses;
}

int use_count(void*, std::int8_t, Id id) {
  const std::lock_guard lock(mutex);
  return known(id).uses;
}

void wrong() { throw std::logic_error("a method of another place in the table"); }

struct Allocator {
  void** table;
};

std::array<void*, 64>& table() {
  static std::array<void*, 64> made = [] {
    std::array<void*, 64> all{};
    all.fill(reinterpret_cast<void*>(&wrong));
    all[7] = reinterpret_cast<void*>(&empty_cache);
    all[28] = reinterpret_cast<void*>(&release_pool);
    all[29] = reinterpret_cast<void*>(&use_count);
    return all;
  }();
  return made;
}

Allocator only{table().data()};

}  // namespace

namespace c10::cuda::CUDACachingAllocator {
extern std::atomic<void*> allocator;
std::atomic<void*> allocator = &only;
}  // namespace c10::cuda::CUDACachingAllocator

extern "C" {

// As torch's MemPool: its constructor, an allocation in it, the free of one, and the figures.
void fake_pool(unsigned long long number, void* alloc, void* free) {
  const std::lock_guard lock(mutex);
  pools[{0, number}] = {1, reinterpret_cast<Alloc>(alloc), reinterpret_cast<Free>(free), {}};
}

void* fake_malloc(unsigned long long number, std::size_t size) {
  const std::lock_guard lock(mutex);
  Pool& pool = pools.at({0, number});
  for (auto& [address, block] : pool.blocks)
    if (!block.live && block.size == size) {
      block.live = true;
      return address;
    }
  void* made = pool.alloc(static_cast<std::ptrdiff_t>(size), 0, nullptr);
  if (made != nullptr) pool.blocks[made] = {size, true};
  return made;
}

void fake_free(unsigned long long number, void* address) {
  const std::lock_guard lock(mutex);
  pools.at({0, number}).blocks.at(address).live = false;
}

int fake_is_there(unsigned long long number) {
  const std::lock_guard lock(mutex);
  return pools.count({0, number}) ? 1 : 0;
}

int fake_uses(unsigned long long number) {
  const std::lock_guard lock(mutex);
  return pools.at({0, number}).uses;
}

void fake_use(unsigned long long number, int change) {
  const std::lock_guard lock(mutex);
  pools.at({0, number}).uses += change;
}

void fake_route(int change) {
  const std::lock_guard lock(mutex);
  routes += change;
}

// Writes a byte to one file, and returns when it has read a byte from another.
int fake_hold(int tell, int until) {
  char byte = 1;
  return static_cast<int>(write(tell, &byte, 1) + read(until, &byte, 1));
}

int fake_calls() {
  const std::lock_guard lock(mutex);
  return calls;
}
}
