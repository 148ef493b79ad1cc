// The compiled code of saved programs in this process.
#pragma once

#include <string>

#include "engine/engine.h"
#include "host/archive.h"

namespace fxwrap::host {

// The engine on libtorch: the bridge beside the runtime, or linked with it. Throws Failure.
Engine& torch_engine();

// The engine for a program, "torch" or "cpu" in the manifest. In a process that has loaded libtorch, the engine on libtorch
// runs both, so that callers may pass its tensors. Throws Failure, or JsonError for another name.
Engine& find_engine(const std::string& name);

// Why compiled code for a target, as the manifest describes it, cannot be used here; "" if it can. Throws JsonError.
std::string incompatibility_reason(const Json& target);

// The program in an entry of a file. Equal code is loaded once, and stays loaded until the process ends. Throws Failure.
const Program& load_code(const Archive& archive, const std::string& entry);

}  // namespace fxwrap::host
