/* What every part of the C ABI speaks of: version, status and errors, element types, devices, tensors.
 * halftone.h includes it and says what holds for all of them. */
#ifndef HALFTONE_C_TYPES_H_
#define HALFTONE_C_TYPES_H_

#include <stddef.h> /* NOLINT(modernize-deprecated-headers): C */
#include <stdint.h> /* NOLINT(modernize-deprecated-headers): C */

#ifndef HALFTONE_API
#define HALFTONE_API __attribute__((visibility("default")))
#endif

/* Tells GCC that a function only keeps the address in parameter n: memory still to be written is no warning.
 */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define HALFTONE_ADDRESS_ONLY(n) __attribute__((access(none, n)))
#else
#define HALFTONE_ADDRESS_ONLY(n)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version, status and errors ---- */

/* The meaning of this header's structs and functions; grows when a field changes its meaning. */
#define HALFTONE_ABI_VERSION 2

/* The library's version, "major.minor.patch". A string constant. */
HALFTONE_API const char* halftone_version(void);

/* The HALFTONE_ABI_VERSION that the library understands. */
HALFTONE_API uint32_t halftone_abi_version(void);

typedef enum halftone_status {
  HALFTONE_OK = 0,
  HALFTONE_INVALID_ARGUMENT = 1,   /* a value that no configuration could accept */
  HALFTONE_UNSUPPORTED = 2,        /* well formed, but no backend here has it */
  HALFTONE_OUT_OF_RANGE = 3,       /* an index, length or slot beyond its limit */
  HALFTONE_CORRUPT_FILE = 4,       /* a file that breaks its format */
  HALFTONE_RESOURCE_EXHAUSTED = 5, /* memory, workspace, cache or buffer space is missing */
  HALFTONE_DEVICE_ERROR = 6,       /* the device or its driver reported a failure */
  HALFTONE_INTERNAL = 7            /* a defect in halftone */
} halftone_status;

/* "OK", "InvalidArgument", "Unsupported", ...; "Unknown" for any other value. A string constant. */
HALFTONE_API const char* halftone_status_name(int32_t status);

/* The sentence of the last call that failed on this thread, at most 2047 bytes; "" before the first. Valid
 * until the next failure on this thread: a call that succeeds leaves it as it is. */
HALFTONE_API const char* halftone_last_error(void);

/* ---- Element types, devices and tensors ---- */

/* Element type of a tensor or of a cache. INT4 packs two values in a byte and occurs only inside a cache. */
typedef enum halftone_dtype {
  HALFTONE_DTYPE_F32 = 0,
  HALFTONE_DTYPE_F16 = 1,
  HALFTONE_DTYPE_BF16 = 2,
  HALFTONE_DTYPE_E4M3 = 3, /* OCP E4M3: no infinities, largest value 448, 0x7f and 0xff are NaN */
  HALFTONE_DTYPE_INT8 = 4,
  HALFTONE_DTYPE_INT4 = 5,
  HALFTONE_DTYPE_UINT8 = 6,
  HALFTONE_DTYPE_INT32 = 7,
  HALFTONE_DTYPE_INT64 = 8,
  HALFTONE_DTYPE_E8M0 = 9 /* a power of two: of scales, never of tensors */
} halftone_dtype;

/* "f32", "f16", "bf16", "e4m3", "int8", "int4", "uint8", "int32", "int64"; NULL for any other value. */
HALFTONE_API const char* halftone_dtype_name(int32_t dtype);

/* Bits of one element (4 for HALFTONE_DTYPE_INT4); 0 for a value that is no halftone_dtype. */
HALFTONE_API int32_t halftone_dtype_bits(int32_t dtype);

typedef enum halftone_device_type { HALFTONE_DEVICE_CPU = 0, HALFTONE_DEVICE_CUDA = 1 } halftone_device_type;

/* Writes "cpu" or "cuda:<index>" as halftone_plan_describe() writes its text. */
HALFTONE_API halftone_status halftone_device_name(int32_t device_type, int32_t device_index, char* buffer,
                                                  size_t capacity, size_t* length);

/* Dimensions that a tensor may have. */
#define HALFTONE_MAX_RANK 5

/* A view of memory that the caller owns, in the manner of DLPack's DLTensor. */
typedef struct halftone_tensor {
  size_t struct_size;
  uint32_t abi_version;
  int32_t dtype;        /* halftone_dtype */
  void* data;           /* first element; may point to const memory when the callee only reads it */
  int32_t device_type;  /* halftone_device_type */
  int32_t device_index; /* 0 on the CPU */
  int32_t rank;         /* 0 to HALFTONE_MAX_RANK */
  int32_t reserved;     /* 0 */
  int64_t shape[HALFTONE_MAX_RANK];
  int64_t strides[HALFTONE_MAX_RANK]; /* in elements */
} halftone_tensor;

/* Makes *tensor a row-major CPU view of `data` with the `rank` extents in `shape` (may be NULL when rank is
 * 0); change device and strides afterwards where they differ. Fails with INVALID_ARGUMENT on a rank outside 0
 * to HALFTONE_MAX_RANK, an unknown dtype, a negative extent, or a product of extents beyond INT64_MAX. */
HALFTONE_API halftone_status halftone_tensor_init(halftone_tensor* tensor, size_t struct_size,
                                                  const void* data, int32_t dtype, int32_t rank,
                                                  const int64_t* shape) HALFTONE_ADDRESS_ONLY(3);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HALFTONE_C_TYPES_H_ */
