#include "graph_capture/replay.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "bridge/frame.h"
#include "engine/observer.h"
#include "graph_capture/copies.h"

namespace fxwrap {
namespace {

constexpr size_t most_seen_keys = 64;         // remembered scalars that occurred once
constexpr int64_t most_eviction_rounds = 8;   // how often all captured graphs of a function may be replaced

GraphKey key_of(const std::vector<Number>& numbers) {
  GraphKey key;
  for (const Number& number : numbers) key.emplace_back(number.is_real, number.integer);
  return key;
}

}  // namespace

// --- managers --------------------------------------------------------------------------------------------------------

GraphCapturer* GraphManager::capturer() {
  std::call_once(created_, [&] {
    try {
      capturer_ = make_graph_capturer(device_);
    } catch (const std::exception& error) {
      TORCH_WARN("functions on ", device_, " are not captured, and run eagerly: ", error.what());
    }
  });
  return capturer_.get();
}

GraphPool& GraphManager::select_pool(const std::list<GraphCapture>& used) {
  for (GraphPool& pool : pools) {
    const auto is_used = [&](const GraphCapture& graph) {
      return std::find(pool.graphs.begin(), pool.graphs.end(), &graph) != pool.graphs.end();
    };
    if (pool.accepts_captures && std::none_of(used.begin(), used.end(), is_used)) return pool;
  }
  return pools.emplace_back(GraphPool{capturer()->make_pool(), {}});
}

void GraphManager::synchronize() {
  try {
    if (capturer_ != nullptr && !pools.empty()) capturer_->synchronize();
  } catch (const std::exception&) {  // the device is gone: the process ends
  }
}

void GraphManager::follow_stream() {
  const c10::Stream stream = capturer()->stream();
  if (stream_.has_value() && *stream_ != stream) capturer()->wait_for_stream(*stream_);
  stream_ = stream;
}

// --- captured graphs -------------------------------------------------------------------------------------------------

GraphCapture::GraphCapture(GraphManager& manager, GraphKey key, GraphPool& pool, std::vector<Copied> copied,
                           Addresses addresses)
    : key(std::move(key)), manager_(manager), pool_(pool), copied_(std::move(copied)), addresses_(std::move(addresses)) {}

GraphCapture::~GraphCapture() {
  for (const c10::Storage& storage : storages_) {
    const auto entry = manager_.graph_storages.find(storage.unsafeGetStorageImpl());
    if (--entry->second == 0) manager_.graph_storages.erase(entry);
  }
  pool_.graphs.erase(std::remove(pool_.graphs.begin(), pool_.graphs.end(), this), pool_.graphs.end());
}

void GraphCapture::finish_capture(CapturedWork work) {
  work_ = std::move(work);
  for (const at::Tensor& result : work_.results) {
    const auto same = [&](const c10::Storage& other) { return other.is_alias_of(result.storage()); };
    if (std::any_of(storages_.begin(), storages_.end(), same)) continue;
    storages_.push_back(result.storage());
    ++manager_.graph_storages[result.storage().unsafeGetStorageImpl()];
  }
  pool_.graphs.push_back(this);
}

std::vector<size_t> GraphCapture::use_counts() const {
  std::vector<size_t> counts;
  for (const c10::Storage& storage : storages_) counts.push_back(storage.use_count());
  return counts;
}

bool GraphCapture::matches_addresses(const Tensors& arguments) const {
  for (size_t i = 0; i < addresses_.size(); ++i) {
    if (addresses_[i].has_value() && *addresses_[i] != arguments[i].const_data_ptr()) return false;
  }
  return true;
}

std::vector<int64_t> GraphCapture::moved(const Tensors& arguments, const std::set<int64_t>& operands) const {
  std::vector<int64_t> positions;
  for (int64_t position : operands) {
    const auto& address = addresses_[size_t(position)];
    if (address.has_value() && *address != arguments[size_t(position)].const_data_ptr()) positions.push_back(position);
  }
  return positions;
}

bool GraphCapture::has_live_outputs() {
  if (!outputs_escaped_) return false;
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (storages_[i].use_count() > baseline_[i]) return true;
  }
  outputs_escaped_ = false;
  return false;
}

