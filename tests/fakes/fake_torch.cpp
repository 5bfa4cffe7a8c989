// A library with torch's allocator object: pools of blocks over the entry points of regions, and the three methods that
// csrc/torch/torch_pools.cpp calls, at their places in torch 2.11. As in torch, the end of a pool throws while a thread
// is routed to any pool, and a call for an unknown pool throws.
//
// Beside it are expandable segments over the driver's functions, which come from a table as in torch. The table has
// other words as well.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <type_traits>
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

int empty_default_pool();

void empty_cache(void*, Id id) {
  const std::lock_guard lock(mutex);
  ++calls;
  if (id == Id{0, 0} && routes == 0) empty_default_pool();
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

// The default pool: expandable segments, and cached pieces that emptyCache({0, 0}) unmaps.

using Pointer = unsigned long long;
using Handle = unsigned long long;
using Result = int;

struct Properties {
  int type = 1, handle_types = 1, on_device = 1, device = 0;
  void* win32_meta = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  int on_device, device, flags;
};

struct Driver {
  void* first = nullptr;
  Result (*reserve)(Pointer*, std::size_t, std::size_t, Pointer, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Pointer, std::size_t, std::size_t, Handle, unsigned long long);
  Result (*address_free)(Pointer, std::size_t);
  Result (*set_access)(Pointer, std::size_t, const Access*, std::size_t);
  Result (*unmap)(Pointer, std::size_t);
  Result (*create)(Handle*, std::size_t, const Properties*, unsigned long long);
  Result (*export_handle)(void*, Handle, int, unsigned long long);
  void* last = nullptr;
};

Driver look_up() {
  using LookUp = Result (*)(const char*, void**, int, unsigned long long, int*);
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw std::runtime_error("no driver");
  const auto get = reinterpret_cast<LookUp>(dlsym(library, "cuGetProcAddress_v2"));
  const auto find = [&](const char* name, auto& function) {
    void* found = nullptr;
    int status = 0;
    if (get(name, &found, 12000, 0, &status) != 0) throw std::runtime_error(name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  Driver driver;
  find("cuMemAddressReserve", driver.reserve);
  find("cuMemRelease", driver.release);
  find("cuMemMap", driver.map);
  find("cuMemAddressFree", driver.address_free);
  find("cuMemSetAccess", driver.set_access);
  find("cuMemUnmap", driver.unmap);
  find("cuMemCreate", driver.create);
  find("cuMemExportToShareableHandle", driver.export_handle);
  return driver;
}

struct Segment {
  int device;
  std::size_t piece, most;
  Pointer address = 0;
  std::map<std::size_t, Handle> handles;
  std::map<std::size_t, bool> cached;  // by piece
};
std::map<int, Segment> segments;
int last_segment = 0;
int handle_types = 1;  // POSIX descriptors

void nothing() {}
void (*const fixed_table[16])() = {&nothing};  // the loader makes this memory read-only
void* chosen_table = nullptr;

}  // namespace

namespace c10::cuda {
struct DriverAPI {
  static void* get();
};
void* DriverAPI::get() {
  static Driver only = look_up();
  return chosen_table != nullptr ? chosen_table : &only;
}
}  // namespace c10::cuda

namespace {

const Driver& driver() { return *static_cast<Driver*>(c10::cuda::DriverAPI::get()); }

int unmap_pieces(Segment& segment, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    if (const int code = driver().unmap(segment.address + i * segment.piece, segment.piece)) return code;
    if (const int code = driver().release(segment.handles.at(i))) return code;
    segment.handles.erase(i);
    segment.cached.erase(i);
  }
  return 0;
}

int empty_default_pool() {
  int code = 0;
  for (auto& [number, segment] : segments)
    for (auto each = segment.cached.begin(); each != segment.cached.end() && code == 0;) {
      const auto piece = (each++)->first;
      code = unmap_pieces(segment, piece, piece + 1);
    }
  return code;
}

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

// As torch's ExpandableSegment: reserves addresses for `most` pieces.
int fake_segment(int device, std::size_t piece, std::size_t most) {
  const std::lock_guard lock(mutex);
  Segment made{device, piece, most, 0, {}, {}};
  if (driver().reserve(&made.address, piece * most, 0, 0, 0) != 0) return 0;
  segments[++last_segment] = made;
  return last_segment;
}

unsigned long long fake_segment_address(int number) {
  const std::lock_guard lock(mutex);
  return segments.at(number).address;
}

// Creates all pieces first, as torch does. Frees cached pieces and tries again if there is no memory and `retries`.
int fake_segment_map(int number, std::size_t begin, std::size_t end, int retries) {
  const std::lock_guard lock(mutex);
  Segment& segment = segments.at(number);
  const Properties properties{1, handle_types, 1, segment.device, nullptr, {}};
  for (std::size_t i = begin; i < end; ++i)
    if (segment.handles.count(i) > 0) return -1;  // torch's assertion that it has no handle of the piece
  for (std::size_t i = begin; i < end; ++i) {
    int code = driver().create(&segment.handles[i], segment.piece, &properties, 0);
    if (code == 0) continue;
    if (code != 2) return code;  // as in torch, the handles stay
    segment.handles.erase(i);
    for (std::size_t piece = begin; piece < i; ++piece) {
      driver().release(segment.handles.at(piece));
      segment.handles.erase(piece);
    }
    if (retries == 0) return code;
    if ((code = empty_default_pool()) != 0) return code;
    return fake_segment_map(number, begin, end, retries - 1);
  }
  for (std::size_t i = begin; i < end; ++i) {
    const Handle handle = segment.handles.at(i);
    if (const int code = driver().map(segment.address + i * segment.piece, segment.piece, 0, handle, 0)) return code;
  }
  const Access access{1, segment.device, 3};
  return driver().set_access(segment.address + begin * segment.piece, (end - begin) * segment.piece, &access, 1);
}

// The table that DriverAPI::get() returns is in read-only memory from now on.
void fake_fix_table() { chosen_table = const_cast<void*>(static_cast<const void*>(fixed_table)); }

void fake_handle_types(int wanted) {
  const std::lock_guard lock(mutex);
  handle_types = wanted;
}

int fake_segment_unmap(int number, std::size_t begin, std::size_t end) {
  const std::lock_guard lock(mutex);
  return unmap_pieces(segments.at(number), begin, end);
}

// Marks pieces as free blocks.
void fake_segment_cache(int number, std::size_t begin, std::size_t end) {
  const std::lock_guard lock(mutex);
  for (std::size_t i = begin; i < end; ++i) segments.at(number).cached[i] = true;
}

int fake_segment_peer(int number, int device, std::size_t begin, std::size_t end) {
  const std::lock_guard lock(mutex);
  const Segment& segment = segments.at(number);
  const Access access{1, device, 3};
  return driver().set_access(segment.address + begin * segment.piece, (end - begin) * segment.piece, &access, 1);
}

int fake_segment_export(int number, std::size_t piece) {
  const std::lock_guard lock(mutex);
  int file = -1;
  const int code = driver().export_handle(&file, segments.at(number).handles.at(piece), 1, 0);
  if (code == 0) close(file);
  return code;
}

int fake_segment_close(int number) {
  const std::lock_guard lock(mutex);
  Segment& segment = segments.at(number);
  while (!segment.handles.empty())
    if (const int code = unmap_pieces(segment, segment.handles.begin()->first, segment.handles.begin()->first + 1))
      return code;
  const int code = driver().address_free(segment.address, segment.piece * segment.most);
  segments.erase(number);
  return code;
}

// cuMemCreate of the table, for callers outside of this library.
void* fake_create() { return reinterpret_cast<void*>(driver().create); }
}
