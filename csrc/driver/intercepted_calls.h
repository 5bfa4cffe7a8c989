// Calls of the CUDA driver by another library, which this library answers in place of the driver.
//
// A library such as torch keeps pointers to the driver's functions in a table. The table's words that point to
// functions for physical memory are found by their values, so its layout need not be known. Only calls from the code of
// that library are answered here: other libraries may call through the same table.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "driver/driver.h"

namespace memsaver {

// Each function returns the driver's code for the call, or nullopt: the driver makes the call. They throw nothing,
// since the caller is C code.
class InterceptedCalls {
 public:
  enum Code { kDone = 0, kNoMemory = 2, kNotPermitted = 800, kNoSupport = 801, kUnknownError = 999 };

  virtual ~InterceptedCalls() = default;
  virtual std::optional<int> create(Handle& made, std::size_t size, int ordinal) = 0;
  virtual std::optional<int> release(Handle handle) = 0;
  virtual std::optional<int> export_handle(Handle handle) = 0;
  virtual std::optional<int> map(Address address, std::size_t size, Handle handle) = 0;
  virtual std::optional<int> unmap(Address address, std::size_t size) = 0;
  virtual void reserved(Address address, std::size_t size) = 0;  // by the driver
  virtual std::optional<int> unreserve(Address address, std::size_t size) = 0;
  // Access of the device `ordinal` to a mapped range. `driver`: gives it to a part of the range by the driver.
  virtual std::optional<int> allow(Address address, std::size_t size, int ordinal,
                                   const std::function<int(Address, std::size_t)>& driver) = 0;
};

// Releases reserved addresses by the driver, after unreserve() has answered for it. Returns the driver's code.
int unreserve_by_driver(Address address, std::size_t size);

// Intercepts the calls of a library that the process has loaded. `getter`: the symbol of its function that returns the
// address of its table. Returns the reason why the calls cannot be intercepted; empty: they are, for the rest of the
// process. `calls` is never destroyed. Throws DriverError if there is no CUDA driver.
std::string intercept_calls(const std::string& library, const char* getter, InterceptedCalls& calls);

}  // namespace memsaver
