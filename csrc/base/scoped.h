// Bases of objects that stay where they are made, mostly for the length of a scope.
#pragma once

#include <atomic>
#include <cstddef>

namespace memsaver {

// Neither copied nor moved.
struct Immovable {
  Immovable() = default;
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;
};

// Counts while it lives.
class Counted : Immovable {
 public:
  explicit Counted(std::atomic<std::size_t>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }

 private:
  std::atomic<std::size_t>& count_;
};

}  // namespace memsaver
