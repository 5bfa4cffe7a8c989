// The descriptors by which a broker detects that no kernel of this process can run any more.
//
// The exit of a process is not enough. A child that was forked after CUDA was initialised holds the driver's
// descriptors, and with them the channels in which its parent's kernels run on (seen on an H100, driver 580; they end
// when the child has closed the descriptors or has exited). So each client has a sentinel: a pipe whose write end it
// holds until its exit, and which its forked children inherit together with the driver's descriptors. The broker has
// the read end: it hangs up when the last of these processes has closed the write end. Both kinds of descriptors are
// closed by exec, so a program that a client starts delays nothing. The broker looks for children that were forked
// before the sentinel was opened, when it gets the read end.
#pragma once

#include "base/files.h"

namespace memsaver {

// A copy of the read end of this process's sentinel. The first call opens the pipe. Throws DriverError if there is no
// free descriptor.
File sentinel();

}  // namespace memsaver
