// The operators for frozen weights in processes without Python.
#pragma once

namespace fxwrap {

// Registers them with torch, unless fxwrap's Python package has.
void register_prepacked_operators();

}  // namespace fxwrap
