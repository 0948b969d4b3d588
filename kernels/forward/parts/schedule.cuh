#pragma once
// The tile scheduler of persistent blocks. For sequences of different lengths, the host substitutes
// kernels/with/forward/parts/schedule.cuh for this header.

#include <forward/parts/static_schedule.cuh>

template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
using Schedule = StaticSchedule<Br, Bc, by_length, batch_first, may_skip>;
