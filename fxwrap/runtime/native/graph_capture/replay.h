// Graph capture and replay of a program's functions without Python: the twin of fxwrap/runtime/graph_capture/replay.py, whose
// docstring explains when a call captures, replays or runs the function.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bridge/bridge.h"
#include "engine/engine.h"
#include "graph_capture/capturer.h"

namespace fxwrap {

using GraphKey = std::vector<std::pair<bool, int64_t>>;  // the scalars of a call: whether each is real, and its bits

class GraphCapture;
class GraphedFunction;

// A memory pool and its captured graphs, in capture order.
struct GraphPool {
  MemoryPool handle;
  std::vector<GraphCapture*> graphs;
  bool accepts_captures = true;  // until a capture fails in it, which leaves the allocator's state undefined
};

// The captured graphs of one program on one device: pools, and a lock for replays.
class GraphManager {
 public:
  explicit GraphManager(const std::string& device) : device_(device) {}
  GraphManager(const GraphManager&) = delete;
  GraphManager& operator=(const GraphManager&) = delete;

  // Null for a device without graph capture.
  GraphCapturer* capturer();
  // A pool without a graph of these, which are those of one function and key.
  GraphPool& select_pool(const std::list<GraphCapture>& used);
  // Waits for replays that may be in flight, before graphs are freed.
  void synchronize();
  // Orders the present stream after the previous one of a replay.
  void follow_stream();

  std::recursive_mutex mutex;
  std::list<GraphPool> pools;
  std::map<const void*, int> graph_storages;  // of results, each with the number of graphs that have it

 private:
  c10::Device device_;
  std::once_flag created_;
  std::unique_ptr<GraphCapturer> capturer_;
  std::optional<c10::Stream> stream_;
};

// Captured work: the addresses of its operands, its results, and whether results are still referenced.
class GraphCapture {
 public:
  // An operand that is copied into memory of the graph: its position, the destination, and its view for the function.
  struct Copied {
    size_t position;
    at::Tensor destination, view;
  };
  using Addresses = std::vector<std::optional<const void*>>;  // of each operand; none for copied ones

  GraphCapture(GraphManager& manager, GraphKey key, GraphPool& pool, std::vector<Copied> copied, Addresses addresses);
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

  void finish_capture(CapturedWork work);
  bool matches_addresses(const Tensors& arguments) const;
  // The operands of a set whose address changed.
  std::vector<int64_t> moved(const Tensors& arguments, const std::set<int64_t>& operands) const;
  // Whether a replay could overwrite live results: its own, or those of later graphs in its pool.
  bool may_overwrite_live_outputs();
  Tensors run(Tensors& arguments, const std::set<int64_t>& mutated);

  const GraphKey key;
  int64_t last_used = 0;  // logical time of the last replay

 private:
  bool has_live_outputs();
  std::vector<size_t> use_counts() const;

  GraphManager& manager_;
  GraphPool& pool_;
  std::vector<Copied> copied_;
  Addresses addresses_;
  CapturedWork work_;
  std::vector<c10::Storage> storages_;         // of the results
  std::vector<size_t> baseline_;               // their reference counts without users
  bool outputs_escaped_ = false;               // whether results may be in use
};

// A function of a program with capture and replay. Thread-safe.
class GraphedFunction {
 public:
  // `nested` are the functions that this one replays itself, or an undefined tensor.
  GraphedFunction(ReplayedFunction described, GraphManager& manager, at::Tensor nested);

  const char* name() const { return described_.name.c_str(); }
  Tensors call(Tensors arguments, const std::vector<Number>& numbers, Observer* observer);

 private:
  using Graphs = std::map<GraphKey, std::list<GraphCapture>>;

  Tensors run_body(const Tensors& arguments, const std::vector<Number>& numbers, Observer* observer) const;
  GraphCapture* find_or_capture(const Tensors& arguments, const std::vector<Number>& numbers);
  GraphCapture* capture(const GraphKey& key, const Tensors& arguments, const std::vector<Number>& numbers);
  void evict_moved(GraphCapture& graph, const Tensors& arguments);
  void evict(GraphCapture& graph);
  bool make_room(const GraphKey& key);
  bool is_new(const GraphKey& key);

  const ReplayedFunction described_;
  GraphManager& manager_;
  const at::Tensor nested_;
  const std::set<int64_t> mutated_operands_;
  std::set<int64_t> static_operands_;
  Graphs graphs_;
  std::atomic<bool> capture_disabled_{false};
  std::list<GraphKey> seen_;  // scalars that occurred once, the latest last
  std::map<int64_t, int64_t> moves_;
  int64_t clock_ = 0, evicted_ = 0;
  bool has_warned_ = false;
};

// The captured functions of one instance of a program. A tensor of no elements, whose memory it is, passes it to the program.
class GraphedFunctions {
 public:
  explicit GraphedFunctions(const std::vector<ReplayedFunction>& described);
  ~GraphedFunctions();
  GraphedFunctions(const GraphedFunctions&) = delete;
  GraphedFunctions& operator=(const GraphedFunctions&) = delete;

  // The tensor for functions, which it owns, and the functions of such a tensor; null for another tensor.
  static at::Tensor handle(const std::vector<ReplayedFunction>& described);
  static GraphedFunctions* of_handle(const at::Tensor& handle);

  GraphedFunction& at(int64_t index) { return *functions_.at(size_t(index)); }

 private:
  std::map<std::string, std::unique_ptr<GraphManager>> managers_;  // by device; destroyed last
  std::vector<std::unique_ptr<GraphedFunction>> functions_;
};

}  // namespace fxwrap
