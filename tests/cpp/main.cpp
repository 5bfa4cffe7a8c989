#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "controls.h"

int main(int count, char** arguments) {
  memsaver::controls::install(&memsaver_table);  // before a thread uses the tables
  return doctest::Context(count, arguments).run();
}
