#pragma once
// Clocks, and where a block runs, for `cupyfa timeline`. PTX: %clock64, %globaltimer, %smid.

namespace timeline {

// Cycles of this multiprocessor.
__device__ __forceinline__ unsigned long long cycles() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  return clock;
}

// Returns cycles() once the load of a value has completed. The value must not be all ones.
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

// Nanoseconds of the device; they may advance by up to a microsecond at a time.
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
