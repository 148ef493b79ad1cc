// The interface of emitted C++ programs: the only header they include, without torch's headers.
//
// A program is a list of functions over one Frame, the owning array of its tensors and scalars. It reaches tensors and
// operators only through the table of functions in the frame, which the engine that runs it fills in: the bridge on
// libtorch, or the runtime's own engine for programs that call no operators. A compiled program is linked with neither,
// and depends on no version of torch.
//
// Every call site is static data, initialised at compile time; the first run resolves the operator and converts the
// arguments, later runs only call. Emitted functions hold no object with a destructor: errors travel as C++ exceptions
// through them to the engine, which releases the frame's tensors. That keeps compile time small and linear.
//
//   #include "bridge.h"
//   namespace program {
//   using namespace fxwrap;
//
//   constexpr Slot x{0}, w{1}, buf0{2}, mean{3}, rstd{4}, buf1{5};
//   constexpr IntSymbol s0{0};
//   static Device cpu{"cpu"};
//   static Operator aten_native_layer_norm{"aten::native_layer_norm", ""};
//   static Operator aten_mm_out{"aten::mm", "out"};
//
//   static void part_0(Frame& f) {
//     f.ints[s0] = size(f, x, 0);
//     check_layout(f, x, "x", {f.ints[s0], 64}, {64, 1}, DType::float32, cpu);
//     // layer_norm: aten.native_layer_norm  model.py:41
//     CALL(f, aten_native_layer_norm, (x, list(1), 64, none, none, 1e-05), (buf0, none, none));
//     empty_strided(f, buf1, {f.ints[s0], 32}, {32, 1}, DType::float32, cpu);
//     CALL(f, aten_mm_out, (buf0, w, named("out"), buf1), (none));
//     drop(f, buf0);
//   }
//
//   static constexpr Input inputs[] = {{"x", owned(x)}, {"w", w}};
//   static constexpr Arg outputs[] = {buf1, s0};
//   static void run(Frame& f) { part_0(f); }
//   }  // namespace program
//   FXWRAP_EXPORT const fxwrap::Program fxwrap_program = {
//       .name = "layer", .slots = 6, .ints = 1, .inputs = program::inputs, .outputs = program::outputs,
//       .run = program::run};
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#define FXWRAP_API __attribute__((visibility("default")))
#define FXWRAP_EXPORT extern "C" __attribute__((visibility("default")))

namespace fxwrap {

// Incremented by each change here that breaks previously compiled libraries.
constexpr int64_t abi_version = 10;

// Places in a Frame. Declared by the program: constexpr Slot x{0}, y{1};
enum Slot : int32_t {};
enum IntSymbol : int32_t {};    // index in Frame::ints
enum BoolSymbol : int32_t {};   // index in Frame::ints, holding 0 or 1
enum FloatSymbol : int32_t {};  // index in Frame::floats
enum ListSlot : int32_t {};     // index in Frame::lists: a list of any length, a generator or an opaque object

// torch's dtypes under torch's names; the values are those of c10::ScalarType.
enum class DType : int8_t {
  uint8 = 0, int8 = 1, int16 = 2, int32 = 3, int64 = 4, float16 = 5, float32 = 6, float64 = 7, complex32 = 8,
  complex64 = 9, complex128 = 10, bool_ = 11, qint8 = 12, quint8 = 13, qint32 = 14, bfloat16 = 15, quint4x2 = 16,
  quint2x4 = 17, bits1x8 = 18, bits2x4 = 19, bits4x2 = 20, bits8 = 21, bits16 = 22, float8_e5m2 = 23,
  float8_e4m3fn = 24, float8_e5m2fnuz = 25, float8_e4m3fnuz = 26, uint16 = 27, uint32 = 28, uint64 = 29,
  float8_e8m0fnu = 44, float4_e2m1fn_x2 = 45, bcomplex32 = 46,
};
enum class Layout : int8_t { strided, sparse_coo, sparse_csr, _mkldnn, sparse_csc, sparse_bsr, sparse_bsc, jagged };
enum class MemoryFormat : int8_t { contiguous_format, preserve_format, channels_last, channels_last_3d };

// A device by torch's name ("cpu", "cuda:0"); a static object, so that the name is parsed once.
struct Device {
  const char* name;
  int32_t code = -1;  // the engine's: device type and index, -1 until first used
  constexpr Device(const char* name) : name(name) {}
};

// One argument or result of a call site, or a marker between them. A plain value converts to it.
struct Arg {
  enum Kind : int8_t {
    None, Tensor, OwnedTensor, Int, Float, Bool, Complex, String, DTypeCode, LayoutCode, MemoryFormatCode, DeviceName,
    IntSymbolIndex, FloatSymbolIndex, BoolSymbolIndex,
    List,  // `integer` items follow
    Name,  // the next argument is passed by this name
    DynamicList,  // a list result of any length, a generator or an opaque object
    Object,       // an input or constant: an opaque object, which only Python passes
    InputIndex,   // an output: the input at this position, which the program never sees
  };
  Kind kind;
  union {
    int64_t integer;
    double real;
    const char* text;
    fxwrap::Device* device;
  };
  double imaginary = 0;

