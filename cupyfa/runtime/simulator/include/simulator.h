#pragma once
// CUDA C++ for a host compiler: the declarations that a kernel needs to compile and run on the CPU.
//
// This header is compiled with every kernel, so it includes nothing: a standard header would take
// longer to compile than the kernel. runtime.cpp implements the functions declared here. The
// simulator's versions of the headers in ptx/ use namespace `simulator` in place of inline PTX.

typedef decltype(sizeof(0)) size_t;

// ---------------------------------------------------------------------------------------------
// Keywords

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define SIMULATOR_INLINED inline __attribute__((always_inline))
// For the ladder's kernels these functions need not be inlined: inlining would take half of the
// compile time. In other kernels they are inlined, because structs that are passed by value from
// memory are checked only in inlined calls.
#if defined(SIMULATOR_CALLS_FUNCTIONS)
#define __forceinline__ inline
#else
#define __forceinline__ SIMULATOR_INLINED
#endif
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// A worker runs one block at a time, so __shared__ variables can be thread-local. Each block starts
// with all bytes 0xff. Without __constinit gcc would add initialisation checks to some variables.
#if defined(__clang__)
#define __shared__ thread_local
#else
#define __shared__ __constinit thread_local
#endif

// ---------------------------------------------------------------------------------------------
// The runtime. `operation` is the function's name in the kernel; file and line locate the call.

namespace simulator {
struct Coordinates;
}

