// The bridge's functions for emitted programs, on libtorch's tensors and operators.
#pragma once

#include "bridge/bridge.h"

namespace fxwrap::bridge {

extern const Functions functions;

// Of cuda/launch.cpp.
void launch(Frame& f, Kernel& kernel, Grid grid, Slots tensors, Slots outs, Numbers numbers);

// Of graph_capture/functions.cpp.
void replay(Frame& f, Slot functions, int64_t index, Slots tensors, Numbers numbers, Slots outs);

// Of cuda/streams.cpp.
void enter_device(Frame& f, Device& device);
void enter_stream(Frame& f, Device& device, int64_t stream);
void exit_device(Frame& f);

// Of ranges.cpp.
void enter_range(Frame& f, const char* name);
void exit_range(Frame& f);

// Of checks.cpp.
void check_layout(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device,
                  const char* operator_name);
void check_rank(Frame& f, Slot slot, const char* name, int64_t rank);
void check_alignment(Frame& f, Slot slot, const char* name, int64_t alignment);

}  // namespace fxwrap::bridge
