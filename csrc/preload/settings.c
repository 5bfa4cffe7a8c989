#include "preload/settings.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool valid = true;
static Settings initial = {.known = true, .tag = "default"};
static _Thread_local Settings of_thread;

static bool is_one_of(const char* value, const char* const* names) {
  while (*names != NULL && strcmp(value, *names) != 0) ++names;
  return *names != NULL;
}

static void refuse(const char* name, const char* value, const char* expected) {
  fprintf(stderr, "memsaver: %s is '%s', expected %s\n", name, value, expected);
  valid = false;
}

static bool read_switch(const char* name) {
  static const char* const on[] = {"1", "true", "TRUE", "True", "yes", "YES", NULL};
  static const char* const off[] = {"", "0", "false", "FALSE", "False", "no", "NO", NULL};
  const char* value = getenv(name);
  if (value == NULL || is_one_of(value, off)) return false;
  if (is_one_of(value, on)) return true;
  refuse(name, value, "1, true, yes, 0, false or no");
  return false;
}

static void read_variables(void) {
  initial.interesting = read_switch("TMS_INIT_ENABLE");
  initial.cpu_backup = read_switch("TMS_INIT_ENABLE_CPU_BACKUP");
  initial.disk_backup = read_switch("TMS_INIT_ENABLE_DISK_BACKUP");
  if (initial.cpu_backup && initial.disk_backup)
    refuse("TMS_INIT_ENABLE_DISK_BACKUP", getenv("TMS_INIT_ENABLE_DISK_BACKUP"),
           "one of TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP at most");
  const char* kind = getenv("TMS_INIT_CPU_BACKUP_BACKEND");
  if (kind != NULL && strcmp(kind, "mmap") == 0)
    initial.mmap = true;
  else if (kind != NULL && *kind != 0 && strcmp(kind, "pinned") != 0)
    refuse("TMS_INIT_CPU_BACKUP_BACKEND", kind, "pinned or mmap");
}

Settings* settings(void) {
  if (!of_thread.known) {
    pthread_once(&once, read_variables);
    of_thread = initial;
  }
  return &of_thread;
}

bool settings_are_valid(void) {
  pthread_once(&once, read_variables);
  return valid;
}