extern "C" {
const simulator::Coordinates* simulator_coordinates() __attribute__((const));
unsigned char* simulator_shared_memory() __attribute__((const));
size_t simulator_shared_bytes() __attribute__((const));
int simulator_lane() __attribute__((const));
unsigned simulator_lanes() __attribute__((const));
unsigned long simulator_shuffle(unsigned mask, unsigned long value, int source,
                                const char* operation, const char* file, int line);
unsigned simulator_ballot(unsigned mask, bool predicate, const char* operation, const char* file,
                          int line);
void simulator_warp_barrier(unsigned mask, const char* operation, const char* file, int line);
const void* simulator_gather(unsigned mask, const void* mine, size_t size, const char* operation,
                             const char* file, int line);
unsigned simulator_block_barrier(bool predicate, int which, const char* operation, const char* file,
                                 int line);
void simulator_named_barrier(int id, int threads, bool waits, const char* operation,
                             const char* file, int line);
void simulator_pause(bool again, const char* operation, const char* file, int line);
void simulator_fence();
void simulator_wait_for_launch_before();
void simulator_launch_dependents(const char* file, int line);
void simulator_publish(const void* object);
void simulator_observe(const void* object);
void simulator_check_read(const void* pointer, size_t bytes, const char* file, int line);
void simulator_check_write(const void* pointer, size_t bytes, const char* file, int line);
bool simulator_is_shared(const void* pointer);
unsigned long simulator_atomic_load(const void* pointer, size_t bytes);
void simulator_begin_copy(void* shared, const void* global, int bytes, const char* file, int line);
void simulator_commit_copies();
void simulator_wait_for_copies(unsigned pending);
bool simulator_compare_exchange(void* pointer, size_t bytes, unsigned long expected,
                                unsigned long desired);
void simulator_make_barrier(void* barrier, int arrivals, const char* file, int line);
void simulator_publish_barriers();
void simulator_arrive(void* barrier, int bytes, const char* operation, const char* file, int line);
void simulator_wait(void* barrier, int phase, const char* file, int line);
void simulator_load_box(void* shared, const void* map, void* barrier, const int* coordinates,
                        const char* file, int line);
void simulator_store_box(const void* map, const void* shared, const int* coordinates,
                         const char* file, int line);
void simulator_load_bytes(void* shared, const void* memory, int bytes, void* barrier,
                          const char* file, int line);
void simulator_add_floats(float* memory, const float* shared, int count, const char* file,
                          int line);
void simulator_commit_stores();
void simulator_end_stores(const char* file, int line);
void simulator_make_additions();
void simulator_fence_for_copies();
void simulator_fence_registers(const char* file, int line);
void simulator_multiply(float* d, const unsigned* registers, const void* a, const void* b, int rows,
                        int columns, int format, bool added, const char* file, int line);
void simulator_commit_products(const char* file, int line);
void simulator_wait_for_products(unsigned pending, const float* d, const char* file, int line);
int simulator_elected_lane();
void simulator_set_registers(int count, bool increases, const char* file, int line);
[[noreturn]] void simulator_fault(const char* text, const char* file, int line);

int printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// memcpy and memset are not instrumented by the compiler; the runtime checks their accesses.
void* memcpy(void* to, const void* from, size_t bytes) noexcept __asm__("simulator_memcpy");
void* memset(void* to, int value, size_t bytes) noexcept __asm__("simulator_memset");

double fabs(double) noexcept;
double sqrt(double) noexcept;
double exp(double) noexcept;
double exp2(double) noexcept;
double expm1(double) noexcept;
double log(double) noexcept;
double log2(double) noexcept;
double log10(double) noexcept;
double log1p(double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double tan(double) noexcept;
double tanh(double) noexcept;
double erf(double) noexcept;
double erfc(double) noexcept;
double pow(double, double) noexcept;
double fmod(double, double) noexcept;
double floor(double) noexcept;
double ceil(double) noexcept;
double trunc(double) noexcept;
double round(double) noexcept;
double rint(double) noexcept;
double fma(double, double, double) noexcept;
double fmin(double, double) noexcept;
double fmax(double, double) noexcept;
double copysign(double, double) noexcept;
double ldexp(double, int) noexcept;
float fabsf(float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float expm1f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log10f(float) noexcept;
float log1pf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float tanf(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float erfcf(float) noexcept;
float powf(float, float) noexcept;
float fmodf(float, float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float roundf(float) noexcept;
float rintf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float copysignf(float, float) noexcept;
float ldexpf(float, int) noexcept;
}

// ---------------------------------------------------------------------------------------------
// Vector types

struct alignas(2) char2 {
  signed char x, y;
};
struct alignas(4) char4 {
  signed char x, y, z, w;
};
struct alignas(2) uchar2 {
  unsigned char x, y;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(4) short2 {
  short x, y;
};
struct alignas(8) short4 {
  short x, y, z, w;
};
struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct int3 {
  int x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct float3 {
  float x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) {
  return {x, y, z, w};
}
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) {
  return {x, y, z, w};
}
inline short2 make_short2(short x, short y) {
  return {x, y};
}
inline ushort2 make_ushort2(unsigned short x, unsigned short y) {
  return {x, y};
}
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int3 make_int3(int x, int y, int z) {
  return {x, y, z};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) {
  return {x, y, z};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline longlong2 make_longlong2(long long x, long long y) {
  return {x, y};
}
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) {
  return {x, y};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float3 make_float3(float x, float y, float z) {
  return {x, y, z};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
  return {x, y};
}

// ---------------------------------------------------------------------------------------------
// Primitives for the simulator's headers in ptx/

namespace simulator {

struct Coordinates {
  uint3 thread;
  uint3 block;
  uint3 block_dim;
  uint3 grid_dim;
};

// The source location of a call in the kernel; a default argument captures the caller's location.
struct Here {
  const char* file;
  int line;
  constexpr Here(const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : file(file), line(line) {}
};

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) <= sizeof(From), "a bit cast takes its bytes from a value as large");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Returns the bytes of a small value, padded with zeros to one word.
template <class T>
inline unsigned long to_word(const T& value) {
  static_assert(sizeof(T) <= sizeof(unsigned long), "one value of a warp has at most 8 bytes");
  unsigned long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  return word;
}

inline int lane() {
  return simulator_lane();
}

// A barrier of the lanes in `mask`, the only warp collective that orders memory accesses.
inline void warp_barrier(unsigned mask, const char* operation, Here here = Here()) {
  simulator_warp_barrier(mask, operation, here.file, here.line);
}

// Gathers the values of the lanes in `mask`, indexed by lane. The result is valid until this lane's
// next collective.
template <class T>
inline const T* warp_gather(unsigned mask, const T& mine, const char* operation = "warp_gather",
                            Here here = Here()) {
  static_assert(sizeof(T) <= 128, "a lane brings at most 128 bytes");
  return static_cast<const T*>(
      simulator_gather(mask, &mine, sizeof mine, operation, here.file, here.line));
}

template <class T>
inline const T* warp_gather(const T& mine, const char* operation = "warp_gather",
                            Here here = Here()) {
  return warp_gather(0xffffffffu, mine, operation, here);
}

// Arrives at barrier `id` of the block, and waits there for `threads` threads if `waits`. Orders
// memory between all arriving threads and those that wait.
inline void barrier(int id, int threads, bool waits, const char* operation, Here here = Here()) {
  simulator_named_barrier(id, threads, waits, operation, here.file, here.line);
}

// Runs other threads of the block until one of them makes `condition()` true.
template <class Condition>
inline void wait_until(Condition condition, const char* operation, Here here = Here()) {
  for (bool again = false; !condition(); again = true) {
    simulator_pause(again, operation, here.file, here.line);
  }
}

// Orders this thread's earlier accesses before those of threads that later observe the object.
inline void publish(const void* object) {
  simulator_publish(object);
}
inline void observe(const void* object) {
  simulator_observe(object);
}

// Checks an access that the compiler does not instrument.
inline void check_read(const void* pointer, size_t bytes, Here here = Here()) {
  simulator_check_read(pointer, bytes, here.file, here.line);
}
inline void check_write(void* pointer, size_t bytes, Here here = Here()) {
  simulator_check_write(pointer, bytes, here.file, here.line);
}

inline bool is_shared(const void* pointer) {
  return simulator_is_shared(pointer);
}

[[noreturn]] inline void fault(const char* text, Here here = Here()) {
  simulator_fault(text, here.file, here.line);
}

// Atomically replaces *address by change(*address); returns the old value.
template <class T, class Change>
inline T atomic_update(T* address, Change change) {
  for (;;) {
    unsigned long old = simulator_atomic_load(address, sizeof(T));
    T value = bit_cast<T>(old);
    unsigned long desired = to_word(change(value));
    if (simulator_compare_exchange(address, sizeof(T), old, desired)) return value;
  }
}

template <int... I>
struct Indices {};
template <int count, int... I>
struct CountTo : CountTo<count - 1, count - 1, I...> {};
template <int... I>
struct CountTo<0, I...> {
  using type = Indices<I...>;
};

template <class... A, int... I>
inline void call_with(void (*kernel)(A...), void** arguments, Indices<I...>) {
  (void)arguments;
  kernel(*static_cast<A*>(arguments[I])...);
}

// Calls a kernel with the arguments that `arguments` points to.
template <class... A>
inline void call(void (*kernel)(A...), void** arguments) {
  call_with(kernel, arguments, typename CountTo<sizeof...(A)>::type());
}

struct ArgumentSizes {
  size_t count;
  size_t bytes[64];
};

template <class... A>
constexpr ArgumentSizes argument_sizes(void (*)(A...)) {
  static_assert(sizeof...(A) <= 64, "a kernel takes at most 64 arguments");
  return {sizeof...(A), {sizeof(A)...}};
}

}  // namespace simulator

#define threadIdx (simulator_coordinates()->thread)
#define blockIdx (simulator_coordinates()->block)
#define blockDim (simulator_coordinates()->block_dim)
#define gridDim (simulator_coordinates()->grid_dim)
constexpr int warpSize = 32;

#define assert(condition) \
  ((condition) ? (void)0 : simulator::fault("assertion failed: " #condition))

// ---------------------------------------------------------------------------------------------
// Barriers and fences

inline void __syncthreads(simulator::Here here = {}) {
  simulator_block_barrier(false, 0, "__syncthreads", here.file, here.line);
}
inline int __syncthreads_count(int predicate, simulator::Here here = {}) {
  return static_cast<int>(
      simulator_block_barrier(predicate != 0, 0, "__syncthreads_count", here.file, here.line));
}
inline int __syncthreads_or(int predicate, simulator::Here here = {}) {
  return static_cast<int>(
      simulator_block_barrier(predicate != 0, 1, "__syncthreads_or", here.file, here.line));
}
inline int __syncthreads_and(int predicate, simulator::Here here = {}) {
  return static_cast<int>(
      simulator_block_barrier(predicate != 0, 2, "__syncthreads_and", here.file, here.line));
}
inline void __syncwarp(unsigned mask = 0xffffffffu, simulator::Here here = {}) {
  simulator::warp_barrier(mask, "__syncwarp", here);
}
// A worker runs one thread at a time, so no fence is needed within it. Other workers see its stores
// at the latest when the grid ends.
inline void __threadfence() {
  simulator_fence();
}
inline void __threadfence_block() {
  simulator_fence();
}
inline void __threadfence_system() {
  simulator_fence();
}

// ---------------------------------------------------------------------------------------------
// Warp shuffles and votes

namespace simulator {

// Returns the value of lane `source` if `inside` (the source is in this lane's segment), else this
// lane's own value.
template <class T>
inline T shuffle(unsigned mask, const T& value, int source, bool inside, const char* operation,
                 Here here) {
  int from = inside ? source : lane();
  unsigned long word =
      simulator_shuffle(mask, to_word(value), from, operation, here.file, here.line);
  return bit_cast<T>(word);
}

}  // namespace simulator

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     simulator::Here here = {}) {
  int start = simulator::lane() & ~(width - 1);
  int from = start + (source & (width - 1));
  return simulator::shuffle(mask, value, from, true, "__shfl_sync", here);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                        simulator::Here here = {}) {
  int start = simulator::lane() & ~(width - 1);
  int from = simulator::lane() - static_cast<int>(distance);
  return simulator::shuffle(mask, value, from, from >= start, "__shfl_up_sync", here);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                          simulator::Here here = {}) {
  int end = (simulator::lane() & ~(width - 1)) + width;
  int from = simulator::lane() + static_cast<int>(distance);
  return simulator::shuffle(mask, value, from, from < end, "__shfl_down_sync", here);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         simulator::Here here = {}) {
  int end = (simulator::lane() & ~(width - 1)) + width;
  int from = simulator::lane() ^ lane_mask;
  return simulator::shuffle(mask, value, from, from < end, "__shfl_xor_sync", here);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, simulator::Here here = {}) {
  return simulator_ballot(mask, predicate != 0, "__ballot_sync", here.file, here.line);
}
inline int __any_sync(unsigned mask, int predicate, simulator::Here here = {}) {
  return simulator_ballot(mask, predicate != 0, "__any_sync", here.file, here.line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simulator::Here here = {}) {
  return simulator_ballot(mask, predicate == 0, "__all_sync", here.file, here.line) == 0;
}
// Treats every existing lane as active.
inline unsigned __activemask() {
  return simulator_lanes();
}

namespace simulator {

template <class T, class Combine>
inline T warp_reduce(unsigned mask, T value, Combine combine, const char* operation, Here here) {
  const T* all = warp_gather(mask, value, operation, here);
  for (int other = 0; other < 32; ++other) {
    if (other != lane() && ((mask & simulator_lanes()) >> other & 1) != 0) {
      value = combine(value, all[other]);
    }
  }
  return value;
}

}  // namespace simulator

inline int __reduce_add_sync(unsigned mask, int value, simulator::Here here = {}) {
  auto add = [](int a, int b) { return static_cast<int>(unsigned(a) + unsigned(b)); };
  return simulator::warp_reduce(mask, value, add, "__reduce_add_sync", here);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, simulator::Here here = {}) {
  auto add = [](unsigned a, unsigned b) { return a + b; };
  return simulator::warp_reduce(mask, value, add, "__reduce_add_sync", here);
}
inline int __reduce_max_sync(unsigned mask, int value, simulator::Here here = {}) {
  auto larger = [](int a, int b) { return a > b ? a : b; };
  return simulator::warp_reduce(mask, value, larger, "__reduce_max_sync", here);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, simulator::Here here = {}) {
  auto larger = [](unsigned a, unsigned b) { return a > b ? a : b; };
  return simulator::warp_reduce(mask, value, larger, "__reduce_max_sync", here);
}
inline int __reduce_min_sync(unsigned mask, int value, simulator::Here here = {}) {
  auto smaller = [](int a, int b) { return a < b ? a : b; };
  return simulator::warp_reduce(mask, value, smaller, "__reduce_min_sync", here);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, simulator::Here here = {}) {
  auto smaller = [](unsigned a, unsigned b) { return a < b ? a : b; };
  return simulator::warp_reduce(mask, value, smaller, "__reduce_min_sync", here);
}

// ---------------------------------------------------------------------------------------------
// Atomics. As in CUDA, the second argument is converted to the type of the first.

namespace simulator {
template <class T>
struct Same {
  using type = T;
};
template <class T>
using as = typename Same<T>::type;
}  // namespace simulator

template <class T>
inline T atomicAdd(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return T(old + value); });
}
template <class T>
inline T atomicSub(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return T(old - value); });
}
template <class T>
inline T atomicMax(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicAnd(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return T(old & value); });
}
template <class T>
inline T atomicOr(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return T(old | value); });
}
template <class T>
inline T atomicXor(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return T(old ^ value); });
}
template <class T>
inline T atomicExch(T* address, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T) { return value; });
}
template <class T>
inline T atomicCAS(T* address, simulator::as<T> expected, simulator::as<T> value) {
  return simulator::atomic_update(address, [&](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  auto next = [&](unsigned old) { return old >= limit ? 0 : old + 1; };
  return simulator::atomic_update(address, next);
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  auto next = [&](unsigned old) { return old == 0 || old > limit ? limit : old - 1; };
  return simulator::atomic_update(address, next);
}

// ---------------------------------------------------------------------------------------------
// Arithmetic

// As in C++, the common type of two arguments is the type of a + b.
template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
// If one operand is NaN, returns the other, as on a device.
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}
inline double min(float a, double b) {
  return fmin(a, b);
}
inline double min(double a, float b) {
  return fmin(a, b);
}
inline double max(float a, double b) {
  return fmax(a, b);
}
inline double max(double a, float b) {
  return fmax(a, b);
}

inline constexpr int abs(int x) {
  return x < 0 ? -x : x;
}
inline constexpr long long abs(long long x) {
  return x < 0 ? -x : x;
}
inline float abs(float x) {
  return fabsf(x);
}
inline double abs(double x) {
  return fabs(x);
}
inline float fabs(float x) {
  return fabsf(x);
}
inline float sqrt(float x) {
  return sqrtf(x);
}
inline float exp(float x) {
  return expf(x);
}
inline float exp2(float x) {
  return exp2f(x);
}
inline float expm1(float x) {
  return expm1f(x);
}
inline float log(float x) {
  return logf(x);
}
inline float log2(float x) {
  return log2f(x);
}
inline float log10(float x) {
  return log10f(x);
}
inline float log1p(float x) {
  return log1pf(x);
}
inline float sin(float x) {
  return sinf(x);
}
inline float cos(float x) {
  return cosf(x);
}
inline float tan(float x) {
  return tanf(x);
}
inline float tanh(float x) {
  return tanhf(x);
}
inline float erf(float x) {
  return erff(x);
}
inline float erfc(float x) {
  return erfcf(x);
}
inline float pow(float x, float y) {
  return powf(x, y);
}
inline float fmod(float x, float y) {
  return fmodf(x, y);
}
inline float floor(float x) {
  return floorf(x);
}
inline float ceil(float x) {
  return ceilf(x);
}
inline float trunc(float x) {
  return truncf(x);
}
inline float round(float x) {
  return roundf(x);
}
inline float rint(float x) {
  return rintf(x);
}
inline float fma(float x, float y, float z) {
  return fmaf(x, y, z);
}
inline float fmin(float x, float y) {
  return fminf(x, y);
}
inline float fmax(float x, float y) {
  return fmaxf(x, y);
}
inline double fmin(float x, double y) {
  return fmin(static_cast<double>(x), y);
}
inline double fmin(double x, float y) {
  return fmin(x, static_cast<double>(y));
}
inline double fmax(float x, double y) {
  return fmax(static_cast<double>(x), y);
}
inline double fmax(double x, float y) {
  return fmax(x, static_cast<double>(y));
}
inline float copysign(float x, float y) {
  return copysignf(x, y);
}
inline float ldexp(float x, int power) {
  return ldexpf(x, power);
}

inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
inline double rsqrt(double x) {
  return 1.0 / sqrt(x);
}
inline float rsqrt(float x) {
  return rsqrtf(x);
}
inline float exp10f(float x) {
  return powf(10.0f, x);
}
inline double exp10(double x) {
  return pow(10.0, x);
}

inline float __expf(float x) {
  return expf(x);
}
inline float __exp10f(float x) {
  return exp10f(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float __log10f(float x) {
  return log10f(x);
}
inline float __sinf(float x) {
  return sinf(x);
}
inline float __cosf(float x) {
  return cosf(x);
}
inline float __powf(float x, float y) {
  return powf(x, y);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return sqrtf(x);
}
inline float __frsqrt_rn(float x) {
  return rsqrtf(x);
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fmaf_rn(float x, float y, float z) {
  return fmaf(x, y, z);
}
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}

inline bool isnan(float x) {
  return __builtin_isnan(x);
}
inline bool isnan(double x) {
  return __builtin_isnan(x);
}
inline bool isinf(float x) {
  return __builtin_isinf(x) != 0;
}
inline bool isinf(double x) {
  return __builtin_isinf(x) != 0;
}
inline bool isfinite(float x) {
  return __builtin_isfinite(x);
}
inline bool isfinite(double x) {
  return __builtin_isfinite(x);
}
inline bool signbit(float x) {
  return __builtin_signbit(x) != 0;
}
inline bool signbit(double x) {
  return __builtin_signbit(x) != 0;
}

inline float __int_as_float(int x) {
  return simulator::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return simulator::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return simulator::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return simulator::bit_cast<unsigned>(x);
}
inline double __longlong_as_double(long long x) {
  return simulator::bit_cast<double>(x);
}
inline long long __double_as_longlong(double x) {
  return simulator::bit_cast<long long>(x);
}
inline int __double2hiint(double x) {
  return int(__double_as_longlong(x) >> 32);
}
inline int __double2loint(double x) {
  return int(__double_as_longlong(x));
}
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | unsigned(low));
}
inline int __float2int_rn(float x) {
  return static_cast<int>(rintf(x));
}
inline int __float2int_rd(float x) {
  return static_cast<int>(floorf(x));
}
inline int __float2int_ru(float x) {
  return static_cast<int>(ceilf(x));
}
inline int __float2int_rz(float x) {
  return static_cast<int>(x);
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1) << (31 - bit);
  return result;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline int __mulhi(int x, int y) {
  return static_cast<int>(static_cast<long long>(x) * y >> 32);
}

template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, simulator::as<T> value) {
  *address = value;
}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<size_t>(static_cast<const unsigned char*>(pointer) -
                             simulator_shared_memory());
}
