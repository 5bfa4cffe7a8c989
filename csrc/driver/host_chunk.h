// A chunk of the host driver's device: a memfd with an entry in the ledger.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/files.h"
#include "driver/host_ledger.h"

namespace memsaver {

// CUDA's code for the same errors, so that code above the driver interface handles one set of codes.
constexpr int kInvalidValue = 1;

struct HostChunk {
  File file;
  std::uint64_t inode;  // its key in the ledger
};

// Throws ChunkUnavailable if the device is full, DriverError if a system call fails.
HostChunk make_host_chunk(HostLedger& ledger, std::size_t size);
// Duplicates a descriptor, whose memory must have this size. `adopted`: this process owns the memory from now on.
HostChunk import_host_chunk(HostLedger& ledger, int file, std::size_t size, bool adopted = false);

}  // namespace memsaver
