#pragma once
// The tile scheduler of a persistent block. Where lengths differ, the host puts
// kernels/with/forward/parts/schedule.cuh in place of this header.

#include <forward/parts/static_schedule.cuh>

template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
using Schedule = StaticSchedule<Br, Bc, by_length, batch_first, may_skip>;
