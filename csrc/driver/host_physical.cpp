// The memory of the host driver's device, for its broker.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "driver/host_chunk.h"
#include "driver/physical.h"

namespace memsaver {
namespace {

class HostDeviceMemory final : public PhysicalMemory {
 public:
  explicit HostDeviceMemory(std::size_t capacity) : ledger_(capacity) {}

  std::string uuid() override { return ledger_.uuid(); }
  std::size_t total_bytes() override { return ledger_.capacity(); }
  std::size_t free_bytes() override { return ledger_.capacity() - std::min(ledger_.used(), ledger_.capacity()); }

  int create(std::size_t size) override {
    return faults().around(
        "create", [&] { return keep(make_host_chunk(ledger_, size)); }, [&](int made) { close(made); });
  }

  void adopt(int file, std::size_t size) override {
    HostChunk copy = import_host_chunk(ledger_, file, size, true);
    std::lock_guard lock(mutex_);
    inodes_[file] = copy.inode;  // the caller owns the descriptor; the copy closes here
  }

  void close(int file) override {
    std::lock_guard lock(mutex_);
    const auto found = inodes_.find(file);
    if (found == inodes_.end()) throw BadArgument("descriptor " + std::to_string(file) + " is not one of this memory");
    ::close(file);
    ledger_.discharge(found->second);
    inodes_.erase(found);
  }

  std::vector<int> compute_pids() override { return {}; }  // no kernel outlives its process
  std::vector<Driver::Holding> holdings() override { return ledger_.holdings(); }
  bool lists_all() const override { return true; }
  std::optional<std::size_t> used_bytes() override { return ledger_.used(); }
  bool under_mps() override { return false; }

 private:
  int keep(HostChunk chunk) {
    std::lock_guard lock(mutex_);
    inodes_[chunk.file.get()] = chunk.inode;
    return chunk.file.keep();
  }

  HostLedger ledger_;
  std::mutex mutex_;
  std::map<int, std::uint64_t> inodes_;  // by descriptor
};

}  // namespace

std::unique_ptr<PhysicalMemory> open_host_memory(std::size_t capacity) {
  return std::make_unique<HostDeviceMemory>(capacity);
}

}  // namespace memsaver
