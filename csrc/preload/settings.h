// The settings of a thread's allocations: whether they are routed, their tag, and the policy of their regions. A thread
// begins with the values of the variables TMS_INIT_*.
#pragma once

#include <stdbool.h>

enum { kMostOfTag = 800 };  // bytes: memsaver allows 200 characters

typedef struct {
  bool known;  // the others are set
  bool interesting;
  bool cpu_backup, disk_backup;
  bool mmap;  // the name of the kind of host memory; memsaver has one kind
  char tag[kMostOfTag + 1];
} Settings;

Settings* settings(void);       // of the calling thread
bool settings_are_valid(void);  // false: a variable has another value than a boolean. A line was printed then
