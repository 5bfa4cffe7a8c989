/* A library with NCCL's calls for suspended communicators, and none of its communication.

   Compiled with VERSION, as ncclGetVersion() writes it. Without SUSPENDS it has the calls of older versions alone, and
   without DEVICES it does not know the device of a communicator. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_comm {
  uint64_t persistent_bytes, dynamic_bytes;
  int suspended;
  int failing; /* the result of the next calls; 0: none */
  int polls;   /* calls end after so many questions, as those of a communicator that does not block */
  int hangs;   /* calls do not return */
  int device;
  int calls; /* to suspend and to resume */
};

struct fake_comm* fake_comm_new(uint64_t persistent_bytes, uint64_t dynamic_bytes) {
  struct fake_comm* made = calloc(1, sizeof *made);
  made->persistent_bytes = persistent_bytes;
  made->dynamic_bytes = dynamic_bytes;
  return made;
}
void fake_fail(struct fake_comm* comm, int result) { comm->failing = result; }
void fake_poll(struct fake_comm* comm, int polls) { comm->polls = polls; }
void fake_hang(struct fake_comm* comm, int hangs) { comm->hangs = hangs; }
void fake_device(struct fake_comm* comm, int device) { comm->device = device; }
int fake_calls(struct fake_comm* comm) { return comm->calls; }
int fake_suspended(struct fake_comm* comm) { return comm->suspended; }

int ncclGetVersion(int* version) {
  *version = VERSION;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "other"; }

#ifdef DEVICES
int ncclCommCuDevice(struct fake_comm* comm, int* device) {
  *device = comm->device;
  return 0;
}
#endif

#ifdef SUSPENDS
static int ended(struct fake_comm* comm, int suspended) {
  comm->calls++;
  while (comm->hangs) usleep(1000);
  if (comm->failing) return comm->failing;
  if (comm->suspended == suspended) return 5;
  comm->suspended = suspended;
  return comm->polls ? 7 : 0; /* ncclInProgress */
}
int ncclCommSuspend(struct fake_comm* comm, int flags) { return flags == 1 ? ended(comm, 1) : 4; }
int ncclCommResume(struct fake_comm* comm) { return ended(comm, 0); }
int ncclCommGetAsyncError(struct fake_comm* comm, int* state) {
  *state = comm->polls > 0 && --comm->polls ? 7 : 0;
  return 0;
}
int ncclCommMemStats(struct fake_comm* comm, int stat, uint64_t* value) {
  uint64_t all[] = {comm->dynamic_bytes, (uint64_t)comm->suspended, comm->persistent_bytes,
                    comm->dynamic_bytes + comm->persistent_bytes};
  if (stat < 0 || stat > 3) return 4;
  *value = all[stat];
  return 0;
}
#endif
