#include "cuda/decode/instances.h"
namespace halftone::cuda { auto one_f() { return decode_kernel_of<175>([](const DecodeConfig&){return true;}); } }
