#include "regions/reclaimer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "pool/queries.h"
#include "regions/core.h"
#include "regions/eviction.h"

namespace memsaver {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);
constexpr auto kFreedLooks = std::chrono::milliseconds(5);  // at freed memory, without a request
constexpr auto kFreedLooksAtMost = std::chrono::milliseconds(40);
constexpr std::size_t kTold = 256 * kMiB;  // of evicted chunks, between two reports: each waits for the last copy
constexpr auto kWaitWithoutMarks = std::chrono::milliseconds(100);

std::string text_of(std::size_t bytes) {
  constexpr double kGiB = 1024.0 * kMiB;
  const auto size = static_cast<double>(bytes);
  std::array<char, 32> text{};
  if (size >= kGiB)
    std::snprintf(text.data(), text.size(), "%.2f GiB", size / kGiB);
  else
    std::snprintf(text.data(), text.size(), "%.1f MiB", size / kMiB);
  return text.data();
}

}  // namespace

void Reclaimer::request(std::size_t offered, std::uint64_t demand) {
  std::lock_guard lock(mutex_);
  if (offered > 0) {
    offered_ = offered;
    demand_ = demand;
  } else {
    ++requested_;
    tells_ = true;
  }
  changed_.notify_all();
}

bool Reclaimer::finish(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t number = ++requested_;
  changed_.notify_all();
  const Clock::duration longest = std::max<Clock::duration>(deadline - now(), Clock::duration::zero());
  const auto ended = [&] { return ended_ >= number; };
  return wait_until(lock, changed_, Clock::now() + longest, ended, true, false);
}

void Reclaimer::pass() {
  device_.retained.give_up(static_cast<std::size_t>(-1));
  for (Region* region : core().regions_of(device_))
    if (region->state() == State::active) region->sweep_all();
}

void Reclaimer::evict_offered(std::size_t bytes, std::uint64_t demand) {
  const auto spares = [demand](const Region& region) {
    return demand != 0 && region.demand() == demand && region.state() == State::resuming;
  };
  for (std::size_t left = bytes; left > 0 && !waiting_is_over();) {
    const std::size_t part = std::min(left, kTold), before = device_.offered;
    if (evict(device_, part, spares, kNever, false) != Evicted::some) break;
    left -= std::min(left, std::max(before - std::min<std::size_t>(before, device_.offered), kPage));
    if (left > 0) device_.shared->send_reclaimed(true, 0, "");
  }
  device_.tell_offers();
  tell(false, false);
}

bool Reclaimer::rests() {
  Resting& resting = device_.resting;
  if (resting.has_no_marks())
    resting.reclaim(now() + kWaitWithoutMarks, resting.given_back());
  else
    resting.collect();
  const auto regions = core().regions_of(device_);
  return std::any_of(regions.begin(), regions.end(), [](const Region* region) { return region->resting_bytes() > 0; });
}

// Sends the bytes that no tensor uses and that stay, with the reasons.
void Reclaimer::tell(bool asks_python, bool is_resting) {
  std::size_t unused = 0, resting = 0, beside = 0;
  for (const Region* region : core().regions_of(device_)) {
    if (region->state() != State::active) continue;
    const std::size_t rests = region->resting_bytes(), mapped = region->mapped_bytes();
    const std::size_t used = region->allocated_bytes() + rests;
    resting += rests;
    if (mapped > used) beside += mapped - used;
  }
  std::size_t cached = 0;
  std::string why_cached;
  {
    std::lock_guard lock(mutex_);
    cached = cached_;
    if (!why_cached_.empty()) why_cached = " (" + why_cached_ + ")";
  }
  std::string why;
  const auto say = [&](const std::string& reason) { why += (why.empty() ? "" : ", ") + reason; };
  const auto add = [&](std::size_t bytes, const std::string& reason) {
    unused += bytes;
    if (bytes > 0) say(text_of(bytes) + " " + reason);
  };
  if (device_.parts.gate.capturing()) say("a graph is being captured");
  add(resting, "on which the device still works");
  add(cached, "that torch caches" + why_cached);
  if (asks_python) say("torch's cache waits for the GIL");
  add(beside, "in chunks that tensors use as well");
  device_.shared->send_reclaimed(asks_python || is_resting, unused, why);
}

void Reclaimer::run() {
  const auto is_asked = [this] { return stop_ || requested_ != ended_ || offered_ > 0; };
  Clock::duration pause = kFreedLooks;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!freed_) {
      changed_.wait(lock, [&] { return freed_ || ahead_ || is_asked(); });
      pause = kFreedLooks;
    }
    Evicted ahead = Evicted::none;
    if (ahead_ && !is_asked()) {
      ahead_ = false;
      lock.unlock();
      ahead = memsaver::copy_ahead(device_);
      device_.tell_offers();
      lock.lock();
      ahead_ |= ahead != Evicted::none;
    }
    if (!changed_.wait_for(lock, ahead == Evicted::some ? Clock::duration::zero() : pause, is_asked)) {
      if (!freed_) continue;
      freed_ = false;
      lock.unlock();
      const bool some = device_.resting.collect();
      const bool rests_more = device_.resting.any();
      lock.lock();
      freed_ = freed_ || rests_more;
      pause = some ? kFreedLooks : std::min<Clock::duration>(2 * pause, kFreedLooksAtMost);
      continue;
    }
    if (stop_) return;
    if (const std::size_t bytes = std::exchange(offered_, 0); bytes > 0) {
      const std::uint64_t demand = demand_;
      lock.unlock();
      evict_offered(bytes, demand);
      lock.lock();
      continue;
    }
    const std::uint64_t number = requested_;
    const bool tells = std::exchange(tells_, false);
    // A capture allows no mark, and Python frees nothing then. The broker asks again.
    const bool captures = device_.parts.gate.capturing();
    asks_python_ = false;
    cached_ = 0;
    lock.unlock();
    bool is_resting = false;
    if (!captures) {
      pass();
      is_resting = rests();
    }
    lock.lock();
    if (!captures && device_.waiting_allocations == 0) asks_python_ = queries().note("caches", device_.driver->name);
    std::optional<bool> told;  // whether Python had yet to answer when the rest was told
    while (!captures && !stop_ && (is_resting || asks_python_) && requested_ == number && offered_ == 0) {
      const bool asks = asks_python_;
      lock.unlock();
      if (tells && told != asks) tell(asks, is_resting);
      told = asks;
      lock.lock();
      changed_.wait_for(lock, kLook);
      lock.unlock();
      is_resting = rests() && !device_.parts.gate.capturing();
      lock.lock();
    }
    if ((requested_ != number || offered_ > 0) && !stop_) {  // the next pass tells as well
      tells_ |= tells;
      continue;
    }
    ended_ = number;
    changed_.notify_all();
    if (!tells || stop_) continue;
    lock.unlock();
    tell(false, false);
    lock.lock();
  }
}

void Reclaimer::stop(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  worker_.join(deadline);
}

}  // namespace memsaver
