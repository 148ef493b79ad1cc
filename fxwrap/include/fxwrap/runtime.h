/* The C interface of fxwrap's runtime: opens programs that `fxwrap.save` wrote and runs them, without Python.
 *
 *   FxwrapModel* model = NULL;
 *   FxwrapError* error = fxwrap_open("model.fxw", NULL, &model);
 *   if (error == NULL) error = fxwrap_run(model, NULL, inputs, input_count, outputs, output_count);
 *   if (error != NULL) { puts(fxwrap_error_message(error)); fxwrap_error_delete(error); }
 *
 * Errors. Functions that can fail return NULL, or an error that the caller deletes; nothing else is changed then.
 * Messages and kinds are those of the Python errors.
 *
 * Threads. Any number of threads may call any function on one model at the same time, except `fxwrap_close`.
 *
 * Compiled code in a file is used as it is; nothing is compiled. Load files only from sources that you would install
 * programs from, or name the key that must have signed them.
 */
#ifndef FXWRAP_RUNTIME_H
#define FXWRAP_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define FXWRAP_RUNTIME_VERSION 1

#define FXWRAP_FUNCTION __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* DLPack 1.x's tensor: its definition is in dlpack/dlpack.h, or in ATen/dlpack.h of torch. */
struct DLManagedTensorVersioned;

typedef struct FxwrapModel FxwrapModel;
typedef struct FxwrapError FxwrapError;

typedef enum FxwrapKind {
  FXWRAP_NONE = 0,   /* None */
  FXWRAP_DLPACK = 1, /* a tensor as `dlpack` */
  FXWRAP_TENSOR = 2, /* a tensor as `tensor`: an at::Tensor*, which is an AtenTensorHandle of libtorch's C shim */
  FXWRAP_INT = 3,    /* `integer` */
  FXWRAP_FLOAT = 4,  /* `real` */
  FXWRAP_BOOL = 5,   /* `integer`, 0 or 1 */
} FxwrapKind;

/* An input or output. */
typedef struct FxwrapValue {
  int32_t kind; /* FxwrapKind */
  int32_t reserved;
  union {
    struct DLManagedTensorVersioned* dlpack;
    void* tensor;
    int64_t integer;
    double real;
  } as;
} FxwrapValue;

/* --- errors -------------------------------------------------------------------------------------------------------- */

/* The class of the Python error: "ArtifactError", "InputError", "RuntimeError", "IndexError"... */
FXWRAP_FUNCTION const char* fxwrap_error_kind(const FxwrapError* error);
FXWRAP_FUNCTION const char* fxwrap_error_message(const FxwrapError* error);
FXWRAP_FUNCTION void fxwrap_error_delete(FxwrapError* error);

/* --- models -------------------------------------------------------------------------------------------------------- */

/* Zero is every default. `size` is sizeof(FxwrapOpenOptions). */
typedef struct FxwrapOpenOptions {
  size_t size;
  int32_t threads;        /* of operators and kernels; a setting of the process, 0 leaves it as it is */
  int32_t copy_constants; /* reads constants on the CPU into memory instead of mapping the file, which must not change while it is mapped */
  const char* device;     /* "cpu", "cuda:0": the file must be for this device alone; NULL takes those of the file */
  const char* const* libraries; /* `library_count` paths of libraries that register custom operators, loaded first */
  int64_t library_count;
  const char* trust; /* NULL or "full"; or a public key, "ed25519:..." and 64 hexadecimal digits, that must have signed the file */
} FxwrapOpenOptions;

/* Opens a saved program, after checking the hash of every entry. `options` may be NULL. Errors: ArtifactError for a
 * damaged, foreign or newer file, for one without compiled code for this machine, torch and fxwrap (nothing is compiled
 * here), for a library that cannot be loaded, for operators that are not registered in this process, and for one that the
 * trusted key has not signed; OptionError for another text in `trust`. */
FXWRAP_FUNCTION FxwrapError* fxwrap_open(const char* path, const FxwrapOpenOptions* options, FxwrapModel** model);

/* The same for a file whose code is linked into the host, as in projects of `python -m fxwrap export-cmake`. `program` is
 * its symbol `fxwrap_program`. */
typedef struct FxwrapProgram FxwrapProgram;
FXWRAP_FUNCTION FxwrapError* fxwrap_open_linked(const FxwrapProgram* program, const char* path,
                                                const FxwrapOpenOptions* options, FxwrapModel** model);

/* Another instance of a program: it shares code and weights, and later replacements of constants change only one. */
FXWRAP_FUNCTION FxwrapError* fxwrap_share(const FxwrapModel* model, FxwrapModel** instance);

/* Closes an instance; results and calls of others stay valid. NULL is allowed. */
FXWRAP_FUNCTION void fxwrap_close(FxwrapModel* model);

/* --- signature ----------------------------------------------------------------------------------------------------- */

