// The physical memory of devices that another library takes from the CUDA driver.
//
// NCCL keeps a pointer to each function of the driver in its data. Those of the functions for physical memory are
// replaced by functions that call the driver with the same arguments, and count by handle and mapping: memory is free
// once its handle is released and its last mapping is gone. Memory of the host, imported memory and multicast objects
// do not count.
#pragma once

#include <cstddef>
#include <string>

namespace memsaver {

// Counts from here on, for the rest of the process. `library`: one that the process has loaded, with its pointers set.
// `giver`: its function that takes memory for its caller. Returns the reason why the calls cannot be counted; empty:
// they are. Throws DriverError if there is no CUDA driver.
std::string count_calls(const std::string& library, const char* giver);

struct CountedBytes {
  std::size_t own = 0;    // of the library itself
  std::size_t given = 0;  // taken for callers of `giver`
};
CountedBytes counted_bytes(int ordinal);  // of a device

}  // namespace memsaver
