// The operators for streams and events in processes without Python.
#pragma once

namespace fxwrap {

// Registers them with torch, unless fxwrap's Python package has.
void register_stream_operators();

}  // namespace fxwrap
