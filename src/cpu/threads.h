// How many threads a parallel region may have.
#pragma once

#include <cstdint>

namespace halftone::cpu {

/// Threads for a parallel region that has work for `useful`; every region asks, and no result depends on it.
/// At most omp_get_max_threads(), and
/// - 1 in a process forked from one where a region had more: the threads of the OpenMP run-time are not
///   forked along, and a region would wait for them forever;
/// - as many as the system lets this process start, else the run-time would end the process. A calling thread
///   finds out before its first region and whenever it wants more, at some 20 us for each thread;
/// - 1 inside a parallel region of the caller's, unless nested ones are enabled.
/// Throws bad_alloc, before the first region of a calling thread only.
int region_threads(std::int64_t useful);

}  // namespace halftone::cpu
