#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "region.h"

namespace memsaver {
namespace {

std::atomic<bool> used{false};    // a driver was opened in this process
std::atomic<bool> forked{false};  // this process is a child of one that had

std::size_t half_of_memory() {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  return pages * page / 2 / kPage * kPage;
}

std::unique_ptr<Driver> open_driver(const std::string& name, std::size_t host_bytes) {
  if (name == "cpu") return open_host_driver(host_bytes);
  constexpr std::string_view kCuda = "cuda:";
  if (name.starts_with(kCuda)) return open_cuda_driver(std::stoi(name.substr(kCuda.size())));
  throw BadArgument("device is '" + name + "', expected 'cpu' or 'cuda:N'");
}

}  // namespace

Core& core() {
  static auto* only = [] {
    ::pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });
    return new Core;
  }();
  if (forked)
    throw Error(
        "memsaver was in use before this process was forked, and a driver does not survive a fork: start the "
        "process with the 'spawn' method instead");
  return *only;
}

bool usable() { return !forked; }

std::size_t Core::host_bytes() const { return host_device_bytes != 0 ? host_device_bytes : half_of_memory(); }

const std::string& Core::disk_directory() const {
  if (disk_dir.empty()) throw ConfigError("backup='disk' needs a directory: configure(disk_dir=...) names it");
  return disk_dir;
}

Device& Core::device(const std::string& name) {
  auto found = devices.find(name);
  if (found == devices.end()) {
    used = true;
    found = devices.emplace(name, std::make_unique<Device>(open_driver(name, host_bytes()), retain, host_budget)).first;
  }
  return *found->second;
}

Region& Core::region(const std::string& tag, const std::string& device_name, Region::Options options) {
  Device& on = device(device_name);
  for (const auto& region : regions)
    if (region->tag == tag && &region->device == &on && region->policy == options.policy) return *region;
  if (options.policy == Policy::disk) disk_directory();
  regions.push_back(std::make_unique<Region>(tag, on, options));
  if (options.policy == Policy::host) on.arena.start_background();  // here, as an allocation may not start threads
  return *regions.back();
}

void Core::mark_lost(Device& dead) {
  std::lock_guard lock(mutex);
  dead.lost = true;
  for (const auto& region : regions) {
    const bool at_rest = region->state == State::active || region->state == State::paused;
    if (&region->device == &dead && at_rest) region->state = State::lost;  // the others: at their transition's end
  }
  changed.notify_all();
}

void Core::capture_begins() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return synchronizations_ == 0; });
  ++captures_;
}

void Core::capture_ends() {
  std::lock_guard lock(mutex);
  if (captures_ > 0) --captures_;
}

void Core::synchronize(Device& device) {
  {
    std::lock_guard lock(mutex);
    if (capturing())
      throw Error("a CUDA graph is being captured, and waiting for " + device.driver->name +
                  " would break it: end the capture first");
    ++synchronizations_;
  }
  const auto leave = [this] {
    std::lock_guard lock(mutex);
    --synchronizations_;
    changed.notify_all();
  };
  try {
    device.driver->synchronize();
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

}  // namespace memsaver
