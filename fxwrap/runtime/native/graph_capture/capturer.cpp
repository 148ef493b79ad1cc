#include "graph_capture/capturer.h"

#include <map>
#include <mutex>

namespace fxwrap {
namespace {

using Maker = std::unique_ptr<GraphCapturer> (*)(c10::Device);

struct Makers {
  std::mutex mutex;
  std::map<c10::DeviceType, Maker> by_type{{c10::DeviceType::CUDA, make_cuda_graph_capturer}};
};

Makers& makers() {
  static auto* makers = new Makers;
  return *makers;
}

}  // namespace

std::unique_ptr<GraphCapturer> make_graph_capturer(c10::Device device) {
  const std::lock_guard<std::mutex> lock(makers().mutex);
  const auto found = makers().by_type.find(device.type());
  return found == makers().by_type.end() ? nullptr : found->second(device);
}

void register_graph_capturer(c10::DeviceType type, Maker make) {
  const std::lock_guard<std::mutex> lock(makers().mutex);
  makers().by_type[type] = make;
}

}  // namespace fxwrap
