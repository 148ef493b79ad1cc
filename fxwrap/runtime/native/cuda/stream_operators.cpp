// The operators for streams and events, for processes that have not imported fxwrap: twins of those that
// fxwrap/runtime/library.py registers. A stream of a model has a stream of torch's pool by its number; on the CPU, where calls are
// synchronous, they do nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <tuple>

#include "cuda/stream_operators.h"
#include "libraries/operators.h"

namespace fxwrap {
namespace {

// The stream of a number in a program: the current one for 0, else one that all programs of the process share.
c10::Stream numbered_stream(const c10::Device& device, int64_t number) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (number == 0) return guard.getStream(device);
  static std::mutex mutex;
  static auto* streams = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, int64_t>, c10::Stream>;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::tuple key(device.type(), device.index(), number);
  auto stream = streams->find(key);
  if (stream == streams->end()) stream = streams->emplace(key, guard.getStreamFromGlobalPool(device)).first;
  return stream->second;
}

int64_t stream_id(c10::Device device, int64_t stream) {
  return device.is_cpu() ? 0 : numbered_stream(device, stream).id();
}

// An empty tensor whose memory is the event: programs pass tensors.
at::Tensor record_event(c10::Device device, int64_t stream, int64_t) {
  if (device.is_cpu()) return at::empty({0}, at::kLong);
  auto* event = new c10::Event(device.type());
  const auto options = at::TensorOptions(at::kLong);
  at::Tensor token = at::from_blob(event, {0}, [](void* memory) { delete static_cast<c10::Event*>(memory); }, options);
  event->record(numbered_stream(device, stream));
  return token;
}

void wait_event(const at::Tensor& event, c10::Device device, int64_t stream) {
  if (device.is_cpu()) return;
  static_cast<c10::Event*>(event.storage().mutable_data())->block(numbered_stream(device, stream));
}

void record_stream(const at::Tensor& tensor, c10::Device device, int64_t stream) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), numbered_stream(device, stream));
}

}  // namespace

void register_stream_operators() {
  define_operators("fxwrap::stream_id", [](const auto& add) {
    add("stream_id(Device device, int stream) -> int", "stream_id", &stream_id);
    add("record_event(Device device, int stream, int event=0) -> Tensor", "record_event", &record_event);
    add("wait_event(Tensor event, Device device, int stream) -> ()", "wait_event", &wait_event);
    add("record_stream(Tensor tensor, Device device, int stream) -> ()", "record_stream", &record_stream);
  });
}

}  // namespace fxwrap
