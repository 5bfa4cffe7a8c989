// The contents of a region that was paused lazily. Nothing is taken at first. Each copy out makes a backup, a piece,
// for the contents that it copies: so it reads and reserves nothing else.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "backup/backup.h"

namespace memsaver {

class PiecedBackup final : public Backup {
 public:
  using Make = std::function<std::shared_ptr<Backup>(Ranges)>;  // a piece for these contents. Throws BackupError
  PiecedBackup(Ranges parts, Make make) : Backup(std::move(parts)), make_(std::move(make)) {}

  std::size_t kept_bytes() const override { return kept_; }
  // The saver copies the contents within the batches that were not copied before. Its destructor adds them to `saved`.
  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;
  std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) override;
  std::byte* view(Range range) override;
  void read(Range range, std::byte* to) override;

 private:
  class PieceSaver;
  class PiecesLoader;

  const Make make_;
  std::vector<std::shared_ptr<Backup>> pieces_;  // whose saved ranges do not overlap
  std::atomic<std::size_t> kept_ = 0;
};

}  // namespace memsaver
