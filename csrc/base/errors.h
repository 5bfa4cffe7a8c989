// The exceptions of the core. module.cpp translates each into a class of memsaver/errors.py.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace memsaver {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct BadArgument : Error {  // -> ValueError
  using Error::Error;
};

struct ConfigError : Error {
  explicit ConfigError(const std::string& what, std::string option_name = "")
      : Error(what), option(std::move(option_name)) {}
  std::string option;  // its name; empty: none
};

// Host memory or a file for contents is not available.
struct BackupError : Error {
  BackupError(const std::string& what, std::size_t needed, std::size_t held, std::size_t available, bool pinned = false)
      : Error(what), needed_bytes(needed), held_bytes(held), available_bytes(available), of_pinned_memory(pinned) {}
  std::size_t needed_bytes;     // needed by the backup, beyond held_bytes
  std::size_t held_bytes;       // held by this process for backups
  std::size_t available_bytes;  // available now
  bool of_pinned_memory;        // pinned host memory is not available, which backups on disk need as well
};

// A call on a file failed. The core translates it into BackupError.
struct FileError : Error {
  FileError(const std::string& failed_call, const std::string& message) : Error(failed_call + ": " + message) {}
};

// Processes that keep one copy of their contents have different contents.
struct SameError : Error {
  SameError(const std::string& what, std::size_t differing_block, std::vector<std::pair<int, int>> members, bool others)
      : Error(what), block(differing_block), differing(std::move(members)), others_agree(others) {}
  std::size_t block;                           // of 8 MiB, the first with a difference
  std::vector<std::pair<int, int>> differing;  // pids and ranks; rank -1: not known
  bool others_agree;                           // whether more than half of the processes have the same block
};

struct RegionPausedError : Error {
  RegionPausedError(const std::string& what, std::string region_tag, std::string region_state)
      : Error(what), tag(std::move(region_tag)), state(std::move(region_state)) {}
  std::string tag;
  std::string state;
};

struct DriverError : Error {
  DriverError(std::string failed_call, int error_code, std::string error_message, bool lost = false)
      : Error(failed_call + " failed with code " + std::to_string(error_code) + ": " + error_message),
        call(std::move(failed_call)),
        code(error_code),
        message(std::move(error_message)),
        context_lost(lost) {}
  std::string call;
  int code;
  std::string message;
  bool context_lost;  // the device's context is dead: no contents of the device can be saved
};

// The driver has no memory for a chunk. Sources catch it; the core translates it into OutOfMemoryError.
struct ChunkUnavailable : DriverError {
  static constexpr int kCode = 2;  // CUDA's code, also used by the host driver and by the broker
  ChunkUnavailable(std::string failed_call, std::string error_message)
      : DriverError(std::move(failed_call), kCode, std::move(error_message)) {}
};

// The request exceeds the whole capacity, so waiting cannot help.
struct ChunkNeverAvailable : ChunkUnavailable {
  using ChunkUnavailable::ChunkUnavailable;
};

// Bytes of a process that no tensor uses, and the reasons why it keeps them.
struct Unused {
  int pid;
  std::size_t bytes;
  std::string why;
};

struct OutOfMemoryError : Error {
  OutOfMemoryError(std::string on_device, std::size_t needed, std::size_t free, double waited,
                   std::vector<Unused> kept = {})
      : Error("out of memory on " + on_device),
        device(std::move(on_device)),
        needed_bytes(needed),
        free_bytes(free),
        waited_s(waited),
        unused(std::move(kept)) {}
  std::string device;
  std::size_t needed_bytes;    // device bytes of the call
  std::size_t free_bytes;      // available from the source of chunks, idle chunks of this process included
  double waited_s;             // for memory that others hold; 0: the call did not wait
  std::vector<Unused> unused;  // as far as the broker of a shared pool knows it
};

// The broker of a shared pool cannot be reached, or refuses the request.
struct BrokerError : Error {
  BrokerError(const std::string& what, std::string socket_path) : Error(what), path(std::move(socket_path)) {}
  std::string path;
};

// The bound of a call ended one of its waits. Nothing has changed.
struct WaitTimeoutError : Error {
  WaitTimeoutError(const std::string& what, std::string waited_stage, double waited)
      : Error(what), stage(std::move(waited_stage)), waited_s(waited) {}
  std::string stage;  // "queue", "launches", "device", "backup"
  double waited_s;    // since the call began
};

// Other processes are attached to a region that was to be paused.
struct AttachedError : Error {
  AttachedError(const std::string& what, std::string region_tag, std::vector<int> processes)
      : Error(what), tag(std::move(region_tag)), pids(std::move(processes)) {}
  std::string tag;
  std::vector<int> pids;
};

}  // namespace memsaver
