#include "pool/pool_request.h"

#include "pool/wire.h"
#include "support.h"

namespace memsaver {
namespace {

using wire::Kind;

// A pool that notes the calls of a request. Chunks of the host device take the place of those of a broker.
class NotingPool final : public RequestHost, public ChunkSource {
 public:
  std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline) override {
    return std::make_unique<PoolRequest>(static_cast<RequestHost&>(*this), needs, deadline);
  }
  Supply look() override { return {0, {}}; }
  void take_back(Chunk) noexcept override { noted.emplace_back("chunk"); }
  std::size_t give_up(std::size_t) override { return 0; }
  std::size_t idle_bytes() const override { return 0; }

  void grant(std::uint64_t id, std::size_t size) {
    const std::lock_guard lock(mutex_);
    open->granted_locked({id, size, false, -1, 1});
    open->update_locked(1, {{kPage, kPage}}, true);  // the rest does not come
  }

  std::vector<std::string> noted;
  PoolRequest* open = nullptr;

 private:
  std::uint64_t open_locked(PoolRequest& request) override {
    open = &request;
    return 1;
  }
  void close_locked(std::uint64_t) override { open = nullptr; }
  void send_locked(wire::Message message) override {
    if (message.kind == Kind::close) noted.emplace_back("close");
  }
  void give_back_locked(Grant) override { noted.emplace_back("grant"); }
  Chunk import(Grant grant) override {
    Driver& driver = test::driver();
    return {driver, driver.create(grant.size), grant.size, this};
  }
  void waits_long_locked() override {}
  void throw_disconnected() const override { throw Error("disconnected"); }
  void throw_unanswered_locked() override { throw Error("unanswered"); }
  bool is_silent_locked() const override { return false; }
};

using Noted = std::vector<std::string>;
const Needs kThreePages = {{kPage, kPage, 3 * kPage}};

TEST_CASE("pool request: chunks that were not taken return after the end of their demand") {
  NotingPool pool;
  auto request = pool.ask(kThreePages, Clock::now());
  pool.grant(1, kPage);
  pool.grant(2, kPage);
  CHECK_FALSE(request->gather());
  pool.grant(3, kPage);  // not imported
  request.reset();
  CHECK(pool.noted == Noted{"close", "grant", "chunk", "chunk"});
}

TEST_CASE("pool request: chunks that were taken return after end()") {
  NotingPool pool;
  auto request = pool.ask(kThreePages, Clock::now());
  pool.grant(1, kPage);
  {
    const Chunk taken = request->next(kPage, kPage, false);
    CHECK_THROWS_AS(request->next(kPage, kPage, false), ChunkUnavailable);
    request->end();
    CHECK(pool.open == nullptr);
  }
  request.reset();
  CHECK(pool.noted == Noted{"close", "chunk"});
}

}  // namespace
}  // namespace memsaver
