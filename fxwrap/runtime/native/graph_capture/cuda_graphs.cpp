// CUDA graphs through torch's own class, as fxwrap/runtime/graph_capture/cuda_graphs.py uses it: torch's allocator and
// default generator then take part in captures. The class is looked up by its symbols, which are the same in torch 2.11 to
// 2.15: the bridge neither includes CUDA's headers nor links libtorch_cuda.
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "cuda/driver.h"
#include "graph_capture/capturer.h"

namespace fxwrap {
namespace {

constexpr const char* torch_library = "libtorch_cuda.so";
constexpr int thread_local_capture = 1;     // cudaStreamCaptureModeThreadLocal
constexpr size_t most_graph_bytes = 16384;  // of at::cuda::CUDAGraph: below 1000 in each release

// The functions of torch's graphs. `graph` is an at::cuda::CUDAGraph.
struct TorchGraphs {
  MemoryPool (*make_pool)();
  void (*clear_workspaces)();
  void (*construct)(void* graph, bool keep);
  void (*destruct)(void* graph);
  void (*begin)(void* graph, MemoryPool pool, int mode);
  void (*end)(void* graph);
  void (*replay)(void* graph);
};

template <class Function> void find(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string(torch_library) + " has no function " + name);
}

const TorchGraphs& torch_graphs() {
  static const TorchGraphs graphs = [] {
    void* library = dlopen(torch_library, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) throw std::runtime_error("CUDA graphs need libtorch_cuda, which is not loaded");
    TorchGraphs functions{};
    find(functions.make_pool, library, "_ZN2at4cuda17graph_pool_handleEv");
    find(functions.clear_workspaces, library, "_ZN2at4cuda21clearCublasWorkspacesEv");
    find(functions.construct, library, "_ZN2at4cuda9CUDAGraphC1Eb");
    find(functions.destruct, library, "_ZN2at4cuda9CUDAGraphD1Ev");
    find(functions.begin, library, "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode");
    find(functions.end, library, "_ZN2at4cuda9CUDAGraph11capture_endEv");
    find(functions.replay, library, "_ZN2at4cuda9CUDAGraph6replayEv");
    return functions;
  }();
  return graphs;
}

class CudaGraph {
 public:
  explicit CudaGraph(const TorchGraphs& torch) : torch_(torch) { torch_.construct(memory_, false); }
  ~CudaGraph() { torch_.destruct(memory_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void begin(MemoryPool pool) { torch_.begin(memory_, pool, thread_local_capture); }
  void end() { torch_.end(memory_); }
  void replay() { torch_.replay(memory_); }

 private:
  const TorchGraphs& torch_;
  alignas(64) char memory_[most_graph_bytes];
};

// Makes a device and a stream of it current in its scope.
class CurrentStream {
 public:
  CurrentStream(const c10::impl::VirtualGuardImpl& guard, const c10::Stream& stream)
      : guard_(guard), device_(guard.exchangeDevice(stream.device())), stream_(guard.exchangeStream(stream)) {}
  ~CurrentStream() {
    guard_.exchangeStream(stream_);
    guard_.uncheckedSetDevice(device_);
  }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  const c10::impl::VirtualGuardImpl& guard_;
  c10::Device device_;
  c10::Stream stream_;
};

// Workspaces that libraries allocate during a capture belong to its pool: no other code may use them.
class ClearedWorkspaces {
 public:
  explicit ClearedWorkspaces(const TorchGraphs& torch) : torch_(torch) { torch_.clear_workspaces(); }
  ~ClearedWorkspaces() { torch_.clear_workspaces(); }
  ClearedWorkspaces(const ClearedWorkspaces&) = delete;
  ClearedWorkspaces& operator=(const ClearedWorkspaces&) = delete;

 private:
  const TorchGraphs& torch_;
};

class CudaGraphCapturer final : public GraphCapturer {
 public:
  explicit CudaGraphCapturer(c10::Device device) : torch_(torch_graphs()), guard_(device.type()), device_(device) {
    if (!device_.has_index()) device_ = guard_.getDevice();
  }

  MemoryPool make_pool() override { return torch_.make_pool(); }

  CapturedWork capture(const FunctionBody& body, const Tensors& operands, MemoryPool pool) override {
    // Otherwise the capture fails, and torch aborts the process when it frees the allocations.
    if (std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr) {
      throw std::runtime_error(
          "torch's caching allocator is off, and CUDA graphs cannot allocate without it: unset "
          "PYTORCH_NO_CUDA_MEMORY_CACHING, or compile with cuda_graphs=False");
    }
    static std::mutex capturing;  // torch allows one capture at a time per process
    const std::lock_guard<std::mutex> lock(capturing);
    if (!stream_.has_value()) stream_ = guard_.getStreamFromGlobalPool(device_);
    guard_.synchronizeDevice(device_.index());
    c10::getDeviceAllocator(device_.type())->emptyCache();
    const ClearedWorkspaces cleared(torch_);
    const CurrentStream current(guard_, *stream_);
    auto graph = std::make_shared<CudaGraph>(torch_);
    CapturedWork work;
    try {
      graph->begin(pool);
      work.results = body(operands);
      graph->end();
    } catch (...) {
      abandon(std::move(graph));
      throw;
    }
    work.replay = [graph = std::move(graph)] { graph->replay(); };
    return work;
  }

  bool can_capture() override { return !driver::is_capturing(driver::current_stream(device_.index())); }
  c10::Stream stream() override { return guard_.getStream(device_); }

  void wait_for_stream(const c10::Stream& other) override {
    c10::Event event(device_.type());
    event.record(other);
    event.block(stream());
  }

  void synchronize() override { guard_.synchronizeDevice(device_.index()); }

 private:
  // Ends a capture that failed. An empty one restores the state of torch's allocator and generator.
  void abandon(std::shared_ptr<CudaGraph> graph) {
    new std::shared_ptr<CudaGraph>(graph);  // torch's allocator may refer to it as long as the process runs
    const auto ignoring = [](const auto& function) {
      try {
        function();
      } catch (const std::exception&) {  // it only reports the previous failure
      }
    };
    ignoring([&] { graph->end(); });
    CudaGraph other(torch_);
    ignoring([&] {
      other.begin({0, 0});
      at::zeros({1}, at::TensorOptions().device(device_));  // torch warns about empty graphs
      other.end();
    });
  }

  const TorchGraphs& torch_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace

std::unique_ptr<GraphCapturer> make_cuda_graph_capturer(c10::Device device) {
  return std::make_unique<CudaGraphCapturer>(device);
}

}  // namespace fxwrap
