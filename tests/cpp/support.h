// Helpers of the C++ tests: host devices of their own, contents to write and compare, and transitions in one call.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "controls.h"
#include "transitions/transition.h"

namespace memsaver::test {

constexpr std::size_t kGiB = 1024 * kMiB;

// A block of random bytes, again and again, each time with its number: sanitizers make better contents slow.
inline std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
  constexpr std::size_t kBlock = 4096;
  std::vector<std::uint32_t> block(kBlock / sizeof(std::uint32_t));
  std::mt19937 generator(seed);
  for (std::uint32_t& word : block) word = static_cast<std::uint32_t>(generator());
  std::vector<std::byte> bytes(size);
  for (std::size_t begin = 0; begin < size; begin += kBlock) {
    ++block[0];
    std::memcpy(bytes.data() + begin, block.data(), std::min(kBlock, size - begin));
  }
  return bytes;
}

inline std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }

// The process's own host device, which all tests use one after the other: each gives back all that it takes.
inline Device& device() {
  Core& all = core();
  {
    std::lock_guard lock(all.mutex);
    // Processes that name the same size share a device.
    if (all.host_device_bytes == 0) all.host_device_bytes = 258 * kMiB + static_cast<std::size_t>(::getpid()) % kPage;
  }
  return all.device("cpu");
}

inline Driver& driver() { return *device().driver; }

// One chunk, mapped and accessible, for the length of a test.
class Mapped {
 public:
  Mapped(Driver& driver, std::size_t bytes)
      : driver_(driver), size(bytes), address(driver.reserve(bytes)), handle(driver.create(bytes)) {
    driver_.map(address, size, handle);
    driver_.allow(address, size);
  }
  ~Mapped() {
    driver_.unmap(address, size);
    driver_.release(handle);
    driver_.unreserve(address, size);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

 private:
  Driver& driver_;

 public:
  const std::size_t size;
  const Address address;
  const Handle handle;
};

// Regions live as long as the process, so each test makes its own.
inline Region& fresh_region(Policy policy) {
  static std::atomic<std::size_t> number = 0;
  device();
  return core().region("tag" + std::to_string(++number), "cpu", {.policy = policy});
}

// A segment, and the bytes that it should hold.
class Segment {
 public:
  Segment(Region& region, std::size_t size, unsigned seed)
      : region_(&region), address_(region.allocate(size, now())), expected_(random_bytes(size, seed)) {
    std::memcpy(data(), expected_.data(), expected_.size());
  }
  bool intact() const { return std::memcmp(data(), expected_.data(), expected_.size()) == 0; }
  std::byte* data() const { return at(address_); }
  std::size_t size() const { return expected_.size(); }
  void free() const { region_->free(address_); }

 private:
  Region* region_;
  Address address_;
  std::vector<std::byte> expected_;
};

inline Transition::Outcome move(const std::vector<Region*>& pause, const std::vector<Region*>& resume) {
  Transition transition(pause, resume, {});
  transition.begin();
  std::vector<Pause> pauses;
  for (Region* region : transition.pausing()) pauses.push_back({region, region->policy, region->live()});
  transition.prepare(pauses, std::vector<bool>(transition.resuming().size(), true));
  return transition.run();
}

}  // namespace memsaver::test
