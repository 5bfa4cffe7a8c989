// A device made of host memory: mmap addresses over memfd chunks, with the semantics of CUDA's virtual memory calls,
// so that everything above the seam runs, fails and shares between processes on any Linux machine.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "copy_engine.h"
#include "driver.h"
#include "host_chunk.h"
#include "host_ledger.h"

namespace memsaver {
namespace {

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

[[noreturn]] void refuse(const char* call, const std::string& why) { throw DriverError(call, kInvalidValue, why); }

class HostDriver final : public Driver {
 public:
  explicit HostDriver(std::size_t capacity) : Driver("cpu"), ledger_(capacity) {}

  std::string uuid() override { return ledger_.uuid(); }

  Memory memory() override {
    const std::size_t used = ledger_.used();
    return {ledger_.capacity() - std::min(used, ledger_.capacity()), ledger_.capacity()};
  }

  std::vector<Process> processes() override { return ledger_.processes(); }

  int host_node() override { return -1; }

  Address reserve(std::size_t size) override {
    faults().check("reserve");
    check_size("reserve", size);
    void* memory = ::mmap(nullptr, size + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw_errno("reserve");
    const auto start = reinterpret_cast<Address>(memory);
    const Address aligned = round_up(start, kPage);
    if (aligned > start) ::munmap(memory, aligned - start);
    ::munmap(pointer(aligned + size), start + kPage - aligned);
    std::lock_guard lock(mutex_);
    reserved_[aligned] = size;
    return aligned;
  }

  void unreserve(Address address, std::size_t size) override {
    std::lock_guard lock(mutex_);
    const auto found = reserved_.find(address);
    if (found == reserved_.end() || found->second != size) refuse("unreserve", "the range was not reserved as such");
    if (overlaps(address, size)) refuse("unreserve", "the range still holds mappings");
    reserved_.erase(found);
    ::munmap(pointer(address), size);
  }

  Handle create(std::size_t size) override {
    faults().check("create");
    check_size("create", size);
    HostChunk chunk = make_host_chunk(ledger_, size);
    std::lock_guard lock(mutex_);
    return enter(chunk.file.keep(), chunk.inode, size);
  }

  void release(Handle handle) override {
    faults().check("release");
    std::lock_guard lock(mutex_);
    Physical& memory = find("release", handle);
    if (memory.released) refuse("release", "the handle was released before");
    memory.released = true;
    drop_if_unused(handle);
  }

  int export_fd(Handle handle) override {
    faults().check("export_fd");
    std::lock_guard lock(mutex_);
    const int copy = ::fcntl(find("export_fd", handle).file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw_errno("export_fd");
    return copy;
  }

  Handle import_fd(int fd, std::size_t size) override {
    faults().check("import_fd");
    HostChunk chunk = import_host_chunk(ledger_, fd, size);
    std::lock_guard lock(mutex_);
    return enter(chunk.file.keep(), chunk.inode, size);
  }

  void map(Address address, std::size_t size, Handle handle) override {
    faults().check("map");
    std::lock_guard lock(mutex_);
    Physical& memory = find("map", handle);
    if (size != memory.size) refuse("map", "a chunk is mapped whole");
    if (!within_reservation(address, size)) refuse("map", "the address was not reserved");
    if (overlaps(address, size)) refuse("map", "the range holds a mapping");
    if (::mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory.file, 0) == MAP_FAILED)
      throw_errno("map");
    mapped_[address] = {size, handle};
    ++memory.mappings;
  }

  void allow(Address address, std::size_t size) override {
    faults().check("allow");
    std::lock_guard lock(mutex_);
    check_whole_chunks("allow", address, size);
    if (::mprotect(pointer(address), size, PROT_READ | PROT_WRITE) != 0) throw_errno("allow");
  }

  void unmap(Address address, std::size_t size) override {
    faults().check("unmap");
    std::lock_guard lock(mutex_);
    check_whole_chunks("unmap", address, size);
    if (::mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      throw_errno("unmap");
    for (auto entry = mapped_.lower_bound(address); entry != mapped_.end() && entry->first < address + size;) {
      const Handle handle = entry->second.handle;
      entry = mapped_.erase(entry);
      --memories_.at(handle).mappings;
      drop_if_unused(handle);
    }
  }

  // The host has no queue of work but copies: whatever else was called has happened.
  void synchronize() override { faults().check("synchronize"); }
  Ticket record() override { return std::make_shared<Mark>(); }
  bool done(const Ticket& ticket) override {
    const auto* mark = static_cast<const Mark*>(ticket.get());
    return mark->engine == nullptr || mark->engine->done(mark->number);
  }

  void copy_out(void* host, Address address, std::size_t size) override {
    faults().check("copy_out");
    out_.submit([=] { std::memcpy(host, pointer(address), size); });
  }
  void copy_in(Address address, const void* host, std::size_t size) override {
    faults().check("copy_in");
    in_.submit([=] { std::memcpy(pointer(address), host, size); });
  }
  void fill(Address address, std::size_t size, unsigned char byte) override {
    faults().check("fill");
    in_.submit([=] { std::memset(pointer(address), byte, size); });
  }
  Ticket mark(Direction direction) override {
    faults().check("mark");
    CopyEngine& engine = direction == Direction::out ? out_ : in_;
    return std::make_shared<Mark>(Mark{&engine, engine.submitted()});
  }
  void wait(const Ticket& ticket) override {
    faults().check("wait");
    const auto* mark = static_cast<const Mark*>(ticket.get());
    if (mark->engine != nullptr) mark->engine->wait(mark->number);
  }
  void finish_copies() override {
    faults().check("finish_copies");
    out_.wait(out_.submitted());
    in_.wait(in_.submitted());
  }
  void pin(void*, std::size_t) override { faults().check("pin"); }
  void unpin(void*) override {}

 private:
  struct Physical {
    int file;
    std::uint64_t inode;
    std::size_t size;
    std::size_t mappings;
    bool released;
  };
  struct Mapping {
    std::size_t size;
    Handle handle;
  };
  struct Mark {
    CopyEngine* engine = nullptr;  // null: work that is done already
    std::uint64_t number = 0;
  };

  static void check_size(const char* call, std::size_t size) {
    if (size == 0 || size % kPage != 0) refuse(call, std::to_string(size) + " bytes is not a multiple of 2 MiB");
  }

  Handle enter(int file, std::uint64_t inode, std::size_t size) {
    memories_[++last_handle_] = {file, inode, size, 0, false};
    return last_handle_;
  }

  Physical& find(const char* call, Handle handle) {
    const auto found = memories_.find(handle);
    if (found == memories_.end()) refuse(call, "there is no such handle");
    return found->second;
  }

  void drop_if_unused(Handle handle) {
    const Physical& memory = memories_.at(handle);
    if (!memory.released || memory.mappings > 0) return;
    ::close(memory.file);
    ledger_.discharge(memory.inode);
    memories_.erase(handle);
  }

  bool within_reservation(Address address, std::size_t size) const {
    auto after = reserved_.upper_bound(address);
    if (after == reserved_.begin()) return false;
    --after;
    return address + size <= after->first + after->second;
  }

  bool overlaps(Address address, std::size_t size) const {
    auto next = mapped_.lower_bound(address);
    if (next != mapped_.end() && next->first < address + size) return true;
    return next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
  }

  void check_whole_chunks(const char* call, Address address, std::size_t size) const {
    Address covered = address;
    for (auto entry = mapped_.find(address);
         entry != mapped_.end() && entry->first == covered && covered < address + size; ++entry)
      covered += entry->second.size;
    if (covered != address + size) refuse(call, "the range is not made of whole mapped chunks");
  }

  HostLedger ledger_;
  CopyEngine out_, in_;
  std::mutex mutex_;
  std::map<Address, std::size_t> reserved_;
  std::map<Address, Mapping> mapped_;
  std::unordered_map<Handle, Physical> memories_;
  Handle last_handle_ = 0;
};

}  // namespace

std::unique_ptr<Driver> open_host_driver(std::size_t capacity) { return std::make_unique<HostDriver>(capacity); }

}  // namespace memsaver
