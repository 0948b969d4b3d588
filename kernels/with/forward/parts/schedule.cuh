#pragma once
// The tile scheduler of persistent blocks, with a variant for ragged batches.

#include <forward/parts/ragged_schedule.cuh>
#include <forward/parts/static_schedule.cuh>

template <bool by_lengths, int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct ScheduleOf {
  using Type = StaticSchedule<Br, Bc, by_length, batch_first, may_skip>;
};
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct ScheduleOf<true, Br, Bc, by_length, batch_first, may_skip> {
  using Type = RaggedSchedule<Br, Bc>;
};
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
using Schedule = typename ScheduleOf<ragged, Br, Bc, by_length, batch_first, may_skip>::Type;
