// Marks functions that serve both host and device code.
#pragma once

#ifdef __CUDACC__
#define HT_HOST_DEVICE __host__ __device__
#else
#define HT_HOST_DEVICE
#endif