/* A flat input or output. Texts live as long as the model; they are "" and NULL where they do not apply. */
typedef struct FxwrapLeaf {
  const char* name;           /* "input_ids", "cache.0.key" */
  const char* kind;           /* "tensor", "int", "float", "bool", "none", "opaque", "constant" */
  const char* dtype;          /* of a tensor: "f32", "bf16", "i64", "bool"... */
  const char* device;         /* of a tensor: "cpu", "cuda:0" */
  const char* ownership;      /* of an input: "borrowed", "mutable" (the program writes it), "shared", "owned" */
  int32_t rank;               /* of a tensor, else -1 */
  const char* const* sizes;   /* `rank` texts: numbers, or expressions of symbols as "2*s0" */
  const char* const* strides; /* in elements */
} FxwrapLeaf;

FXWRAP_FUNCTION const char* fxwrap_name(const FxwrapModel* model);
FXWRAP_FUNCTION int64_t fxwrap_input_count(const FxwrapModel* model);
FXWRAP_FUNCTION int64_t fxwrap_output_count(const FxwrapModel* model);
/* NULL for an index out of range. */
FXWRAP_FUNCTION const FxwrapLeaf* fxwrap_input(const FxwrapModel* model, int64_t index);
FXWRAP_FUNCTION const FxwrapLeaf* fxwrap_output(const FxwrapModel* model, int64_t index);
/* The position of the input of this name; -1 if there is none. */
FXWRAP_FUNCTION int64_t fxwrap_input_index(const FxwrapModel* model, const char* name);

/* A symbol in the sizes of leaves, or an input that is a number. */
typedef struct FxwrapSymbol {
  const char* name;  /* "s0" */
  const char* lower; /* the least number of its range, "2"; "" if there is none */
  const char* upper;
} FxwrapSymbol;

FXWRAP_FUNCTION int64_t fxwrap_symbol_count(const FxwrapModel* model);
FXWRAP_FUNCTION const FxwrapSymbol* fxwrap_symbol(const FxwrapModel* model, int64_t index);
/* The file's manifest, a JSON text: versions, options, devices, ranges of symbols, constants. */
FXWRAP_FUNCTION const char* fxwrap_metadata(const FxwrapModel* model);

/* --- calls --------------------------------------------------------------------------------------------------------- */

/* Called before (`begins` is 1) and after (0) each line of a run that computes, on its thread, also if it fails. The name is
 * an operator's ("aten::mm"), a kernel's in the program ("add_gelu_0"), or that of a function that is replayed as a device
 * graph, whose lines are reported between its own two calls in runs that neither capture nor replay it. On a GPU, the end of
 * a line is that of its launch. */
typedef void (*FxwrapLineCallback)(void* context, const char* name, int32_t begins);

/* Zero is every default. `size` is sizeof(FxwrapRunOptions). */
typedef struct FxwrapRunOptions {
  size_t size;
  int32_t outputs_as_tensors; /* tensors of the result are FXWRAP_TENSOR instead of FXWRAP_DLPACK */
  int32_t has_stream;         /* work is queued on `stream` of `device` instead of its current stream */
  const char* device;         /* "cuda:0" */
  void* stream;               /* a cudaStream_t */
  FxwrapLineCallback on_line;
  void* context;
} FxwrapRunOptions;

/* Runs the program. `options` may be NULL.
 *
 * Inputs: FXWRAP_DLPACK tensors are consumed, also by a call that fails: their deleter, which may be NULL, is called once
 * when neither the program nor a result uses their memory. FXWRAP_TENSOR inputs stay the caller's, except those that the
 * program owns, which it moves out of the at::Tensor. A number that the model was exported with may be FXWRAP_NONE.
 *
 * Outputs: the caller owns them; see fxwrap_value_delete. A result may share the memory of an input.
 *
 * Errors: InputError for a wrong number, dtype, device, shape, strides or kind of inputs; else the operator's. */
FXWRAP_FUNCTION FxwrapError* fxwrap_run(const FxwrapModel* model, const FxwrapRunOptions* options, FxwrapValue* inputs,
                                        int64_t input_count, FxwrapValue* outputs, int64_t output_count);

/* Releases a result, or an input that was not passed. */
FXWRAP_FUNCTION void fxwrap_value_delete(FxwrapValue* value);

/* --- constants ----------------------------------------------------------------------------------------------------- */

FXWRAP_FUNCTION int64_t fxwrap_constant_count(const FxwrapModel* model);
FXWRAP_FUNCTION const FxwrapLeaf* fxwrap_constant(const FxwrapModel* model, int64_t index);

/* Replaces constants of these names, in the program or in the model ("layers.0.weight"), and leaves the others. Calls
 * that run go on with the old ones, later calls see all new ones. Tensors are consumed as inputs are; those with the
 * program's layout and device are not copied. Errors: ArtifactError for unexpected or missing constants, and for those
 * of another dtype or size; the old ones stay then. */
FXWRAP_FUNCTION FxwrapError* fxwrap_load_constants(FxwrapModel* model, const char* const* names, FxwrapValue* tensors,
                                                   int64_t count);

/* The same from a file in the safetensors format. */
FXWRAP_FUNCTION FxwrapError* fxwrap_load_constants_file(FxwrapModel* model, const char* path);

#ifdef __cplusplus
}
#endif

#endif /* FXWRAP_RUNTIME_H */
