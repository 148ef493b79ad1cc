// Devices by name.
#pragma once

#include <c10/core/Device.h>

#include "bridge/bridge.h"

namespace fxwrap {

// The named device; an index left out stays left out. The name is parsed once.
c10::Device resolve_device(Device& device);

}  // namespace fxwrap