bool GraphCapture::may_overwrite_live_outputs() {
  if (has_live_outputs()) return true;
  for (auto other = pool_.graphs.rbegin(); *other != this; ++other) {
    if ((*other)->has_live_outputs()) return true;
  }
  return false;
}

Tensors GraphCapture::run(Tensors& arguments, const std::set<int64_t>& mutated) {
  Tensors destinations, sources;
  for (const Copied& item : copied_) {
    destinations.push_back(item.destination);
    sources.push_back(copy_source(arguments[item.position], item.destination));
  }
  if (!destinations.empty()) at::_foreach_copy_(destinations, sources);
  work_.replay();
  for (const Copied& item : copied_) {
    if (mutated.count(int64_t(item.position)) != 0) arguments[item.position].copy_(item.view);
  }
  for (int64_t position : mutated) {
    if (addresses_[size_t(position)].has_value()) arguments[size_t(position)].unsafeGetTensorImpl()->bump_version();
  }
  if (baseline_.empty()) baseline_ = use_counts();
  outputs_escaped_ = true;
  Tensors results;
  for (const at::Tensor& result : work_.results) {
    results.push_back(tensor_on(result, result.sizes(), result.strides()));
  }
  return results;
}

// --- functions -------------------------------------------------------------------------------------------------------

GraphedFunction::GraphedFunction(ReplayedFunction described, GraphManager& manager, at::Tensor nested)
    : described_(std::move(described)), manager_(manager), nested_(std::move(nested)),
      mutated_operands_(described_.mutated_operands.begin(), described_.mutated_operands.end()),
      static_operands_(described_.static_operands.begin(), described_.static_operands.end()) {}

Tensors GraphedFunction::call(Tensors arguments, const std::vector<Number>& numbers, Observer* observer) {
  if (capture_disabled_) return run_body(arguments, numbers, observer);
  GraphCapturer* capturer = manager_.capturer();
  if (capturer == nullptr) {
    capture_disabled_ = true;
  } else if (capturer->can_capture()) {
    const std::lock_guard<std::recursive_mutex> lock(manager_.mutex);
    GraphCapture* graph = find_or_capture(arguments, numbers);
    if (graph != nullptr) {
      manager_.follow_stream();
      graph->last_used = ++clock_;
      return graph->run(arguments, mutated_operands_);
    }
  }
  return run_body(arguments, numbers, observer);
}

Tensors GraphedFunction::run_body(const Tensors& arguments, const std::vector<Number>& numbers,
                                  Observer* observer) const {
  const Program& program = *described_.program;
  Execution execution(program);
  Frame& f = execution.frame();
  f.observer = observer;
  size_t tensors = 0, scalars = 0;
  for (int64_t i = 0; i < program.inputs.size; ++i) {
    const Arg& place = program.inputs.data[i].value;
    switch (place.kind) {
      case Arg::Tensor: execution.borrow(place.integer, arguments.at(tensors++)); break;
      case Arg::OwnedTensor: execution.own(place.integer, arguments.at(tensors++)); break;
      case Arg::FloatSymbolIndex: {
        const Number& number = numbers.at(scalars++);
        f.floats[place.integer] = number.is_real ? number.real : double(number.integer);
        break;
      }
      default: f.ints[place.integer] = numbers.at(scalars++).integer;
    }
  }
  if (nested_.defined()) execution.borrow(program.constants.data[0].integer, nested_);
  const FailedKernelGuard failed_kernel(observer);
  execution.run();
  Tensors results;
  for (int64_t i = 0; i < program.outputs.size; ++i) results.push_back(tensor_at(f, program.outputs.data[i].integer));
  return results;
}

bool GraphedFunction::is_new(const GraphKey& key) {
  if (std::find(seen_.begin(), seen_.end(), key) != seen_.end()) return false;
  seen_.push_back(key);
  if (seen_.size() > most_seen_keys) seen_.pop_front();
  return true;
}

