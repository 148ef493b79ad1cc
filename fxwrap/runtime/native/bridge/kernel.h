// The functions of generated CPU kernels: one header, which is precompiled for all of them.
//
// Its parts are small on purpose: they include no header of the standard library but stdint.h, because <cmath> alone takes
// longer to compile than the kernels do. Functions are inlined into loops, which the compiler vectorises.
#pragma once

#include "contractions.h"
#include "factors.h"
#include "kernel_library.h"
#include "kernel_memory.h"
#include "kernel_operations.h"
#include "kernel_reductions.h"
#include "kernel_streaming.h"
#include "kernel_tiles.h"
#include "kernel_types.h"
#include "matrices.h"
