// The operators of matmuls of groups of rows in processes without Python.
#pragma once

namespace fxwrap {

// Registers them with torch, unless fxwrap's Python package has.
void register_grouped_matmuls();

}  // namespace fxwrap
