// A chunk of the host driver's device: a memfd, entered in the ledger.
#pragma once

#include <cstddef>
#include <cstdint>

#include "files.h"
#include "host_ledger.h"

namespace memsaver {

// The code that CUDA gives for the same mistakes, so that code above the seam sees one set.
constexpr int kInvalidValue = 1;

struct HostChunk {
  File file;
  std::uint64_t inode;  // what the ledger knows it by
};

// Throws ChunkUnavailable where the device is full, DriverError where the system refuses.
HostChunk make_host_chunk(HostLedger& ledger, std::size_t size);
// A descriptor of this process on the memory behind another, which has to be of this size.
HostChunk import_host_chunk(HostLedger& ledger, int file, std::size_t size);

}  // namespace memsaver
