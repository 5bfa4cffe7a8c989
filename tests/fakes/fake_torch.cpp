// A library with torch's expandable segments over the driver's functions, which come from a table as in torch. The table
// has other words as well.
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <type_traits>

namespace {

std::recursive_mutex mutex;  // of torch's allocator: held over the calls of the driver

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

extern "C" {

// Writes a byte to one file, and returns when it has read a byte from another.
int fake_hold(int tell, int until) {
  char byte = 1;
  return static_cast<int>(write(tell, &byte, 1) + read(until, &byte, 1));
}

int fake_empty_cache() {
  const std::lock_guard lock(mutex);
  return empty_default_pool();
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
