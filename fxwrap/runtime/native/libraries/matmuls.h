// The operator of matmuls that store the input of their GELU in processes without Python.
#pragma once

namespace fxwrap {

// Registers it with torch, unless fxwrap's Python package has.
void register_gelu_matmul();

}  // namespace fxwrap
