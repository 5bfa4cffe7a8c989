#include "base/waits.h"

#include "base/errors.h"

namespace memsaver {

std::atomic<bool> waiting_is_over = false;
std::function<void()> between_looks = [] {};

thread_local const std::atomic<bool>* WaitsEndWith::flag_ = nullptr;

void WaitsEndWith::look() {
  if (flag_ != nullptr && *flag_) throw Error("the call has failed for another device");
  between_looks();
}

}  // namespace memsaver
