#pragma once
// Reads clocks and the SM number for `cupyfa timeline`. PTX: %clock64, %globaltimer, %smid.

namespace timeline {

// Returns the cycle counter of this SM.
__device__ __forceinline__ unsigned long long cycles() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  return clock;
}

// Returns cycles() after the load of `loaded` has completed; `loaded` must not be all ones.
__device__ __forceinline__ unsigned long long cycles_after(unsigned loaded) {
  unsigned long long clock;
  asm volatile(
      "{.reg .pred there;\n"
      "setp.ne.u32 there, %1, 0xffffffff;\n"
      "mov.u64 %0, 0;\n"
      "@there mov.u64 %0, %%clock64;}"
      : "=&l"(clock)
      : "r"(loaded)
      : "memory");
  return clock;
}

// Returns the device's global timer in nanoseconds; it may advance in steps of up to a microsecond.
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(clock)::"memory");
  return clock;
}

__device__ __forceinline__ unsigned multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

}  // namespace timeline
