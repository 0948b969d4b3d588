#pragma once
// The simulator models a single SM and no clock. Each call advances a counter by one cycle, so
// times follow the order of calls.

namespace simulator {

inline unsigned long long ticks;

__attribute__((no_sanitize("thread"), noinline)) inline unsigned long long tick() {
  return __atomic_fetch_add(&ticks, 1, __ATOMIC_RELAXED);
}

}  // namespace simulator

namespace timeline {

inline unsigned long long cycles() {
  return simulator::tick();
}
inline unsigned long long cycles_after(unsigned) {
  return cycles();
}
inline unsigned long long nanoseconds() {
  return cycles();
}
inline unsigned multiprocessor() {
  return 0;
}

}  // namespace timeline
