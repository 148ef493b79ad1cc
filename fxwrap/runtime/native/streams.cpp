// Devices and streams that a program makes current, through c10's guards of whatever device types torch knows.
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "frame.h"

namespace fxwrap {
namespace {

// What was current before.
struct Entered {
  c10::Device device;
  std::optional<c10::Stream> stream;
};

thread_local std::vector<Entered> entered;

void enter(Device& device, std::optional<int64_t> stream) {
  const c10::Device wanted = resolve_device(device);
  const c10::impl::VirtualGuardImpl guard(wanted.type());
  entered.push_back({guard.exchangeDevice(wanted), std::nullopt});
  if (stream.has_value()) {
    entered.back().stream = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, wanted, *stream));
  }
}

void leave() {
  const Entered before = entered.back();
  entered.pop_back();
  const c10::impl::VirtualGuardImpl guard(before.device.type());
  if (before.stream.has_value()) guard.exchangeStream(*before.stream);
  guard.uncheckedSetDevice(before.device);
}

}  // namespace

void enter_device(Frame&, Device& device) { enter(device, std::nullopt); }
void enter_stream(Frame&, Device& device, int64_t stream) { enter(device, stream); }
void exit_device(Frame&) { leave(); }

DevicesLeft::DevicesLeft() : depth_(entered.size()) {}

DevicesLeft::~DevicesLeft() {
  while (entered.size() > depth_) leave();
}

}  // namespace fxwrap