GraphCapture* GraphedFunction::find_or_capture(const Tensors& arguments, const std::vector<Number>& numbers) {
  const GraphKey key = key_of(numbers);
  const auto known = graphs_.find(key);
  if (known == graphs_.end()) return is_new(key) ? nullptr : capture(key, arguments, numbers);
  std::vector<GraphCapture*> candidates;  // evictions change the list
  for (GraphCapture& graph : known->second) candidates.push_back(&graph);
  for (GraphCapture* graph : candidates) {
    if (!graph->matches_addresses(arguments)) {
      evict_moved(*graph, arguments);
    } else if (!graph->may_overwrite_live_outputs()) {
      return graph;
    }
  }
  return capture(key, arguments, numbers);
}

// Evicts a graph whose static operands moved; operands that move often are copied from then on.
void GraphedFunction::evict_moved(GraphCapture& graph, const Tensors& arguments) {
  const std::vector<int64_t> moved = graph.moved(arguments, static_operands_);
  if (moved.empty()) return;
  for (int64_t position : moved) {
    if (++moves_[position] > described_.max_captures) static_operands_.erase(position);
  }
  evict(graph);
}

void GraphedFunction::evict(GraphCapture& graph) {
  manager_.capturer()->synchronize();  // it may be in flight
  const auto graphs = graphs_.find(graph.key);
  graphs->second.remove_if([&](const GraphCapture& other) { return &other == &graph; });
  if (graphs->second.empty()) graphs_.erase(graphs);
}

GraphCapture* GraphedFunction::capture(const GraphKey& key, const Tensors& arguments,
                                       const std::vector<Number>& numbers) {
  if (!make_room(key)) return nullptr;
  GraphPool& pool = manager_.select_pool(graphs_[key]);
  std::vector<GraphCapture::Copied> copied;
  GraphCapture::Addresses addresses(arguments.size());
  Tensors operands;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const at::Tensor& item = arguments[i];
    const bool in_graph = manager_.graph_storages.count(item.storage().unsafeGetStorageImpl()) != 0;
    if (in_graph || static_operands_.count(int64_t(i)) != 0) {
      addresses[i] = item.const_data_ptr();
      operands.push_back(item);
    } else {
      auto [destination, view] = allocate_static_copy(item);
      operands.push_back(view);
      copied.push_back({i, std::move(destination), std::move(view)});
    }
  }
  std::list<GraphCapture>& graphs = graphs_[key];
  GraphCapture& graph = graphs.emplace_back(manager_, key, pool, std::move(copied), std::move(addresses));
  try {
    const auto body = [this, numbers](const Tensors& operands) { return run_body(operands, numbers, nullptr); };
    graph.finish_capture(manager_.capturer()->capture(body, operands, pool.handle));
  } catch (const std::exception& error) {  // the eager run throws the function's own errors
    graphs.pop_back();
    if (graphs.empty()) graphs_.erase(key);
    capture_disabled_ = true;
    pool.accepts_captures = false;
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    TORCH_WARN(described_.name, " cannot be captured, and runs eagerly: ",
               torch_error == nullptr ? error.what() : torch_error->what_without_backtrace());
    return nullptr;
  }
  return &graph;
}

// Whether one more graph may be captured; for new scalars the least recently used one is evicted. The number of evictions
// is limited: capture does not pay off for scalars that always change.
bool GraphedFunction::make_room(const GraphKey& key) {
  int64_t count = 0;
  GraphCapture* oldest = nullptr;
  for (auto& [_, graphs] : graphs_) {
    for (GraphCapture& graph : graphs) {
      ++count;
      if (oldest == nullptr || graph.last_used < oldest->last_used) oldest = &graph;
    }
  }
  if (count < described_.max_captures) return true;
  if (!has_warned_) {
    has_warned_ = true;
    TORCH_WARN(described_.name, " has ", count, " captured graphs, and a call needs another, for new sizes or because ",
               "results of the others are in use. Keep fewer results, or raise the option 'cuda_graph_limit'");
  }
  if (graphs_.count(key) != 0 || evicted_ >= most_eviction_rounds * described_.max_captures) return false;
  seen_.remove(oldest->key);
  evict(*oldest);
  ++evicted_;
  return true;
}

}  // namespace fxwrap
