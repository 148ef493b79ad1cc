// The engine of programs that call no operators and run on the CPU: it needs no library.
#pragma once

#include "engine/engine.h"

namespace fxwrap::cpu {

Engine& engine();

}  // namespace fxwrap::cpu
