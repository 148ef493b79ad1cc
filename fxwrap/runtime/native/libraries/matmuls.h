// The operator of matmuls with a second result in processes without Python.
#pragma once

namespace fxwrap {

// Registers it with torch, unless fxwrap's Python package has.
void register_fused_matmul();

}  // namespace fxwrap
