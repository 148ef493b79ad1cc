// The compiled code of saved programs in this process.
#pragma once

#include <string>

#include "engine/engine.h"
#include "host/archive.h"

namespace fxwrap::host {

// The library of tensors and operators beside the runtime. Throws Failure.
Engine& load_engine();

// Why compiled code for a target, as the manifest describes it, cannot be used here; "" if it can. Throws JsonError.
std::string incompatibility_reason(const Json& target);

// The program in an entry of a file. Equal code is loaded once, and stays loaded until the process ends. Throws Failure.
const Program& load_code(const Archive& archive, const std::string& entry);

}  // namespace fxwrap::host