  constexpr Arg() : kind(None), integer(0) {}
  constexpr Arg(Kind kind, int64_t integer) : kind(kind), integer(integer) {}
  constexpr Arg(Kind kind, const char* text) : kind(kind), text(text) {}
  constexpr Arg(double real, double imaginary) : kind(Complex), real(real), imaginary(imaginary) {}
  constexpr Arg(int value) : kind(Int), integer(value) {}
  constexpr Arg(long value) : kind(Int), integer(value) {}
  constexpr Arg(long long value) : kind(Int), integer(value) {}
  constexpr Arg(double value) : kind(Float), real(value) {}
  constexpr Arg(bool value) : kind(Bool), integer(value) {}
  constexpr Arg(const char* value) : kind(String), text(value) {}
  constexpr Arg(Slot slot) : kind(Tensor), integer(slot) {}
  constexpr Arg(IntSymbol symbol) : kind(IntSymbolIndex), integer(symbol) {}
  constexpr Arg(FloatSymbol symbol) : kind(FloatSymbolIndex), integer(symbol) {}
  constexpr Arg(BoolSymbol symbol) : kind(BoolSymbolIndex), integer(symbol) {}
  constexpr Arg(ListSlot slot) : kind(DynamicList), integer(slot) {}
  constexpr Arg(DType dtype) : kind(DTypeCode), integer(int64_t(dtype)) {}
  constexpr Arg(Layout layout) : kind(LayoutCode), integer(int64_t(layout)) {}
  constexpr Arg(MemoryFormat format) : kind(MemoryFormatCode), integer(int64_t(format)) {}
  constexpr Arg(Device& value) : kind(DeviceName), device(&value) {}
};

constexpr Arg none;                                                    // None; as a result: unused
constexpr Arg list(int64_t count) { return {Arg::List, count}; }       // the next `count` items are one list
constexpr Arg named(const char* name) { return {Arg::Name, name}; }    // the next argument by name
constexpr Arg complex(double real, double imaginary) { return {real, imaginary}; }
constexpr Arg owned(Slot slot) { return {Arg::OwnedTensor, slot}; }    // an input that the program frees

constexpr Arg opaque(ListSlot slot) { return {Arg::Object, slot}; }    // an input or constant: an opaque object
constexpr Arg same_input(int64_t index) { return {Arg::InputIndex, index}; }  // an output: an input of the caller

// A run of arguments; its first element is a marker inserted by macros, so that the list may be empty.
struct Args {
  const Arg* data = nullptr;
  int64_t size = 0;
  constexpr Args() = default;
  template <size_t count>
  constexpr Args(const Arg (&items)[count]) : data(items), size(count) {}
};

// An operator by its schema's name and overload name, looked up on first use.
struct Operator {
  const char* name;
  const char* overload;
};

// Called before and after each operator call, kernel and replay of a run.
struct Observer {
  void (*on_line)(void* context, const char* name, int32_t begins) = nullptr;
  void* context = nullptr;
  const char* kernel = nullptr;  // which emitted code has begun and not ended
};

struct Functions;

// The values of one run. Tensors belong to the engine and are reached by slot; scalars are plain memory.
struct Frame {
  const Functions* functions;  // of the engine
  void* tensors;               // the engine's type of tensors [slots]
  int64_t* ints;
  double* floats;
  void* lists;                 // its type of lists and objects [lists]
  Observer* observer = nullptr;
};

// One call of an operator; `prepared` is the engine's.
struct CallSite {
  const Operator* operator_;
  Args arguments;
  Args results;
  void* prepared = nullptr;
};

// CALL(f, operator, (arguments...), (results...)): positional arguments in the schema's order, then named("out"), y.
// Omitted arguments have the schema's defaults. Results: a Slot or symbol each, `none` for an unused one,
// list(n) and n slots for a Tensor[] of n items, a ListSlot for a list of any length. An undefined tensor leaves its slot undefined.
#define FXWRAP_ARGS(...) {fxwrap::none, __VA_ARGS__}
#define CALL(frame, operator_, arguments, results)                                      \
  do {                                                                                  \
    static constexpr fxwrap::Arg arguments_[] = FXWRAP_ARGS arguments;                  \
    static constexpr fxwrap::Arg results_[] = FXWRAP_ARGS results;                      \
    static fxwrap::CallSite site = {&operator_, arguments_, results_};                      \
    fxwrap::call(frame, site);                                                          \
  } while (0)

// KERNEL(f, name, (arguments...)): calls a kernel for the CPU, a function. Without an observer: two tests that fall through.
#define FXWRAP_IF_OBSERVED(frame, statement) \
  if (__builtin_expect((frame).observer != nullptr, 0)) statement
#define KERNEL(frame, name, arguments)                                            \
  do {                                                                            \
    FXWRAP_IF_OBSERVED(frame, fxwrap::begin_kernel(*(frame).observer, #name));    \
    name arguments;                                                               \
    FXWRAP_IF_OBSERVED(frame, fxwrap::end_kernel(*(frame).observer));             \
  } while (0)

inline void begin_kernel(Observer& observer, const char* name) {
  observer.on_line(observer.context, name, 1);
  observer.kernel = name;
}
inline void end_kernel(Observer& observer) {
  const char* name = observer.kernel;
  observer.kernel = nullptr;
  observer.on_line(observer.context, name, 0);
}

// Kernels with a launch grid.
struct Grid {
  int64_t x = 1, y = 1, z = 1;  // no launch if one is not positive
  bool dependent = false;  // the kernel may start before the one launched before it has ended, for which it waits itself
};

// A scalar argument of a launch.
struct Number {
  bool is_real = false;
  bool is_bool = false;
  union {
    int64_t integer;
    double real;
  };
  constexpr Number(bool value) : is_bool(true), integer(value) {}
  constexpr Number(int value) : integer(value) {}
  constexpr Number(long value) : integer(value) {}
  constexpr Number(long long value) : integer(value) {}
  constexpr Number(double value) : is_real(true), real(value) {}
};

// A kernel compiled for an architecture and for arguments of these classes (launch.h).
struct Variant {
  const char* name;        // of the function
  const void* cubin;
  const char* ptx;         // for newer architectures; null if they cannot run it
  int32_t capability;      // of the architecture: 80 for 8.0
  bool arch_specific;           // it runs on no other architecture
  int32_t threads;         // of a block
  int32_t shared;          // bytes of shared memory of a block
  int32_t scratch;         // bytes of scratch memory of a block on the device, as for tensor descriptors
  const uint8_t* classes;  // the argument class of each parameter
  const uint8_t* parameter_passing;   // how each parameter is passed to the function
};

struct Variants {
  const Variant* data;
  int64_t size;
};

// A kernel of a program. `symbol` is derived from its content: equal kernels share their variants.
struct Kernel {
  const char* name;                // in the program
  const char* symbol;
  const char* language;
  const char* source;
  const char* signature;           // "*f32, *f32, i64"
  const char* options;             // JSON
  const Variants* compiled;        // the linked variants; null for none
  void* held = nullptr;            // the engine's
};

using Ints = std::initializer_list<int64_t>;
using Slots = std::initializer_list<Slot>;
using Numbers = std::initializer_list<Number>;

// The functions of an engine, which a program calls.
struct Functions {
  void (*call)(Frame& f, CallSite& site);

  // Memory. Sizes and strides count elements; `offset` is relative to the base's own storage offset.
  void (*empty_strided)(Frame& f, Slot out, Ints sizes, Ints strides, DType dtype, Device& device);
  void (*view)(Frame& f, Slot out, Slot base, Ints sizes, Ints strides, int64_t offset);
  void (*reuse)(Frame& f, Slot out, Slot from, Ints sizes, Ints strides, DType dtype);  // moves `from`'s memory
  // A tensor `offset` bytes from the start of `pool`'s memory, which it shares.
  void (*pool_slice)(Frame& f, Slot out, Slot pool, int64_t offset, Ints sizes, Ints strides, DType dtype);
  void (*copy)(Frame& f, Slot to, Slot from);    // the elements, of the same dtype and sizes
  void (*alias)(Frame& f, Slot out, Slot from);  // both name the same tensor
  void (*move)(Frame& f, Slot out, Slot from);   // `from` is left empty
  void (*drop)(Frame& f, Slot slot);
  void (*alias_list)(Frame& f, ListSlot out, ListSlot from);
  void (*move_list)(Frame& f, ListSlot out, ListSlot from);
  void (*drop_list)(Frame& f, ListSlot slot);

  // An element of a list, or of a list in it and so on: `path` are positions, as Python counts them. IndexError for none.
  void (*element)(Frame& f, Slot out, ListSlot list, Ints path);
  int64_t (*element_int)(Frame& f, ListSlot list, Ints path);
  double (*element_float)(Frame& f, ListSlot list, Ints path);
  bool (*element_bool)(Frame& f, ListSlot list, Ints path);

  // Properties of a tensor. item_* read its one element (and wait for its device).
  bool (*defined)(Frame& f, Slot slot);
  int64_t (*size)(Frame& f, Slot slot, int64_t dim);
  int64_t (*stride)(Frame& f, Slot slot, int64_t dim);
  int64_t (*storage_offset)(Frame& f, Slot slot);
  int64_t (*item_int)(Frame& f, Slot slot);
  double (*item_float)(Frame& f, Slot slot);
  bool (*item_bool)(Frame& f, Slot slot);
  void* (*data_ptr)(Frame& f, Slot slot);
  void (*bump_version)(Frame& f, Slot slot);  // after a kernel wrote it: autograd's version counter moves on

  // Launches a kernel on its tensors' device, on torch's current stream there; its arguments are `tensors`, `outs` and
  // `numbers`, in the order of its signature. Without a matching variant, Python compiles one.
  void (*launch)(Frame& f, Kernel& kernel, Grid grid, Slots tensors, Slots outs, Numbers numbers);

  // Runs a function of the program whose work is captured and replayed as a device graph, by its position among those of
  // `functions`, a constant that the program's loader passes. `numbers` are the values of its symbols.
  void (*replay)(Frame& f, Slot functions, int64_t index, Slots tensors, Numbers numbers, Slots outs);

  // The state of a device's default generator, as a new uint8 tensor on the CPU, and back.
  void (*save_random_state)(Frame& f, Slot out, Device& device);
  void (*restore_random_state)(Frame& f, Slot state, Device& device);
  // Exchanges the states of a device's default generator and another one, so that operators draw from that.
  void (*exchange_random_state)(Frame& f, ListSlot generator, Device& device);

  // Makes a device current, and a stream of it by torch's number for that, until `exit_device`. Guards that are still
  // open when the program ends or throws are closed then.
  void (*enter_device)(Frame& f, Device& device);
  void (*enter_stream)(Frame& f, Device& device, int64_t stream);
  void (*exit_device)(Frame& f);

  // Opens a range for torch's profiler, and closes the innermost one. Without a profiler, a few nanoseconds each. Ranges
  // that are still open when the program ends or throws are closed then. `name` is a literal.
  void (*enter_range)(Frame& f, const char* name);
  void (*exit_range)(Frame& f);

  // Checks. The first three raise fxwrap.errors.InputError (twins of fxwrap/runtime/checks.py). With an operator that is
  // not "", `check_layout` checks a result of its call, and raises ResultError.
  void (*check_layout)(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device,
                       const char* operator_name);
  void (*check_rank)(Frame& f, Slot slot, const char* name, int64_t rank);
  void (*check_alignment)(Frame& f, Slot slot, const char* name, int64_t alignment);  // of the address, bytes
  // Throws the named error; `shown`, if it is not null, is the number that violates the condition.
  void (*fail_assert)(Frame& f, const char* message, const char* error, const int64_t* shown);
};

inline void call(Frame& f, CallSite& site) { f.functions->call(f, site); }

inline void empty_strided(Frame& f, Slot out, Ints sizes, Ints strides, DType dtype, Device& device) {
  f.functions->empty_strided(f, out, sizes, strides, dtype, device);
}
inline void view(Frame& f, Slot out, Slot base, Ints sizes, Ints strides, int64_t offset) {
  f.functions->view(f, out, base, sizes, strides, offset);
}
inline void reuse(Frame& f, Slot out, Slot from, Ints sizes, Ints strides, DType dtype) {
  f.functions->reuse(f, out, from, sizes, strides, dtype);
}
inline void pool_slice(Frame& f, Slot out, Slot pool, int64_t offset, Ints sizes, Ints strides, DType dtype) {
  f.functions->pool_slice(f, out, pool, offset, sizes, strides, dtype);
}
inline void copy(Frame& f, Slot to, Slot from) { f.functions->copy(f, to, from); }
inline void alias(Frame& f, Slot out, Slot from) { f.functions->alias(f, out, from); }
inline void move(Frame& f, Slot out, Slot from) { f.functions->move(f, out, from); }
inline void drop(Frame& f, Slot slot) { f.functions->drop(f, slot); }
inline void alias(Frame& f, ListSlot out, ListSlot from) { f.functions->alias_list(f, out, from); }
inline void move(Frame& f, ListSlot out, ListSlot from) { f.functions->move_list(f, out, from); }
inline void drop(Frame& f, ListSlot slot) { f.functions->drop_list(f, slot); }

inline void element(Frame& f, Slot out, ListSlot list, Ints path) { f.functions->element(f, out, list, path); }
inline int64_t element_int(Frame& f, ListSlot list, Ints path) { return f.functions->element_int(f, list, path); }
inline double element_float(Frame& f, ListSlot list, Ints path) { return f.functions->element_float(f, list, path); }
inline bool element_bool(Frame& f, ListSlot list, Ints path) { return f.functions->element_bool(f, list, path); }

inline bool defined(Frame& f, Slot slot) { return f.functions->defined(f, slot); }
inline int64_t size(Frame& f, Slot slot, int64_t dim) { return f.functions->size(f, slot, dim); }
inline int64_t stride(Frame& f, Slot slot, int64_t dim) { return f.functions->stride(f, slot, dim); }
inline int64_t storage_offset(Frame& f, Slot slot) { return f.functions->storage_offset(f, slot); }
inline int64_t item_int(Frame& f, Slot slot) { return f.functions->item_int(f, slot); }
inline double item_float(Frame& f, Slot slot) { return f.functions->item_float(f, slot); }
inline bool item_bool(Frame& f, Slot slot) { return f.functions->item_bool(f, slot); }
inline void* data_ptr(Frame& f, Slot slot) { return f.functions->data_ptr(f, slot); }
inline void bump_version(Frame& f, Slot slot) { f.functions->bump_version(f, slot); }

inline void launch(Frame& f, Kernel& kernel, Grid grid, Slots tensors, Slots outs, Numbers numbers) {
  f.functions->launch(f, kernel, grid, tensors, outs, numbers);
}

inline void replay(Frame& f, Slot functions, int64_t index, Slots tensors, Numbers numbers, Slots outs) {
  f.functions->replay(f, functions, index, tensors, numbers, outs);
}

inline void save_random_state(Frame& f, Slot out, Device& device) { f.functions->save_random_state(f, out, device); }
inline void restore_random_state(Frame& f, Slot state, Device& device) {
  f.functions->restore_random_state(f, state, device);
}
inline void exchange_random_state(Frame& f, ListSlot generator, Device& device) {
  f.functions->exchange_random_state(f, generator, device);
}

inline void enter_device(Frame& f, Device& device) { f.functions->enter_device(f, device); }
inline void enter_stream(Frame& f, Device& device, int64_t stream) { f.functions->enter_stream(f, device, stream); }
inline void exit_device(Frame& f) { f.functions->exit_device(f); }

inline void enter_range(Frame& f, const char* name) { f.functions->enter_range(f, name); }
inline void exit_range(Frame& f) { f.functions->exit_range(f); }

inline void check_layout(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device,
                         const char* operator_name = "") {
  f.functions->check_layout(f, slot, name, sizes, strides, dtype, device, operator_name);
}
inline void check_rank(Frame& f, Slot slot, const char* name, int64_t rank) {
  f.functions->check_rank(f, slot, name, rank);
}
inline void check_alignment(Frame& f, Slot slot, const char* name, int64_t alignment) {
  f.functions->check_alignment(f, slot, name, alignment);
}
inline void fail_assert(Frame& f, const char* message, const char* error = "RuntimeError") {
  f.functions->fail_assert(f, message, error, nullptr);
}
inline void fail_assert(Frame& f, const char* message, const char* error, int64_t shown) {
  f.functions->fail_assert(f, message, error, &shown);
}

// An input and its name in error messages: a Slot, owned(Slot), a symbol, the ListSlot of a generator, opaque(ListSlot),
// or `none` for an object that the program does not use.
// A borrowed input's slot must never be dropped, moved, reused or written as a result.
struct Input {
  const char* name;
  Arg value;
};

struct Inputs {
  const Input* data = nullptr;
  int64_t size = 0;
  constexpr Inputs() = default;
  template <size_t count>
  constexpr Inputs(const Input (&items)[count]) : data(items), size(count) {}
};

// The symbol `fxwrap_program` that a library exports. Outputs may also be constants (ints, floats, bools, none),
// and inputs that the caller returns itself. Constants are tensors, whose slots are borrowed, and opaque objects, passed
// once, when the library is loaded.
struct Program {
  int64_t abi = abi_version;
  const char* name;
  int64_t slots = 0;   // length of Frame::tensors
  int64_t ints = 0;    // length of Frame::ints
  int64_t floats = 0;  // length of Frame::floats
  int64_t lists = 0;   // length of Frame::lists
  Inputs inputs = {};
  Args constants = {};
  Args outputs = {};
  void (*run)(Frame&) = nullptr;
};

}  // namespace fxwrap
