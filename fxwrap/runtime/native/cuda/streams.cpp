// Devices and streams that a program makes current, through c10's guards for torch's device types.
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

#include "bridge/checks.h"
#include "bridge/frame.h"
#include "bridge/functions.h"

namespace fxwrap {
namespace {

// The previous device and stream.
struct SavedDevice {
  c10::Device device;
  std::optional<c10::Stream> stream;
};

thread_local std::vector<SavedDevice> entered;

void enter(Device& device, std::optional<int64_t> stream) {
  const c10::Device target = resolve_device(device);
  const c10::impl::VirtualGuardImpl guard(target.type());
  entered.push_back({guard.exchangeDevice(target), std::nullopt});
  if (stream.has_value()) {
    entered.back().stream = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, target, *stream));
  }
}

void leave() {
  const SavedDevice before = entered.back();
  entered.pop_back();
  const c10::impl::VirtualGuardImpl guard(before.device.type());
  if (before.stream.has_value()) guard.exchangeStream(*before.stream);
  guard.uncheckedSetDevice(before.device);
}

}  // namespace

namespace bridge {

void enter_device(Frame&, Device& device) { enter(device, std::nullopt); }
void enter_stream(Frame&, Device& device, int64_t stream) { enter(device, stream); }
void exit_device(Frame&) { leave(); }

}  // namespace bridge

DeviceStackGuard::DeviceStackGuard() : depth_(entered.size()) {}

DeviceStackGuard::~DeviceStackGuard() {
  while (entered.size() > depth_) leave();
}

}  // namespace fxwrap
