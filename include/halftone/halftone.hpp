// The whole C++ interface. The C ABI is halftone/halftone.h.
#pragma once

#include "halftone/attention.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "halftone/format.h"
#include "halftone/memory.h"
#include "halftone/sequences.h"
#include "halftone/types.h"
#include "halftone/version.h"
