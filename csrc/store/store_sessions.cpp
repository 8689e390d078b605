// Sessions: their tokens, which outlive the keys and values that are evicted.
#include <algorithm>
#include <utility>

#include "store/store_engine.h"

namespace lmdecode::store {

std::optional<std::vector<int32_t>> StoreEngine::read_session(const Scope& scope,
                                                              const std::string& name) {
  const Digest root_of_scope = root(scope);
  Lock lock(mutex_);
  check_usable();
  const auto known = sessions_.find({root_of_scope, name});
  if (known != sessions_.end()) return known->second;
  wait_for_commit(lock);
  const auto row = index_->read_session(root_of_scope, name);
  if (!row.has_value()) return std::nullopt;
  if (!options_.readonly) sessions_[{root_of_scope, name}] = row->tokens;
  return row->tokens;
}

uint64_t StoreEngine::commit_session(const Scope& scope, const std::string& name,
                                     std::span<const int32_t> tokens, uint64_t num_computed,
                                     std::span<const TensorPlane> planes,
                                     const PutOptions& options) {
  check_token_ids(tokens);
  if (num_computed > tokens.size()) {
    throw std::invalid_argument("commit: keys and values of " + std::to_string(num_computed) +
                                " tokens; expected at most the session's " +
                                std::to_string(tokens.size()));
  }
  check_planes(layout_, planes, 0, layout_.shape.num_layers_with_state(), num_computed, false);
  PrefixKeys keys = keys_of(root(scope), tokens.first(num_computed));
  keys.whole();  // hashed before others have to wait
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  const bool had_space = put_locked(lock, keys, tenant_id(scope.salt), planes, options);
  record_session(lock, keys.root(), tenant_id(scope.salt), name, tokens);
  const uint64_t batch = commits_.open_number();
  const uint64_t stored = acknowledge(lock, keys, had_space);
  // Not the session's tokens: then nothing is acknowledged.
  if (commits_.commit(lock, batch, survives()) || commits_.is_session_durable(batch)) return stored;
  space_.note_stored(false, false);
  return 0;
}

void StoreEngine::record_session(Lock& lock, const Digest& root, uint64_t tenant,
                                 const std::string& name, std::span<const int32_t> tokens) {
  const auto key = std::make_pair(root, name);
  auto known = sessions_.find(key);
  if (known == sessions_.end()) {
    wait_for_commit(lock);
    std::optional<SessionRow> row;
    try {
      row = index_->read_session(root, name);
    } catch (const StoreError&) {
      // Damaged tokens are replaced as a whole.
    }
    known = sessions_.emplace(key, row.has_value() ? row->tokens : std::vector<int32_t>()).first;
  }
  SessionRow row{.root = root, .name = name, .tenant = tenant, .updated_ms = now()};
  const auto end =
      std::mismatch(tokens.begin(), tokens.end(), known->second.begin(), known->second.end());
  row.unchanged = static_cast<size_t>(end.first - tokens.begin());
  row.tokens.assign(tokens.begin(), tokens.end());
  known->second = row.tokens;
  commits_.add(std::move(row));
}

bool StoreEngine::write_session(const Scope& scope, const std::string& name,
                                std::span<const int32_t> tokens) {
  check_token_ids(tokens);
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  if (!commits_.failure().empty()) return false;
  record_session(lock, root(scope), tenant_id(scope.salt), name, tokens);
  return commits_.commit(lock, commits_.open_number(), survives());
}

bool StoreEngine::remove_session(const Scope& scope, const std::string& name) {
  const Digest root_of_scope = root(scope);
  Lock lock(mutex_);
  require_writer();
  if (!commits_.failure().empty()) return false;
  sessions_.erase({root_of_scope, name});
  SessionRow row{.root = root_of_scope, .name = name};
  row.removed = true;
  commits_.add(std::move(row));
  return commits_.commit(lock);
}

std::vector<SessionRow> StoreEngine::list_sessions() {
  Lock lock(mutex_);
  check_usable();
  wait_for_commit(lock);
  return index_->list_sessions();
}

}  // namespace lmdecode::store
