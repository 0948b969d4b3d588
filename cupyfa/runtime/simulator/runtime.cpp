// The runtime of simulated kernels: threads, barriers, warps, and a check of every memory access.
//
// Each CUDA thread is a fiber with a separate stack. An OS thread ("worker") runs the fibers of one
// block at a time until all have returned, and several workers share the blocks of a grid. Fibers
// switch only inside collectives (barriers, shuffles, waits), so the execution of a block depends
// only on the kernel, its inputs and the schedule, never on the number of workers.
//
// Kernels are compiled with the compiler's thread and bounds instrumentation, but linked without a
// sanitizer: this file defines the functions that are called before each load and store
// (`__tsan_read4`, ...). They check that a kernel accesses only its buffers, its stack and the
// block's shared memory. For every two bytes of shared memory, and for arrays that the launch may
// write, they also record which threads wrote and read them and when, as vector clocks with one
// component per warp. Two accesses that no barrier orders are a race. Only atomics order two
// blocks. Shuffles and votes are not barriers: in CUDA only __syncwarp orders memory.
// asynchronous.h simulates asynchronous copies and tensor cores, with separate components.
//
// Both files are compiled once, for all kernels. They use only header parts of the C++ library,
// because building the library with zig would take most of a minute.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define COLD __attribute__((noinline, cold))
#define CALLER __builtin_return_address(0)

namespace {

constexpr int warp_size = 32;
constexpr int max_warps = 32;
constexpr int max_threads = warp_size * max_warps;
constexpr int barrier_count = 16;
constexpr std::size_t max_value_bytes = 128;  // largest value per lane in a collective
constexpr std::size_t report_bytes = 2048;
constexpr int max_workers = 256;

// ---------------------------------------------------------------------------------------------
// Arguments and results of calls from Python; machine.py declares matching structures.

struct Region {
  const char* name;
  std::uintptr_t address;
  std::size_t bytes;
  int itemsize = 1;  // bytes per element
  int constant = 0;  // true if the kernel may only read the region
  int awaited = 0;   // true if an earlier launch may access the region while this launch runs
  int kept = 0;      // true if the next launch reads the region without waiting for this launch
};

struct Request {
  void (*entry)(void** arguments);
  // Returns the end of the kernel's __shared__ variables and the address of its `extern __shared__`
  // arrays; nullptr if it has none.
  void (*locate)(std::uintptr_t* places);
  void* const* arguments;
  const std::size_t* argument_bytes;
  std::size_t argument_count;
  unsigned grid[3];
  unsigned block[3];
  std::size_t shared_bytes;
  const Region* regions;
  std::size_t region_count;
  int workers;
  int shuffled;     // true if `seed` determines the order of threads
  int stopped;      // set by another thread to stop all blocks
  int early;        // true if the launch may start before the previous one has ended
  int waits_first;  // true if threads must wait before launch_dependents()
  int one_waits;    // true if one block's wait for the previous launch is enough
  std::uint64_t seed;
};

// A reported fault. Places have the form {address in the object;file:line}, which Python makes
// readable; the fault's place precedes the places of the enclosing calls.
struct Report {
  char text[report_bytes];
  char place[report_bytes];
  unsigned block[3];
  unsigned thread[3];
};

// ---------------------------------------------------------------------------------------------
// Vector clocks

// A point in time: a thread, and the clock of its warp.
using Epoch = std::uint64_t;
using Clock = std::uint64_t;
constexpr int clock_shift = 12;

// A vector clock has one component per warp and per kind of asynchronous operation: the products of
// each warpgroup, all box stores, all copies, and the box loads of each mbarrier. Components of
// asynchronous operations are numbered after those of warps. An epoch represents such a component
// by a thread index as well: that of lane 0 of a warp with the component's number.
constexpr int max_phase_barriers = 64;
constexpr int products_component = max_warps;
constexpr int stores_component = products_component + max_warps / 4;
constexpr int copies_component = stores_component + 1;
constexpr int boxes_component = copies_component + 1;
constexpr int max_components = boxes_component + max_phase_barriers;
static_assert(max_components * warp_size <= 1 << clock_shift, "an epoch names any of them");

inline int thread_of(Epoch epoch) {
  return static_cast<int>(epoch % (1 << clock_shift));
}
inline Clock clock_of(Epoch epoch) {
  return epoch >> clock_shift;
}
inline Epoch epoch_of(Clock clock, int component) {
  return clock << clock_shift | static_cast<Epoch>(component * warp_size);
}

// The clock of operations in flight: later than every clock that a thread has seen.
constexpr Clock unfinished = ~Clock{0} >> clock_shift;

// ---------------------------------------------------------------------------------------------
// Formatting and locks

struct Text {
  char chars[report_bytes];
};

Text format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
Text format(const char* pattern, ...) {
  Text text;
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text.chars, sizeof text.chars, pattern, arguments);
  va_end(arguments);
  return text;
}

class Guard {
 public:
  explicit Guard(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Guard() { pthread_mutex_unlock(&mutex_); }
  Guard(const Guard&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

// ---------------------------------------------------------------------------------------------
// Fibers

// Saves the callee-saved registers and the stack pointer in *from, and continues on `to`.
extern "C" __attribute__((visibility("hidden"))) void switch_stack(void** from, void* to) asm(
    "cupyfa_switch_stack");

#if defined(__x86_64__)
// Fibers mostly wait in the same calls, so the processor predicts this return and those of the
// enclosing calls as if the stack had not changed.
asm(R"(
  .text
  .globl cupyfa_switch_stack
  .hidden cupyfa_switch_stack
  .p2align 4
cupyfa_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int saved_words = 7;
constexpr int entry_word = 6;
constexpr int frame_word = 5;
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl cupyfa_switch_stack
  .hidden cupyfa_switch_stack
  .p2align 4
cupyfa_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int saved_words = 20;
constexpr int entry_word = 11;
constexpr int frame_word = 10;
#else
#error "the simulator switches stacks on x86-64 and aarch64 only"
#endif

// threadIdx, blockIdx, blockDim and gridDim of a kernel; simulator.h declares a matching structure.
struct Coordinates {
  unsigned thread[3];
  unsigned block[3];
  unsigned block_dim[3];
  unsigned grid_dim[3];
};

// A place in the kernel, as file and line, as code address, or as both.
struct Place {
  const char* file = nullptr;
  int line = 0;
  const void* pc = nullptr;
};

inline Place at(const void* pc) {
  return {nullptr, 0, pc};
}

struct Copy;
struct Exchange;
struct Store;
struct Addition;
struct Asynchronous;

struct Fiber {
  void* stack_pointer;
  std::uintptr_t stack_low;
  Coordinates* coordinates;  // at the top of the stack, readable by the kernel
  int index;
  int warp;
  int lane;
  bool finished;
  const char* operation;  // the collective in which the thread waits, or nullptr
  Place place;            // place of that collective
  int barrier;            // number of the block barrier, or -1
  Exchange* exchange;     // the last warp collective
  int awaited;            // index of the mbarrier for which the thread waits, or -1
  int phase;              // phase of that mbarrier
  Copy* copies;           // copies in flight, oldest first
  Copy** copies_end;
  std::uint64_t copy_groups;
  Clock published;          // clock of the last proxy fence
  Clock fenced[max_warps];  // clocks of other warps that the thread had seen at that fence
  Store* stores;            // stores that have not read shared memory yet, oldest first
  Addition* additions;      // delayed additions that have read shared memory
  // Number of products begun, committed and waited for, and number of committed groups.
  std::uint64_t products;
  std::uint64_t grouped;
  std::uint64_t finished_products;
  std::uint64_t groups;
  // Clocks of asynchronous operations that this thread has seen but its whole warp has not: the
  // threads of a warp wait for copies and products separately.
  Clock known[max_components - max_warps];
  bool begun;   // true after wgmma_fence, until the next wait
  bool waited;  // true if the thread has waited for the previous launch
  int register_calls;
  // Address range of the registers that products in flight will write.
  std::uintptr_t awaited_low;
  std::uintptr_t awaited_end;
};

// ---------------------------------------------------------------------------------------------
// Stacks: one slab per warp, reused by later launches

constexpr std::size_t page = 4096;
// Not a power of two, so that equal offsets in neighbouring stacks map to different cache sets.
constexpr std::size_t stack_bytes = 65 * page;
constexpr std::size_t slab_bytes = stack_bytes * warp_size;

// Free list: a free slab's second page points to the next free slab; the first page is a guard.
char* free_slabs = nullptr;
pthread_mutex_t slab_mutex = PTHREAD_MUTEX_INITIALIZER;

char*& next_slab(char* slab) {
  return *reinterpret_cast<char**>(slab + page);
}

char* map_slab() {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* slab = mmap(nullptr, slab_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (slab == MAP_FAILED) return nullptr;
  for (int i = 0; i < warp_size; ++i) {
    // Fails if the system is out of mappings; the stacks then work without guard pages.
    (void)mprotect(static_cast<char*>(slab) + i * stack_bytes, page, PROT_NONE);
  }
  return static_cast<char*>(slab);
}

char* take_slab() {
  {
    Guard guard(slab_mutex);
    if (char* slab = free_slabs) {
      free_slabs = next_slab(slab);
      return slab;
    }
  }
  return map_slab();
}

void give_slab(char* slab) {
  Guard guard(slab_mutex);
  next_slab(slab) = free_slabs;
  free_slabs = slab;
}

// ---------------------------------------------------------------------------------------------
// The shadow of shared memory

// The shadow of two bytes of shared memory: the last write, the last atomic, and the last reads by
// two different threads. A write clears all other records, because an access that races with
// them also races with the write. An atomic clears nothing, because atomics do not race.
struct Cell {
  Epoch writer;
  Epoch updater;
  Epoch readers[2];
};
constexpr std::size_t cell_bytes = 2;

struct Arena {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Cell* cells = nullptr;
  const char* name = "";

  bool allocate_cells() {
    cells = static_cast<Cell*>(std::calloc(bytes / cell_bytes + 2, sizeof(Cell)));
    return cells != nullptr;
  }
};

// The shadow of an array in global memory: the fields of a Cell for each element of 1, 2, 4 or 8
// bytes. Writers are a separate array, because few arrays are both read and written in one launch.
// All workers share the shadow, so its epochs include the worker's number. They write it without
// locks: if two blocks race, one of them may miss the race.
constexpr int number_shift = 54;
constexpr Epoch without_number = (Epoch{1} << number_shift) - 1;

struct Readers {
  Epoch updater;
  Epoch last[2];
};

struct Shadow {
  int shift;  // log2 of the bytes per element
  Epoch* writers;
  Readers* readers;  // nullptr for an array that the kernel only reads
  bool is_read;      // true once a read or an atomic was recorded
};

// A block that a worker started, with the worker's clock at that time.
struct Began {
  Began* next;
  std::uint64_t number;  // number of the worker
  Clock floor;
  std::uint64_t block;
};

// The values that the lanes of a warp pass to a collective. Freed once all lanes have continued.
struct Exchange {
  unsigned mask;
  unsigned arrived;
  unsigned votes;  // lanes whose predicate is true
  int readers;
  bool orders;  // true if the collective orders memory between the lanes
  std::size_t size;
  const char* operation;
  Exchange* next;       // next in the free list
  Exchange* next_made;  // next in the list of all exchanges
  alignas(64) unsigned char values[warp_size * max_value_bytes];
};

struct Warp {
  Clock clock;
  Clock seen[max_components];  // the last clock seen of each component
  unsigned lanes;              // existing lanes
  unsigned ready;              // lanes that can run
  unsigned polling;            // lanes that poll a condition
  int open_count;
  Exchange* open[warp_size];  // collectives that some lanes have yet to reach

  void tick(int self) { seen[self] = clock++; }
};

struct Barrier {
  int expected;
  int arrived;
  const char* operation;
  unsigned warps;               // warps with a waiting thread
  unsigned waiting[max_warps];  // waiting lanes per warp
  Place places[max_warps];      // where each warp's first lane waits
  bool has_past;                // true if `past` is in use
  Clock past[max_components];
  unsigned count, any, all;  // results of __syncthreads_count, _or, _and so far
  unsigned result[3];        // final results of the previous round
};

// The clocks that a thread had seen when it published an object.
struct Past {
  Past* next;
  const void* object;
  Clock seen[max_components];
};

// ---------------------------------------------------------------------------------------------
// Launches and workers

inline bool inside(const Region& region, std::uintptr_t address, std::size_t bytes) {
  std::size_t offset = address - region.address;
  return offset < region.bytes && bytes <= region.bytes - offset;
}

struct RegionList {
  static constexpr int capacity = 16;
  Region regions[capacity];
  int count = 0;

  void add(const Region& region) {
    if (count < capacity) regions[count++] = region;
  }
  bool contain(std::uintptr_t address, std::size_t bytes) const {
    for (int i = 0; i < count; ++i) {
      if (inside(regions[i], address, bytes)) return true;
    }
    return false;
  }
};

struct Module {
  std::uintptr_t base = 0;
  RegionList readable;
  RegionList writable;
  std::size_t tls_module = 0;
  std::size_t tls_bytes = 0;
};

struct Launch {
  const Request* request;
  Module module;
  std::uint64_t blocks;
  int threads;
  std::atomic<std::uint64_t> next_block{0};
  // The lowest block with a fault. Later blocks are abandoned; earlier blocks continue, so that the
  // reported fault does not depend on the speed of workers, unless two blocks race.
  std::atomic<std::uint64_t> faulty_block{UINT64_MAX};
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  Report* report;
  Shadow* shadows = nullptr;  // one per region of the request
  Began* begun = nullptr;
  std::atomic<std::uint64_t> next_number{1};
  std::atomic<std::uint64_t> unwaited{0};  // blocks that did not wait for the previous launch

  // Maps memory that is committed on first access. Returns nullptr on failure; races that this
  // memory would record are then not detected.
  template <class T>
  static T* map(std::size_t count) {
    void* room = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return room == MAP_FAILED ? nullptr : static_cast<T*>(room);
  }
  template <class T>
  static void unmap(T* room, std::size_t count) {
    if (room != nullptr) munmap(room, count * sizeof(T));
  }

  void allocate_shadows() {
    shadows = static_cast<Shadow*>(std::calloc(request->region_count + 1, sizeof(Shadow)));
    for (std::size_t i = 0; shadows != nullptr && i < request->region_count; ++i) {
      const Region& region = request->regions[i];
      Shadow& shadow = shadows[i];
      const int size = region.itemsize;
      shadow.shift = size >= 8 ? 3 : size >= 4 ? 2 : size >= 2 ? 1 : 0;
      shadow.writers = map<Epoch>(region.bytes >> shadow.shift);
      if (!region.constant) shadow.readers = map<Readers>(region.bytes >> shadow.shift);
    }
  }
  void free_shadows() {
    for (std::size_t i = 0; shadows != nullptr && i < request->region_count; ++i) {
      std::size_t count = request->regions[i].bytes >> shadows[i].shift;
      unmap(shadows[i].writers, count);
      unmap(shadows[i].readers, count);
    }
    std::free(shadows);
  }
};

struct Worker {
  // Members that every access check reads.
  std::uintptr_t stack_low = 0;
  std::uintptr_t awaited_low = 0;  // copied from the running fiber
  std::uintptr_t awaited_end = 0;
  Region hit{};  // the buffer accessed last
  Shadow* hit_shadow = nullptr;
  bool hit_is_tracked = false;  // true if reads of that buffer are recorded
  Arena dynamic;
  Arena fixed;
  Fiber* fiber = nullptr;
  Warp* warp = nullptr;
  Clock floor = 0;  // accesses up to this clock belong to earlier blocks

  Launch* launch = nullptr;
  void* main_stack_pointer = nullptr;
  std::uint64_t block = 0;
  int threads = 0;
  int warp_count = 0;
  int finished = 0;
  int idle_polls = 0;  // polls since a thread last made progress
  bool abandoned = false;
  bool shuffled = false;
  // True if the block has executed, respectively: an atomic in global memory, which may order
  // blocks; a fence; an atomic after a fence, which may order threads of the block.
  bool speaks = false;
  bool fenced = false;
  bool signals = false;
  std::uint64_t number = 0;  // number of this worker, from 1
  Epoch block_start = 0;     // first epoch of the block, with the worker's number
  unsigned late_warps = 0;   // with shuffled order, warps that run only if no other warp can
  std::uint64_t random = 0;
  unsigned ready_warps = 0;
  void** arguments = nullptr;
  Region argument_block{};
  char* slabs[max_warps] = {};
  void* allocated = nullptr;  // dynamic shared memory, unless the kernel's object provides it
  Exchange* free_exchanges = nullptr;
  Exchange* made_exchanges = nullptr;
  Past* pasts = nullptr;
  Copy* unused_copies = nullptr;
  int components = 0;  // used components of vector clocks
  Asynchronous* asynchronous = nullptr;
  Warp warps[max_warps];
  Barrier barriers[barrier_count];
  Fiber fibers[max_threads];
};

__attribute__((tls_model("initial-exec"))) thread_local Worker* self = nullptr;

// ---------------------------------------------------------------------------------------------
// Faults

void thread_coordinates(const Worker& worker, int index, unsigned (&out)[3]) {
  const unsigned* dim = worker.launch->request->block;
  out[0] = index % dim[0];
  out[1] = index / dim[0] % dim[1];
  out[2] = index / dim[0] / dim[1];
}

void block_coordinates(const Worker& worker, std::uint64_t block, unsigned (&out)[3]) {
  const unsigned* dim = worker.launch->request->grid;
  out[0] = static_cast<unsigned>(block % dim[0]);
  out[1] = static_cast<unsigned>(block / dim[0] % dim[1]);
  out[2] = static_cast<unsigned>(block / dim[0] / dim[1]);
}

Text thread_name(const Worker& worker, int index) {
  unsigned at[3];
  thread_coordinates(worker, index, at);
  return format("thread (%u, %u, %u)", at[0], at[1], at[2]);
}

Text place_name(const Worker& worker, const Place& place) {
  // The return address may lie on the next line; the byte before it belongs to the call.
  std::uintptr_t pc = reinterpret_cast<std::uintptr_t>(place.pc);
  std::uintptr_t offset = pc == 0 ? 0 : pc - worker.launch->module.base - 1;
  return format("{%lx;%s:%d}", static_cast<unsigned long>(offset), place.file ? place.file : "",
                place.line);
}

void append_text(Text& text, const char* more) {
  std::size_t length = std::strlen(text.chars);
  std::snprintf(text.chars + length, sizeof text.chars - length, "%s", more);
}

// Formats a place and the kernel's calls that enclose it, from this stack frame outwards. Omits the
// calls if the place is not on the stack, because its operation began earlier.
Text places_name(const Worker& worker, const Place& place, const Fiber& fiber, const void* frame) {
  Text text = place_name(worker, place);
  bool is_first = true;
  auto at = reinterpret_cast<std::uintptr_t>(frame);
  while (at - fiber.stack_low <= stack_bytes - 2 * sizeof(void*) && at % sizeof(void*) == 0) {
    void* const* words = reinterpret_cast<void* const*>(at);
    std::uintptr_t pc = reinterpret_cast<std::uintptr_t>(words[1]);
    std::uintptr_t outer = reinterpret_cast<std::uintptr_t>(words[0]);
    if (worker.launch->module.readable.contain(pc, 1)) {
      if (is_first && place.pc != nullptr && place.pc != words[1]) break;
      if (!is_first || place.pc == nullptr) {
        append_text(text, place_name(worker, {nullptr, 0, words[1]}).chars);
      }
      is_first = false;
    }
    if (outer <= at) break;
    at = outer;
  }
  return text;
}

void record(Worker& worker, int thread, const Place& place, const Text& text,
            const Fiber* fiber = nullptr, const void* frame = nullptr) {
  Launch& launch = *worker.launch;
  Guard guard(launch.mutex);
  if (worker.block >= launch.faulty_block.load()) return;
  launch.faulty_block.store(worker.block);
  Report& report = *launch.report;
  std::snprintf(report.text, sizeof report.text, "%s", text.chars);
  Text places =
      fiber == nullptr ? place_name(worker, place) : places_name(worker, place, *fiber, frame);
  std::snprintf(report.place, sizeof report.place, "%s", places.chars);
  block_coordinates(worker, worker.block, report.block);
  thread_coordinates(worker, thread, report.thread);
}

// Abandons the block's fibers and returns to the worker's main loop.
[[noreturn]] COLD void abandon(Worker& worker) {
  worker.abandoned = true;
  void* nowhere;
  switch_stack(&nowhere, worker.main_stack_pointer);
  __builtin_unreachable();
}

inline bool stopped(const Worker& worker) {
  return __atomic_load_n(&worker.launch->request->stopped, __ATOMIC_RELAXED) != 0;
}

[[noreturn]] COLD void fault(Worker& worker, const Place& place, const Text& text) {
  const Fiber& fiber = *worker.fiber;
  record(worker, fiber.index, place, text, &fiber, __builtin_frame_address(0));
  abandon(worker);
}

// ---------------------------------------------------------------------------------------------
// The schedule

std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Returns the first set bit at or after `start`, else the first set bit.
inline int bit_from(unsigned bits, int start) {
  unsigned later = bits & (~0u << start);
  return __builtin_ctz(later != 0 ? later : bits);
}

inline void make_ready(Worker& worker, int warp, unsigned lanes) {
  worker.warps[warp].ready |= lanes;
  worker.ready_warps |= lanes != 0 ? 1u << warp : 0;
}

void wake_polling(Worker& worker) {
  for (int warp = 0; warp < worker.warp_count; ++warp) {
    make_ready(worker, warp, worker.warps[warp].polling);
    worker.warps[warp].polling = 0;
  }
}

inline Fiber* take_ready(Worker& worker, int warp, int start) {
  Warp& from = worker.warps[warp];
  int lane = bit_from(from.ready, start);
  from.ready &= ~(1u << lane);
  if (from.ready == 0) worker.ready_warps &= ~(1u << warp);
  return &worker.fibers[warp * warp_size + lane];
}

// Chooses a block's late warps at random. The seed decides whether no warps, single warps or groups
// of four may be late. With random order alone, threads advance at a similar pace; late warps
// reveal missing barriers between threads that are far apart.
unsigned late_warps(std::uint64_t seed, std::uint64_t block) {
  std::uint64_t state = seed + (block << 32);
  const std::uint64_t random = next_random(state);
  if (seed % 3 == 2) return 0;
  if (seed % 3 == 0) return unsigned(random);
  unsigned late = 0;
  for (int warp = 0; warp < warp_size; warp += 4) late |= (random >> warp & 1) * (15u << warp);
  return late;
}

// Chooses the next thread to run: of the same warp while possible, then of the next warp, or at
// random with a seed. Returns nullptr if no thread can run.
inline Fiber* next_fiber(Worker& worker) {
  if (worker.ready_warps == 0) {
    wake_polling(worker);
    if (worker.ready_warps == 0) return nullptr;
  }
  if (worker.shuffled) {
    unsigned ready = worker.ready_warps & ~worker.late_warps;
    if (ready == 0 && worker.idle_polls == 0) {  // a polled condition may have become true
      wake_polling(worker);
      ready = worker.ready_warps & ~worker.late_warps;
    }
    std::uint64_t random = next_random(worker.random);
    int warp = bit_from(ready != 0 ? ready : worker.ready_warps, random % warp_size);
    return take_ready(worker, warp, random / warp_size % warp_size);
  }
  int warp = worker.fiber->warp;
  if (worker.warps[warp].ready != 0) return take_ready(worker, warp, worker.fiber->lane);
  return take_ready(worker, bit_from(worker.ready_warps, warp), 0);
}

inline void enter(Worker& worker, Fiber* fiber) {
  worker.fiber = fiber;
  worker.warp = &worker.warps[fiber->warp];
  worker.stack_low = fiber->stack_low;
  worker.awaited_low = fiber->awaited_low;
  worker.awaited_end = fiber->awaited_end;
}

// Runs other threads until this one is ready again.
inline void suspend(Worker& worker) {
  if (worker.launch->faulty_block.load(std::memory_order_relaxed) < worker.block) abandon(worker);
  if (stopped(worker)) abandon(worker);
  Fiber* from = worker.fiber;
  Fiber* to = next_fiber(worker);
  if (to == from) return;
  if (to == nullptr) {
    switch_stack(&from->stack_pointer, worker.main_stack_pointer);
    return;
  }
  enter(worker, to);
  switch_stack(&from->stack_pointer, to->stack_pointer);
}

inline void wait_in(Worker& worker, const char* operation, const Place& place) {
  worker.idle_polls = 0;
  Fiber* fiber = worker.fiber;
  fiber->operation = operation;
  fiber->place = place;
  suspend(worker);
  fiber->operation = nullptr;
}

// With a seed, schedules the thread that completed a collective like the threads that it woke.
inline void take_turn(Worker& worker) {
  worker.idle_polls = 0;
  if (!worker.shuffled) return;
  make_ready(worker, worker.fiber->warp, 1u << worker.fiber->lane);
  suspend(worker);
}

// ---------------------------------------------------------------------------------------------
// Warp collectives

Exchange* new_exchange(Worker& worker) {
  Exchange* exchange = worker.free_exchanges;
  if (exchange != nullptr) {
    worker.free_exchanges = exchange->next;
    return exchange;
  }
  exchange = static_cast<Exchange*>(aligned_alloc(alignof(Exchange), sizeof(Exchange)));
  exchange->next_made = worker.made_exchanges;
  worker.made_exchanges = exchange;
  return exchange;
}

void free_exchange(Worker& worker, Exchange* exchange) {
  exchange->next = worker.free_exchanges;
  worker.free_exchanges = exchange;
}

inline void let_go(Worker& worker, Fiber& fiber) {
  Exchange* exchange = fiber.exchange;
  if (exchange != nullptr && --exchange->readers == 0) free_exchange(worker, exchange);
  fiber.exchange = nullptr;
}

Exchange* open_exchange(Worker& worker, unsigned mask, std::size_t size, const char* operation) {
  Exchange* exchange = new_exchange(worker);
  exchange->mask = mask;
  exchange->arrived = 0;
  exchange->votes = 0;
  exchange->readers = __builtin_popcount(mask);
  exchange->orders = false;
  exchange->size = size;
  exchange->operation = operation;
  worker.warp->open[worker.warp->open_count++] = exchange;
  return exchange;
}

inline Exchange* find_exchange(Worker& worker, unsigned mask, std::size_t size,
                               const char* operation) {
  Warp& warp = *worker.warp;
  for (int i = 0; i < warp.open_count; ++i) {
    if (warp.open[i]->mask == mask) return warp.open[i];
  }
  return open_exchange(worker, mask, size, operation);
}

// Adds the clocks that this thread, but not its whole warp, has seen.
inline void add_known(const Worker& worker, const Fiber& fiber, Clock (&past)[max_components]) {
  for (int i = max_warps; i < worker.components; ++i) {
    past[i] = std::max(past[i], fiber.known[i - max_warps]);
  }
}

void order_lanes(Worker& worker, unsigned mask) {
  Warp& warp = *worker.warp;
  int index = worker.fiber->warp;
  for (int lane = 0; lane < warp_size; ++lane) {
    if ((mask >> lane & 1) != 0)
      add_known(worker, worker.fibers[index * warp_size + lane], warp.seen);
  }
  warp.tick(index);
}

inline void complete(Worker& worker, Exchange* exchange) {
  Warp& warp = *worker.warp;
  Fiber& fiber = *worker.fiber;
  int i = 0;
  while (warp.open[i] != exchange) ++i;
  warp.open[i] = warp.open[--warp.open_count];
  if (exchange->orders) order_lanes(worker, exchange->mask);
  make_ready(worker, fiber.warp, exchange->mask & ~(1u << fiber.lane));
}

COLD void check_mask(Worker& worker, unsigned mask, const char* operation, const Place& place) {
  if (mask >> worker.fiber->lane & 1) return;
  fault(worker, place,
        format("calls %s with mask 0x%08x, which omits its own lane %d", operation, mask,
               worker.fiber->lane));
}

COLD void check_same(Worker& worker, const Exchange& exchange, std::size_t size,
                     const char* operation, const Place& place) {
  if (exchange.operation == operation && exchange.size == size) return;
  Text bytes = format(" (of %zu and %zu bytes)", size, exchange.size);
  fault(worker, place,
        format("calls %s while other lanes of its warp wait in %s%s", operation, exchange.operation,
               exchange.size == size ? "" : bytes.chars));
}

// Waits until all lanes of the mask have passed their values, and returns all values.
inline Exchange* meet(unsigned mask, const void* value, std::size_t size, bool predicate,
                      bool orders, const char* operation, const Place& place) {
  Worker& worker = *self;
  Fiber& fiber = *worker.fiber;
  unsigned lane_bit = 1u << fiber.lane;
  let_go(worker, fiber);
  if ((mask & lane_bit) == 0) check_mask(worker, mask, operation, place);
  mask &= worker.warp->lanes;
  Exchange* exchange = find_exchange(worker, mask, size, operation);
  if (exchange->operation != operation || exchange->size != size) {
    check_same(worker, *exchange, size, operation, place);
  }
  if (size > 0) std::memcpy(exchange->values + fiber.lane * size, value, size);
  exchange->orders |= orders;
  exchange->votes |= predicate ? lane_bit : 0;
  exchange->arrived |= lane_bit;
  fiber.exchange = exchange;
  if (exchange->arrived == mask) {
    complete(worker, exchange);
    take_turn(worker);
  } else {
    fiber.barrier = -1;
    wait_in(worker, operation, place);
  }
  return exchange;
}

// ---------------------------------------------------------------------------------------------
// Block barriers

void join(Clock (&into)[max_components], const Clock (&from)[max_components], int count) {
  for (int i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}

// Orders memory: afterwards every waiting warp has seen what all waiting warps did before.
void join_clocks(Worker& worker, Barrier& barrier) {
  int count = worker.components;
  Clock joined[max_components] = {};
  if (barrier.has_past) join(joined, barrier.past, count);
  for (int w = 0; w < worker.warp_count; ++w) {
    if ((barrier.warps >> w & 1) == 0) continue;
    join(joined, worker.warps[w].seen, count);
    joined[w] = std::max(joined[w], worker.warps[w].clock);
  }
  for (int w = 0; w < worker.warp_count; ++w) {
    if ((barrier.warps >> w & 1) == 0) continue;
    join(worker.warps[w].seen, joined, count);
    worker.warps[w].tick(w);
  }
}

void release(Worker& worker, Barrier& barrier) {
  join_clocks(worker, barrier);
  for (int w = 0; w < worker.warp_count; ++w) {
    if ((barrier.warps >> w & 1) == 0) continue;
    unsigned lanes = barrier.waiting[w];
    barrier.waiting[w] = 0;
    if (w == worker.fiber->warp) lanes &= ~(1u << worker.fiber->lane);
    make_ready(worker, w, lanes);
  }
  barrier.result[0] = barrier.count;
  barrier.result[1] = barrier.any;
  barrier.result[2] = barrier.all;
  barrier.arrived = 0;
  barrier.warps = 0;
  barrier.has_past = false;
}

void first_arrival(Barrier& barrier, int expected, const char* operation) {
  barrier.expected = expected;
  barrier.operation = operation;
  barrier.count = 0;
  barrier.any = 0;
  barrier.all = 1;
  barrier.has_past = false;
}

COLD void check_barrier(Worker& worker, int id, int threads, const char* operation,
                        const Place& place) {
  if (id < 0 || id >= barrier_count) {
    fault(worker, place,
          format("calls %s on barrier %d; a block has barriers 0 to %d", operation, id,
                 barrier_count - 1));
  }
  int rounded = worker.warp_count * warp_size;
  bool whole = threads == worker.threads;
  if (!whole && (threads <= 0 || threads % warp_size != 0 || threads > rounded)) {
    fault(worker, place,
          format("calls %s for %d threads; a barrier counts whole warps of this block's %d threads",
                 operation, threads, worker.threads));
  }
}

COLD void check_round(Worker& worker, int id, int threads, const char* operation,
                      const Place& place) {
  const Barrier& barrier = worker.barriers[id];
  if (barrier.expected == threads) return;
  fault(worker, place,
        format("calls %s on barrier %d for %d threads, where others wait for %d threads (%s)",
               operation, id, threads, barrier.expected, barrier.operation));
}

COLD void check_divergence(Worker& worker, const Barrier& barrier, const Place& place) {
  const Place& other = barrier.places[worker.fiber->warp];
  if (std::strcmp(other.file, place.file) == 0 && other.line == place.line) return;
  fault(worker, place,
        format("calls %s while other lanes of its warp wait in the call at %s; "
               "all threads must reach the same barrier",
               barrier.operation, place_name(worker, other).chars));
}

COLD void check_operation(Worker& worker, const Barrier& barrier, const char* operation,
                          const Place& place) {
  fault(
      worker, place,
      format("calls %s while other threads of its block wait in %s", operation, barrier.operation));
}

void add_past(Worker& worker, Clock (&past)[max_components]) {
  Fiber& fiber = *worker.fiber;
  join(past, worker.warp->seen, worker.components);
  add_known(worker, fiber, past);
  past[fiber.warp] = std::max(past[fiber.warp], worker.warp->clock);
  worker.warp->tick(fiber.warp);
}

// Merges `past` into the clocks that this thread has seen.
void know_past(Worker& worker, const Clock (&past)[max_components]) {
  Fiber& fiber = *worker.fiber;
  Clock& own = worker.warp->seen[fiber.warp];
  Clock kept = own;
  join(worker.warp->seen, past, worker.warp_count);
  own = kept;
  for (int i = max_warps; i < worker.components; ++i) {
    fiber.known[i - max_warps] = std::max(fiber.known[i - max_warps], past[i]);
  }
}

void begin_past(Barrier& barrier) {
  if (!barrier.has_past) std::memset(barrier.past, 0, sizeof barrier.past);
  barrier.has_past = true;
}

void arrive(Worker& worker, Barrier& barrier) {
  begin_past(barrier);
  add_past(worker, barrier.past);
}

// Waits at a barrier: contributes the clocks of the thread's warp and of the thread.
inline void wait_at(Worker& worker, Barrier& barrier, const Place& place) {
  Fiber& fiber = *worker.fiber;
  unsigned warp_bit = 1u << fiber.warp;
  if ((barrier.warps & warp_bit) == 0) {
    barrier.places[fiber.warp] = place;
  } else if (barrier.places[fiber.warp].line != place.line) {
    check_divergence(worker, barrier, place);
  }
  barrier.warps |= warp_bit;
  barrier.waiting[fiber.warp] |= 1u << fiber.lane;
  if (worker.asynchronous == nullptr) return;
  begin_past(barrier);
  add_known(worker, fiber, barrier.past);
}

inline Barrier& pass_barrier(Worker& worker, int id, int threads, bool waits, bool predicate,
                             const char* operation, const Place& place) {
  Barrier& barrier = worker.barriers[id];
  if (barrier.arrived == 0) {
    first_arrival(barrier, threads, operation);
  } else if (barrier.expected != threads) {
    check_round(worker, id, threads, operation, place);
  }
  barrier.count += predicate;
  barrier.any |= predicate;
  barrier.all &= predicate;
  if (waits) {
    wait_at(worker, barrier, place);
  } else {
    arrive(worker, barrier);
  }
  if (++barrier.arrived == barrier.expected) {
    release(worker, barrier);
    take_turn(worker);
  } else if (waits) {
    worker.fiber->barrier = id;
    wait_in(worker, operation, place);
  }
  return barrier;
}

Past* find_past(Worker& worker, const void* object) {
  Past* past = worker.pasts;
  while (past != nullptr && past->object != object) past = past->next;
  return past;
}

// ---------------------------------------------------------------------------------------------
// Deadlocks

bool waits_with(const Fiber& one, const Fiber& other) {
  if (other.operation == nullptr) return false;
  if (one.barrier >= 0) return other.barrier == one.barrier;
  if (one.exchange == nullptr) return &one == &other;
  return other.barrier < 0 && other.exchange == one.exchange;
}

bool expected_with(const Fiber& one, const Fiber& other) {
  if (one.barrier >= 0) return true;
  if (one.exchange == nullptr) return false;
  return other.warp == one.warp && (one.exchange->mask >> other.lane & 1) != 0;
}

const Fiber* first_waiting(const Worker& worker) {
  for (int i = 0; i < worker.threads; ++i) {
    if (worker.fibers[i].operation != nullptr) return &worker.fibers[i];
  }
  return nullptr;
}

// Returns the first thread that never reaches the barrier.
const Fiber* first_missing(const Worker& worker, const Fiber& waiting) {
  for (int i = 0; i < worker.threads; ++i) {
    const Fiber& other = worker.fibers[i];
    if (expected_with(waiting, other) && !waits_with(waiting, other)) return &other;
  }
  return nullptr;
}

Text whereabouts(const Worker& worker, const Fiber& fiber) {
  if (fiber.finished) return format("has returned");
  return format("waits in %s at %s", fiber.operation ? fiber.operation : "nothing",
                place_name(worker, fiber.place).chars);
}

Text waiting_text(const Worker& worker, const Fiber& waiting) {
  int count = 0;
  for (int i = 0; i < worker.threads; ++i) count += waits_with(waiting, worker.fibers[i]);
  Text place = place_name(worker, waiting.place);
  if (waiting.barrier > 0) {
    const Barrier& barrier = worker.barriers[waiting.barrier];
    return format("%d threads wait in %s on barrier %d at %s, where %d of %d arrived", count,
                  waiting.operation, waiting.barrier, place.chars, barrier.arrived,
                  barrier.expected);
  }
  return format("%d %s in %s at %s", count, count == 1 ? "thread waits" : "threads wait",
                waiting.operation, place.chars);
}

// Returns the stack frame at which a waiting fiber continues.
const void* frame_of(const Fiber& fiber) {
  return static_cast<void* const*>(fiber.stack_pointer)[frame_word];
}

COLD void report_stuck(Worker& worker) {
  const Fiber* waiting = first_waiting(worker);
  const Fiber* missing = first_missing(worker, *waiting);
  Text text = waiting_text(worker, *waiting);
  if (missing == nullptr) {
    record(worker, waiting->index, waiting->place, format("waits for ever: %s", text.chars),
           waiting, frame_of(*waiting));
    return;
  }
  record(worker, missing->index, waiting->place,
         format("never reaches a barrier: %s; this thread %s", text.chars,
                whereabouts(worker, *missing).chars),
         waiting, frame_of(*waiting));
}

// ---------------------------------------------------------------------------------------------
// Functions defined in asynchronous.h

struct Touch;
Text asynchronous_name(const Worker& worker, Epoch epoch, std::uintptr_t address);
const char* missing_wait(Epoch epoch);
void check_awaited(Worker& worker, const Touch& touch);
bool report_vain_waits(Worker& worker);
void check_left_over(Worker& worker);
void check_left_loads(Worker& worker);
void check_registers(Worker& worker);
Clock latest_clock(const Worker& worker);
void forget_asynchronous(Worker& worker);
void free_asynchronous(Worker& worker);

// ---------------------------------------------------------------------------------------------
// Access checks

// `announcement` precedes a later write: checked for races like a write, but not recorded.
enum class Access { read, write, atomic, announcement };

const char* verb(Access access) {
  if (access == Access::read) return "reads";
  return access == Access::atomic ? "updates" : "writes";
}

struct Touch {
  Access access;
  std::uintptr_t address;
  std::size_t bytes;
  Place place;
};

[[noreturn]] COLD void fault_at(Worker& worker, const Touch& touch, const Text& text) {
  fault(worker, touch.place, format("%s %zu bytes%s", verb(touch.access), touch.bytes, text.chars));
}

[[noreturn]] COLD void fault_uninitialised(Worker& worker, const Arena& arena, const Touch& touch) {
  fault_at(worker, touch,
           format(" at byte %zu of %s that no thread of this block has written",
                  static_cast<std::size_t>(touch.address - arena.address), arena.name));
}

[[noreturn]] COLD void fault_race(Worker& worker, const Arena& arena, const Touch& touch,
                                  Epoch other, const char* done) {
  bool of_thread = thread_of(other) < max_threads;
  Text name = of_thread ? thread_name(worker, thread_of(other))
                        : asynchronous_name(worker, other, touch.address);
  fault(worker, touch.place,
        format("race: %s %s and this thread %s byte %zu of %s with no %s between", name.chars,
               clock_of(other) == unfinished ? "is under way" : done, verb(touch.access),
               static_cast<std::size_t>(touch.address - arena.address), arena.name,
               of_thread ? "barrier" : missing_wait(other)));
}

inline bool ordered(const Worker& worker, Epoch epoch, int thread) {
  int other = thread_of(epoch);
  if (other == thread || clock_of(epoch) <= worker.warp->seen[other / warp_size]) return true;
  return other >= max_threads &&
         clock_of(epoch) <= worker.fiber->known[other / warp_size - max_warps];
}

template <Access access>
inline void check_cell(Worker& worker, Arena& arena, Cell& cell, Epoch now, bool racing,
                       const Touch& touch) {
  if (access == Access::read && cell.readers[0] == now) return;
  bool needs_value = access == Access::read || access == Access::atomic;
  if (needs_value && clock_of(cell.writer) <= worker.floor) {
    fault_uninitialised(worker, arena, touch);
  }
  int thread = thread_of(now);
  if (racing || clock_of(cell.writer) == unfinished) {
    if (!ordered(worker, cell.writer, thread)) {
      fault_race(worker, arena, touch, cell.writer, "wrote");
    }
    if (access != Access::atomic && !ordered(worker, cell.updater, thread)) {
      fault_race(worker, arena, touch, cell.updater, "updated");
    }
    if (access != Access::read) {
      for (Epoch reader : cell.readers) {
        if (!ordered(worker, reader, thread)) {
          fault_race(worker, arena, touch, reader, "read");
        }
      }
    }
  }
  switch (access) {
    case Access::read:
      if (!racing) return;
      if (thread_of(cell.readers[0]) != thread) cell.readers[1] = cell.readers[0];
      cell.readers[0] = now;
      return;
    case Access::write:
      cell = {now, 0, {0, 0}};
      return;
    case Access::atomic:
      cell.updater = now;
      return;
    case Access::announcement:
      return;
  }
}

template <Access access>
COLD void fault_outside(Worker& worker, const Touch& touch);

template <Access access>
inline void check_shared(Worker& worker, Arena& arena, const Touch& touch) {
  std::size_t offset = touch.address - arena.address;
  if (__builtin_expect(offset + touch.bytes > arena.bytes, 0)) fault_outside<access>(worker, touch);
  Epoch now = worker.warp->clock << clock_shift | static_cast<Epoch>(worker.fiber->index);
  Cell* cell = &arena.cells[offset / cell_bytes];
  std::size_t cells = (offset % cell_bytes + touch.bytes + cell_bytes - 1) / cell_bytes;
  // One byte is half a cell, and different threads may use the halves.
  bool racing = touch.bytes > 1;
  for (std::size_t i = 0; i < cells; ++i) {
    check_cell<access>(worker, arena, cell[i], now, racing, touch);
  }
}

// Returns the block that a worker ran at this epoch.
std::uint64_t block_of(Launch& launch, Epoch epoch) {
  Guard guard(launch.mutex);
  const Began* began = launch.begun;
  while (began != nullptr && (began->number != epoch >> number_shift ||
                              began->floor >= clock_of(epoch & without_number))) {
    began = began->next;
  }
  return began == nullptr ? 0 : began->block;
}

inline bool of_this_block(const Worker& worker, Epoch epoch) {
  return epoch >> number_shift == worker.number && clock_of(epoch & without_number) > worker.floor;
}

[[noreturn]] COLD void fault_global_race(Worker& worker, const Touch& touch, std::size_t cell,
                                         Epoch other, const char* done) {
  std::size_t offset = cell << worker.hit_shadow->shift;
  if (of_this_block(worker, other)) {
    fault(worker, touch.place,
          format("race: %s %s and this thread %s byte %zu of %s with no barrier between",
                 thread_name(worker, thread_of(other)).chars, done, verb(touch.access), offset,
                 worker.hit.name));
  }
  unsigned block[3];
  block_coordinates(worker, block_of(*worker.launch, other), block);
  fault(
      worker, touch.place,
      format("race: block (%u, %u, %u) %s and this block %s byte %zu of %s with no atomic between",
             block[0], block[1], block[2], done, verb(touch.access), offset, worker.hit.name));
}

bool races_with_another(const Worker& worker, Epoch epoch) {
  if (!of_this_block(worker, epoch)) return !worker.speaks;
  return !worker.signals && !ordered(worker, epoch & without_number, worker.fiber->index);
}

// Returns whether an earlier access races with this one. Tests the most frequent case first: an
// access of the same thread in the same block.
inline bool races(const Worker& worker, Epoch epoch, Epoch now) {
  constexpr Epoch same_thread = ~without_number | ((Epoch{1} << clock_shift) - 1);
  bool own = ((epoch ^ now) & same_thread) == 0 && epoch >= worker.block_start;
  return epoch != 0 && !own && races_with_another(worker, epoch);
}

// Checks an access of an element and records it. A read and an atomic are not reported as a race,
// because loops around atomicCAS start with a plain read.
template <Access access>
inline void check_global_cell(Worker& worker, Shadow& shadow, std::size_t cell, Epoch now,
                              const Touch& touch) {
  Epoch& writer = shadow.writers[cell];
  if (access == Access::read && shadow.readers[cell].last[0] == now) return;
  if (races(worker, writer, now)) fault_global_race(worker, touch, cell, writer, "wrote");
  if (access != Access::write || shadow.is_read) {
    Readers& readers = shadow.readers[cell];
    if (access == Access::write) {
      if (races(worker, readers.updater, now)) {
        fault_global_race(worker, touch, cell, readers.updater, "updated");
      }
      for (Epoch reader : readers.last) {
        if (races(worker, reader, now)) fault_global_race(worker, touch, cell, reader, "read");
      }
    }
    if (access == Access::read) {
      if (thread_of(readers.last[0]) != thread_of(now)) readers.last[1] = readers.last[0];
      readers.last[0] = now;
    } else if (access == Access::atomic) {
      readers.updater = now;
    } else if ((readers.updater | readers.last[0]) != 0) {  // leaves untouched pages uncommitted
      readers = {};
    }
  }
  if (access == Access::write) writer = now;
}

[[noreturn]] COLD void fault_early(Worker& worker, const Touch& touch) {
  fault_at(worker, touch,
           format(" of %s, which the previous launch may still access; call "
                  "wait_for_launch_before() in this thread first",
                  worker.hit.name));
}

// Checks that a thread has waited for the previous launch before it accesses that launch's arrays.
inline void check_early(Worker& worker, const Touch& touch) {
  if (__builtin_expect(worker.hit.awaited && !worker.fiber->waited, 0)) fault_early(worker, touch);
}

[[noreturn]] COLD void fault_kept(Worker& worker, const Touch& touch) {
  fault_at(
      worker, touch,
      format(" of %s, which the next launch reads without waiting for this one; leave the name "
             "out of its unawaited=",
             worker.hit.name));
}

// Reports a block in which no thread waited for the previous launch. If one block's wait is enough,
// reports a launch in which no thread waited. Such a launch could end before an earlier launch.
void check_waited(Worker& worker) {
  Launch& launch = *worker.launch;
  if (!launch.request->early || worker.abandoned) return;
  for (int i = 0; i < worker.threads; ++i) {
    if (worker.fibers[i].waited) return;
  }
  bool all = launch.unwaited.fetch_add(1) + 1 == launch.blocks;
  if (launch.request->one_waits && !all) return;
  record(worker, 0, {},
         format("ends without wait_for_launch_before(), as do all threads of its %s: call it, "
                "so that this launch ends after earlier ones",
                launch.request->one_waits ? "launch" : "block"));
  worker.abandoned = true;
}

// Checks an access of the array that was accessed last. Atomics may order accesses, which the
// simulator does not track. It therefore ignores races between a block that executed atomics and
// other blocks and, if a fence preceded an atomic, races between threads of that block.
template <Access access>
__attribute__((noinline)) void check_global(Worker& worker, const Touch& touch) {
  if (access == Access::announcement) return;
  if (access != Access::read && worker.hit.kept) fault_kept(worker, touch);
  if (access == Access::atomic) {
    worker.speaks = true;
    worker.signals = worker.fenced;
  }
  Shadow* shadow = worker.hit_shadow;
  if (shadow == nullptr || (access != Access::write && !worker.hit_is_tracked)) return;
  if (access != Access::write && !shadow->is_read) shadow->is_read = true;
  // Skips partial elements, whose parts different threads may use.
  std::size_t offset = touch.address - worker.hit.address;
  std::size_t first = (offset + (std::size_t{1} << shadow->shift) - 1) >> shadow->shift;
  std::size_t end = (offset + touch.bytes) >> shadow->shift;
  Epoch now = worker.number << number_shift | worker.warp->clock << clock_shift |
              static_cast<Epoch>(worker.fiber->index);
  for (std::size_t cell = first; cell < end; ++cell) {
    check_global_cell<access>(worker, *shadow, cell, now, touch);
  }
}

// Returns the distance of the access from the region; 0 if they overlap.
std::size_t distance(const Region& region, const Touch& touch) {
  if (touch.address + touch.bytes <= region.address) return region.address - touch.address;
  std::uintptr_t end = region.address + region.bytes;
  return touch.address >= end ? touch.address - end + 1 : 0;
}

Text outside_text(const Region& region, const Touch& touch) {
  Text size = format("%s (%zu bytes)", region.name, region.bytes);
  std::uintptr_t end = region.address + region.bytes;
  if (touch.address < region.address) {
    return format(", %zu bytes before the start of %s",
                  static_cast<std::size_t>(region.address - touch.address), size.chars);
  }
  if (touch.address < end) return format(", partly past the end of %s", size.chars);
  if (touch.address == end) return format(", just past the end of %s", size.chars);
  return format(", %zu bytes past the end of %s", static_cast<std::size_t>(touch.address - end),
                size.chars);
}

Region nearest_region(const Worker& worker, const Touch& touch) {
  const Request& request = *worker.launch->request;
  Region nearest{};
  auto consider = [&](const Region& region) {
    if (region.bytes == 0) return;
    if (nearest.bytes == 0 || distance(region, touch) < distance(nearest, touch)) nearest = region;
  };
  std::for_each(request.regions, request.regions + request.region_count, consider);
  for (const Arena* arena : {&worker.dynamic, &worker.fixed}) {
    consider({arena->name, arena->address, arena->bytes});
  }
  return nearest;
}

const Fiber* stack_owner(const Worker& worker, std::uintptr_t address) {
  for (int i = 0; i < worker.threads; ++i) {
    if (address - worker.fibers[i].stack_low < stack_bytes) return &worker.fibers[i];
  }
  return nullptr;
}

Text nearest_text(const Worker& worker, const Touch& touch) {
  constexpr std::size_t far = 1 << 26;
  Text address = format(" at address 0x%lx", static_cast<unsigned long>(touch.address));
  if (touch.address < page) return format("%s, through a null pointer", address.chars);
  const Fiber* owner = stack_owner(worker, touch.address);
  if (owner != nullptr) {
    return format(" of the local memory of %s", thread_name(worker, owner->index).chars);
  }
  Region nearest = nearest_region(worker, touch);
  if (nearest.bytes == 0 || distance(nearest, touch) > far) {
    return format("%s, outside every array of this launch", address.chars);
  }
  return outside_text(nearest, touch);
}

template <Access access>
COLD void fault_outside(Worker& worker, const Touch& touch) {
  fault_at(worker, touch, nearest_text(worker, touch));
}

bool inside_exchange(const Worker& worker, std::uintptr_t address, std::size_t bytes) {
  const Exchange* exchange = worker.fiber->exchange;
  if (exchange == nullptr) return false;
  Region values{"", reinterpret_cast<std::uintptr_t>(exchange->values), sizeof exchange->values};
  return inside(values, address, bytes);
}

template <Access access>
__attribute__((noinline)) void check_elsewhere(Worker& worker, const Touch& touch) {
  const Request& request = *worker.launch->request;
  for (std::size_t i = 0; i < request.region_count; ++i) {
    if (inside(request.regions[i], touch.address, touch.bytes)) {
      worker.hit = request.regions[i];
      Shadow* shadows = worker.launch->shadows;
      worker.hit_shadow =
          shadows == nullptr || shadows[i].writers == nullptr ? nullptr : &shadows[i];
      worker.hit_is_tracked = worker.hit_shadow != nullptr && shadows[i].readers != nullptr;
      check_early(worker, touch);
      check_global<access>(worker, touch);
      return;
    }
  }
  const Module& module = worker.launch->module;
  if (module.writable.contain(touch.address, touch.bytes)) return;
  if (access == Access::read) {
    if (module.readable.contain(touch.address, touch.bytes)) return;
    if (inside(worker.argument_block, touch.address, touch.bytes)) return;
    if (inside_exchange(worker, touch.address, touch.bytes)) return;
  }
  fault_outside<access>(worker, touch);
}

template <Access access>
__attribute__((always_inline)) inline void check(const void* pointer, std::size_t bytes,
                                                 const Place& place) {
  Worker* worker = self;
  if (__builtin_expect(worker == nullptr, 0)) return;  // the kernel's object is being loaded
  if (__builtin_expect(stopped(*worker), 0)) abandon(*worker);
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  auto touch = [&]() -> Touch { return {access, address, bytes, place}; };
  if (address - worker->dynamic.address < worker->dynamic.bytes) {
    check_shared<access>(*worker, worker->dynamic, touch());
  } else if (inside(worker->hit, address, bytes)) {
    check_early(*worker, touch());
    bool recorded = access != Access::read || worker->hit_is_tracked;
    if (recorded) check_global<access>(*worker, touch());
  } else if (address - worker->stack_low < stack_bytes) {
    if (__builtin_expect(address < worker->awaited_end, 0)) check_awaited(*worker, touch());
  } else if (address - worker->fixed.address < worker->fixed.bytes) {
    check_shared<access>(*worker, worker->fixed, touch());
  } else {
    check_elsewhere<access>(*worker, touch());
  }
}

[[noreturn]] COLD void fault_misaligned(Worker& worker, const Touch& touch) {
  fault_at(worker, touch,
           format(" at address 0x%lx, which is not a multiple of %zu",
                  static_cast<unsigned long>(touch.address), touch.bytes));
}

template <Access access, std::size_t bytes>
__attribute__((always_inline)) inline void check_aligned(const void* pointer, const Place& place) {
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  if (__builtin_expect(address % bytes != 0 && self != nullptr, 0)) {
    // The compiler merges stores to neighbouring stack variables into one store of 16 bytes.
    if (address - self->stack_low >= stack_bytes)
      fault_misaligned(*self, {access, address, bytes, place});
  }
  check<access>(pointer, bytes, place);
}

// ---------------------------------------------------------------------------------------------
// Running blocks

[[noreturn]] void finish(Worker& worker) {
  Fiber& fiber = *worker.fiber;
  check_left_over(worker);
  let_go(worker, fiber);
  fiber.finished = true;
  ++worker.finished;
  worker.idle_polls = 0;
  suspend(worker);
  __builtin_unreachable();
}

void fiber_main() {
  Worker& worker = *self;
  worker.launch->request->entry(worker.arguments);
  finish(worker);
}

template <class Node>
void free_all(Node*& list) {
  while (list != nullptr) {
    Node* next = list->next;
    std::free(list);
    list = next;
  }
}

void prepare_fiber(Worker& worker, int index) {
  Fiber& fiber = worker.fibers[index];
  fiber.finished = false;
  fiber.operation = nullptr;
  fiber.exchange = nullptr;
  fiber.barrier = -1;
  fiber.awaited = -1;
  fiber.published = 0;
  std::fill_n(fiber.fenced, max_warps, 0);
  fiber.products = fiber.grouped = fiber.finished_products = fiber.groups = 0;
  fiber.begun = fiber.waited = false;
  fiber.copies = nullptr;
  fiber.copies_end = &fiber.copies;
  fiber.copy_groups = 0;
  fiber.awaited_low = fiber.awaited_end = 0;
  fiber.register_calls = 0;
  block_coordinates(worker, worker.block, fiber.coordinates->block);
  // The stack layout that switch_stack expects: saved registers, then the address to continue at.
  std::uintptr_t top = reinterpret_cast<std::uintptr_t>(fiber.coordinates) & ~std::uintptr_t{63};
  void** words = reinterpret_cast<void**>(top) - saved_words - 1;
  std::memset(words, 0, saved_words * sizeof(void*));
  words[entry_word] = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = words;
}

void prepare_clocks(Worker& worker) {
  Clock floor = latest_clock(worker);
  for (int w = 0; w < worker.warp_count; ++w) floor = std::max(floor, worker.warps[w].clock);
  worker.floor = floor;
  for (int w = 0; w < worker.warp_count; ++w) {
    Warp& warp = worker.warps[w];
    warp.clock = floor + 1;
    std::fill_n(warp.seen, max_components, floor);
    warp.open_count = 0;
    warp.polling = 0;
    warp.ready = 0;
    make_ready(worker, w, warp.lanes);
  }
}

void note_block(Worker& worker) {
  Launch& launch = *worker.launch;
  auto* began = static_cast<Began*>(std::calloc(1, sizeof(Began)));
  Guard guard(launch.mutex);
  *began = {launch.begun, worker.number, worker.floor, worker.block};
  launch.begun = began;
}

void prepare_block(Worker& worker, std::uint64_t block) {
  const Request& request = *worker.launch->request;
  worker.block = block;
  worker.finished = 0;
  worker.idle_polls = 0;
  worker.speaks = worker.fenced = worker.signals = false;
  worker.random = request.seed * 0x2545f4914f6cdd1du ^ block;
  worker.late_warps = late_warps(request.seed, block);
  worker.ready_warps = 0;
  free_all(worker.pasts);
  for (Arena* arena : {&worker.dynamic, &worker.fixed}) {
    std::memset(reinterpret_cast<void*>(arena->address), 0xff, arena->bytes);
  }
  for (Barrier& barrier : worker.barriers) barrier = Barrier{};
  prepare_clocks(worker);
  worker.block_start = worker.number << number_shift | (worker.floor + 1) << clock_shift;
  note_block(worker);
  worker.components = worker.warp_count;
  forget_asynchronous(worker);
  for (int i = 0; i < worker.threads; ++i) prepare_fiber(worker, i);
}

void run_block(Worker& worker, std::uint64_t block) {
  prepare_block(worker, block);
  Fiber start{};  // precedes the first thread, so that thread 0 runs next
  worker.fiber = &start;
  Fiber* first = next_fiber(worker);
  enter(worker, first);
  switch_stack(&worker.main_stack_pointer, first->stack_pointer);
  if (worker.abandoned) return;
  if (worker.finished < worker.threads) {
    if (!report_vain_waits(worker)) report_stuck(worker);
    worker.abandoned = true;
    return;
  }
  check_left_loads(worker);
  check_registers(worker);
  check_waited(worker);
}

// ---------------------------------------------------------------------------------------------
// Setting up a worker

// Returns the address of __shared__ variables. They are the object's thread-local segment, of which
// every worker has a copy; arrays declared `extern __shared__` follow.
std::uintptr_t fixed_shared(const Module& module) {
  if (module.tls_bytes == 0) return 0;
  struct Index {
    std::size_t module, offset;
  } index{module.tls_module, 0};
  void* (*get_address)(Index*) =
      reinterpret_cast<void* (*)(Index*)>(dlsym(RTLD_DEFAULT, "__tls_get_addr"));
  return get_address == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(get_address(&index));
}

bool prepare_shared(Worker& worker) {
  constexpr std::size_t alignment = 1024;  // required by swizzled layouts
  const Launch& launch = *worker.launch;
  worker.dynamic.bytes = launch.request->shared_bytes;
  worker.dynamic.name = "shared memory";
  worker.fixed.address = fixed_shared(launch.module);
  worker.fixed.bytes = worker.fixed.address == 0 ? 0 : launch.module.tls_bytes;
  worker.fixed.name = "the kernel's __shared__ variables";
  if (launch.request->locate != nullptr) {
    std::uintptr_t places[2];
    launch.request->locate(places);
    worker.fixed.bytes = places[0] - worker.fixed.address;
    worker.dynamic.address = places[1];
  } else {
    std::size_t rounded = (worker.dynamic.bytes / alignment + 1) * alignment;
    worker.allocated = aligned_alloc(alignment, rounded);
    worker.dynamic.address = reinterpret_cast<std::uintptr_t>(worker.allocated);
  }
  bool complete = worker.dynamic.allocate_cells() && worker.fixed.allocate_cells();
  return complete && worker.dynamic.address != 0;
}

void place_fiber(Worker& worker, int index) {
  Fiber& fiber = worker.fibers[index];
  fiber.index = index;
  fiber.warp = index / warp_size;
  fiber.lane = index % warp_size;
  char* low = worker.slabs[fiber.warp] + fiber.lane * stack_bytes;
  fiber.stack_low = reinterpret_cast<std::uintptr_t>(low);
  // Shifts stacks, because equal depths of different stacks would compete for the same cache lines.
  std::size_t shift = index * 13 % 64 * 64;
  char* top = low + stack_bytes - shift - sizeof(Coordinates);
  fiber.coordinates = reinterpret_cast<Coordinates*>(top);
  const Request& request = *worker.launch->request;
  thread_coordinates(worker, index, fiber.coordinates->thread);
  std::memcpy(fiber.coordinates->block_dim, request.block, sizeof request.block);
  std::memcpy(fiber.coordinates->grid_dim, request.grid, sizeof request.grid);
}

bool prepare_threads(Worker& worker) {
  worker.threads = worker.launch->threads;
  worker.warp_count = (worker.threads + warp_size - 1) / warp_size;
  for (int w = 0; w < worker.warp_count; ++w) {
    worker.slabs[w] = take_slab();
    if (worker.slabs[w] == nullptr) return false;
    int lanes = std::min(warp_size, worker.threads - w * warp_size);
    worker.warps[w].lanes = lanes == warp_size ? ~0u : (1u << lanes) - 1;
    worker.warps[w].clock = 0;
  }
  for (int i = 0; i < worker.threads; ++i) place_fiber(worker, i);
  return true;
}

constexpr std::size_t argument_alignment = 128;  // the strictest alignment of any type

std::size_t argument_room(std::size_t bytes) {
  return (bytes / argument_alignment + 1) * argument_alignment;
}

// Copies the arguments to the worker's aligned memory, after a table of pointers to the arguments.
bool copy_arguments(Worker& worker, const Request& request) {
  std::size_t pointer_bytes = argument_room(request.argument_count * sizeof(void*));
  std::size_t total = pointer_bytes;
  for (std::size_t i = 0; i < request.argument_count; ++i) {
    total += argument_room(request.argument_bytes[i]);
  }
  char* memory = static_cast<char*>(aligned_alloc(argument_alignment, total));
  if (memory == nullptr) return false;
  worker.arguments = reinterpret_cast<void**>(memory);
  worker.argument_block = {"", reinterpret_cast<std::uintptr_t>(memory), total};
  char* at = memory + pointer_bytes;
  for (std::size_t i = 0; i < request.argument_count; ++i) {
    worker.arguments[i] = at;
    std::memcpy(at, request.arguments[i], request.argument_bytes[i]);
    at += argument_room(request.argument_bytes[i]);
  }
  return true;
}

void report_no_memory(Launch& launch) {
  Guard guard(launch.mutex);
  std::snprintf(launch.report->text, report_bytes,
                "no memory for the stacks and shared memory of %d threads; use fewer workers",
                launch.threads);
  launch.faulty_block.store(0);
}

bool prepare_worker(Worker& worker, Launch& launch) {
  worker.launch = &launch;
  worker.number = launch.next_number.fetch_add(1);
  worker.shuffled = launch.request->shuffled != 0;
  bool copied = copy_arguments(worker, *launch.request);
  return copied && prepare_shared(worker) && prepare_threads(worker);
}

void free_exchanges(Worker& worker) {
  while (Exchange* exchange = worker.made_exchanges) {
    worker.made_exchanges = exchange->next_made;
    std::free(exchange);
  }
}

void free_worker(Worker& worker) {
  for (char* slab : worker.slabs) {
    if (slab != nullptr) give_slab(slab);
  }
  free_asynchronous(worker);
  free_all(worker.pasts);
  free_exchanges(worker);
  std::free(worker.allocated);
  std::free(worker.dynamic.cells);
  std::free(worker.fixed.cells);
  std::free(worker.arguments);
  std::free(&worker);
}

void* work(void* data) {
  Launch& launch = *static_cast<Launch*>(data);
  // All members start as zero bytes.
  Worker* worker = static_cast<Worker*>(std::calloc(1, sizeof(Worker)));
  bool ready = worker != nullptr && prepare_worker(*worker, launch);
  if (!ready) report_no_memory(launch);
  self = worker;
  while (ready && !worker->abandoned) {
    std::uint64_t block = launch.next_block.fetch_add(1);
    if (block >= launch.blocks || block > launch.faulty_block.load() || stopped(*worker)) break;
    run_block(*worker, block);
  }
  self = nullptr;
  if (worker != nullptr) free_worker(*worker);
  return nullptr;
}

struct ModuleSearch {
  std::uintptr_t address;
  Module* module;
};

int describe_module(dl_phdr_info* info, std::size_t, void* data) {
  auto* search = static_cast<ModuleSearch*>(data);
  Module found;
  found.base = info->dlpi_addr;
  bool is_it = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    Region region{"", info->dlpi_addr + header.p_vaddr, header.p_memsz};
    if (header.p_type == PT_TLS) found.tls_bytes = header.p_memsz;
    if (header.p_type != PT_LOAD) continue;
    is_it = is_it || inside(region, search->address, 1);
    ((header.p_flags & PF_W) != 0 ? found.writable : found.readable).add(region);
  }
  if (!is_it) return 0;
  found.tls_module = info->dlpi_tls_modid;
  *search->module = found;
  return 1;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// The function that machine.py calls

// Runs a grid; returns 0, or 1 with the fault in *report.
EXPORTED int cupyfa_launch(const Request* request, Report* report) {
  Launch launch;
  launch.request = request;
  launch.report = report;
  launch.blocks = std::uint64_t{request->grid[0]} * request->grid[1] * request->grid[2];
  launch.threads = request->block[0] * request->block[1] * request->block[2];
  ModuleSearch search{reinterpret_cast<std::uintptr_t>(request->entry), &launch.module};
  dl_iterate_phdr(describe_module, &search);
  std::uint64_t wanted = std::clamp(request->workers, 1, max_workers);
  int workers = static_cast<int>(std::min(wanted, launch.blocks));
  launch.allocate_shadows();
  pthread_t threads[max_workers];
  int started = 0;
  while (started < workers && pthread_create(&threads[started], nullptr, work, &launch) == 0) {
    ++started;
  }
  // If the system starts fewer threads, they share all blocks; without any, this thread runs them.
  if (started == 0) work(&launch);
  for (int i = 0; i < started; ++i) pthread_join(threads[i], nullptr);
  launch.free_shadows();
  free_all(launch.begun);
  return launch.faulty_block.load() != UINT64_MAX;
}

// ---------------------------------------------------------------------------------------------
// Functions that simulator.h declares and describes

EXPORTED const Coordinates* simulator_coordinates() {
  return self->fiber->coordinates;
}

EXPORTED unsigned char* simulator_shared_memory() {
  return reinterpret_cast<unsigned char*>(self->dynamic.address);
}

EXPORTED std::size_t simulator_shared_bytes() {
  return self->dynamic.bytes;
}

EXPORTED std::uint64_t simulator_shuffle(unsigned mask, std::uint64_t value, int source,
                                         const char* operation, const char* file, int line) {
  Exchange* exchange =
      meet(mask, &value, sizeof value, false, false, operation, {file, line, CALLER});
  // A lane outside the mask has no defined value: return -1, which is NaN in every floating type.
  if ((exchange->arrived >> source & 1) == 0) return ~std::uint64_t{0};
  std::uint64_t result;
  std::memcpy(&result, exchange->values + source * sizeof result, sizeof result);
  return result;
}

EXPORTED unsigned simulator_ballot(unsigned mask, bool predicate, const char* operation,
                                   const char* file, int line) {
  return meet(mask, nullptr, 0, predicate, false, operation, {file, line, CALLER})->votes;
}

EXPORTED void simulator_warp_barrier(unsigned mask, const char* operation, const char* file,
                                     int line) {
  meet(mask, nullptr, 0, false, true, operation, {file, line, CALLER});
}

EXPORTED const void* simulator_gather(unsigned mask, const void* mine, std::size_t size,
                                      const char* operation, const char* file, int line) {
  return meet(mask, mine, size, false, false, operation, {file, line, CALLER})->values;
}

EXPORTED int simulator_lane() {
  return self->fiber->lane;
}

EXPORTED unsigned simulator_lanes() {
  return self->warp->lanes;
}

EXPORTED unsigned simulator_block_barrier(bool predicate, int which, const char* operation,
                                          const char* file, int line) {
  Worker& worker = *self;
  Place place{file, line, CALLER};
  const Barrier& barrier = worker.barriers[0];
  if (barrier.arrived > 0 && barrier.operation != operation) {
    check_operation(worker, barrier, operation, place);
  }
  return pass_barrier(worker, 0, worker.threads, true, predicate, operation, place).result[which];
}

EXPORTED void simulator_named_barrier(int id, int threads, bool waits, const char* operation,
                                      const char* file, int line) {
  Worker& worker = *self;
  Place place{file, line, CALLER};
  check_barrier(worker, id, threads, operation, place);
  pass_barrier(worker, id, threads, waits, false, operation, place);
}

EXPORTED void simulator_pause(bool again, const char* operation, const char* file, int line) {
  Worker& worker = *self;
  Fiber& fiber = *worker.fiber;
  worker.idle_polls = again ? worker.idle_polls + 1 : 0;
  fiber.operation = operation;
  fiber.place = {file, line, CALLER};
  fiber.barrier = -1;
  let_go(worker, fiber);
  // Every thread has checked its condition since the last change, so none can continue.
  if (worker.idle_polls > 2 * worker.threads) {
    switch_stack(&fiber.stack_pointer, worker.main_stack_pointer);
  }
  worker.warp->polling |= 1u << fiber.lane;
  suspend(worker);
  fiber.operation = nullptr;
}

EXPORTED void simulator_fence() {
  self->fenced = true;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

EXPORTED void simulator_wait_for_launch_before() {
  self->fiber->waited = true;
}

EXPORTED void simulator_launch_dependents(const char* file, int line) {
  Worker& worker = *self;
  if (!worker.launch->request->waits_first || worker.fiber->waited) return;
  fault(worker, {file, line, CALLER},
        format("calls launch_dependents() before wait_for_launch_before(), though the next launch "
               "reads what launches before this one write; wait first"));
}

EXPORTED void simulator_publish(const void* object) {
  Worker& worker = *self;
  Past* past = find_past(worker, object);
  if (past == nullptr) {
    past = static_cast<Past*>(std::calloc(1, sizeof(Past)));
    past->object = object;
    past->next = worker.pasts;
    worker.pasts = past;
  }
  add_past(worker, past->seen);
}

EXPORTED void simulator_observe(const void* object) {
  Worker& worker = *self;
  Past* past = find_past(worker, object);
  if (past != nullptr) know_past(worker, past->seen);
}

EXPORTED void simulator_check_read(const void* pointer, std::size_t bytes, const char* file,
                                   int line) {
  if (bytes > 0) check<Access::read>(pointer, bytes, {file, line, nullptr});
}

EXPORTED void simulator_check_write(const void* pointer, std::size_t bytes, const char* file,
                                    int line) {
  if (bytes > 0) check<Access::write>(pointer, bytes, {file, line, nullptr});
}

EXPORTED bool simulator_is_shared(const void* pointer) {
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  return address - self->dynamic.address < self->dynamic.bytes ||
         address - self->fixed.address < self->fixed.bytes;
}

EXPORTED std::uint64_t simulator_atomic_load(const void* pointer, std::size_t bytes) {
  check<Access::atomic>(pointer, bytes, at(CALLER));
  if (reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0) {
    fault_misaligned(
        *self, {Access::atomic, reinterpret_cast<std::uintptr_t>(pointer), bytes, at(CALLER)});
  }
  switch (bytes) {
    case 2:
      return __atomic_load_n(static_cast<const std::uint16_t*>(pointer), __ATOMIC_SEQ_CST);
    case 4:
      return __atomic_load_n(static_cast<const std::uint32_t*>(pointer), __ATOMIC_SEQ_CST);
    default:
      return __atomic_load_n(static_cast<const std::uint64_t*>(pointer), __ATOMIC_SEQ_CST);
  }
}

template <class T>
bool exchange_if(void* pointer, std::uint64_t expected, std::uint64_t desired) {
  T old = static_cast<T>(expected);
  return __atomic_compare_exchange_n(static_cast<T*>(pointer), &old, static_cast<T>(desired), false,
                                     __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

EXPORTED bool simulator_compare_exchange(void* pointer, std::size_t bytes, std::uint64_t expected,
                                         std::uint64_t desired) {
  switch (bytes) {
    case 2:
      return exchange_if<std::uint16_t>(pointer, expected, desired);
    case 4:
      return exchange_if<std::uint32_t>(pointer, expected, desired);
    default:
      return exchange_if<std::uint64_t>(pointer, expected, desired);
  }
}

EXPORTED void simulator_fault(const char* text, const char* file, int line) {
  fault(*self, {file, line, CALLER}, format("%s", text));
}

EXPORTED void* simulator_memcpy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return to;
  check<Access::read>(from, bytes, at(CALLER));
  check<Access::write>(to, bytes, at(CALLER));
  return std::memcpy(to, from, bytes);
}

EXPORTED void* simulator_memset(void* to, int value, std::size_t bytes) {
  if (bytes == 0) return to;
  check<Access::write>(to, bytes, at(CALLER));
  return std::memset(to, value, bytes);
}

// ---------------------------------------------------------------------------------------------
// Functions called by the instrumentation that the compiler adds to a kernel

// One set of functions per size; the compiler selects by name.
#define HOOKS(bytes)                                              \
  EXPORTED void __tsan_read##bytes(void* p) {                     \
    check_aligned<Access::read, bytes>(p, at(CALLER));            \
  }                                                               \
  EXPORTED void __tsan_write##bytes(void* p) {                    \
    check_aligned<Access::write, bytes>(p, at(CALLER));           \
  }                                                               \
  EXPORTED void __tsan_volatile_read##bytes(void* p) {            \
    check_aligned<Access::read, bytes>(p, at(CALLER));            \
  }                                                               \
  EXPORTED void __tsan_volatile_write##bytes(void* p) {           \
    check_aligned<Access::write, bytes>(p, at(CALLER));           \
  }                                                               \
  EXPORTED void __tsan_unaligned_read##bytes(void* p) {           \
    check<Access::read>(p, bytes, at(CALLER));                    \
  }                                                               \
  EXPORTED void __tsan_unaligned_write##bytes(void* p) {          \
    check<Access::write>(p, bytes, at(CALLER));                   \
  }                                                               \
  EXPORTED void __tsan_unaligned_volatile_read##bytes(void* p) {  \
    check<Access::read>(p, bytes, at(CALLER));                    \
  }                                                               \
  EXPORTED void __tsan_unaligned_volatile_write##bytes(void* p) { \
    check<Access::write>(p, bytes, at(CALLER));                   \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EXPORTED void __tsan_read_range(void* p, std::size_t bytes) {
  if (bytes > 0) check<Access::read>(p, bytes, at(CALLER));
}
EXPORTED void __tsan_write_range(void* p, std::size_t bytes) {
  if (bytes > 0) check<Access::write>(p, bytes, at(CALLER));
}
EXPORTED void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return to;
  check<Access::read>(from, bytes, at(CALLER));
  check<Access::write>(to, bytes, at(CALLER));
  return std::memcpy(to, from, bytes);
}
EXPORTED void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return to;
  check<Access::read>(from, bytes, at(CALLER));
  check<Access::write>(to, bytes, at(CALLER));
  return std::memmove(to, from, bytes);
}
EXPORTED void* __tsan_memset(void* to, int value, std::size_t bytes) {
  if (bytes == 0) return to;
  check<Access::write>(to, bytes, at(CALLER));
  return std::memset(to, value, bytes);
}
EXPORTED void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EXPORTED void __tsan_atomic_signal_fence(int) {}
EXPORTED void __tsan_init() {}
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
EXPORTED void __tsan_vptr_update(void**, void*) {}
EXPORTED void __tsan_vptr_read(void**) {}

// Arguments of the bounds, alignment and division checks that the compiler inserts.
struct CheckPlace {
  const char* file;
  std::uint32_t line, column;
};
struct CheckType {
  std::uint16_t kind;  // 0 for an integer
  std::uint16_t info;  // for an integer: bit 0 is set if signed; higher bits are log2 of its width
  char name[1];
};
struct BoundsCheck {
  CheckPlace place;
  const CheckType* array;
  const CheckType* index;
};
struct AlignmentCheck {
  CheckPlace place;
  const CheckType* type;
  unsigned char log2_alignment;
  unsigned char kind;
};

// Reports a fault of the kernel; does nothing while the object is being loaded.
COLD void fault_check(const CheckPlace& place, const Text& text) {
  if (self != nullptr) fault(*self, {place.file, static_cast<int>(place.line), nullptr}, text);
}

long index_value(const CheckType& type, std::uintptr_t bits) {
  bool is_signed = type.kind == 0 && (type.info & 1) != 0;
  int unused = 64 - (1 << (type.info >> 1));
  if (!is_signed || unused <= 0) return static_cast<long>(bits);
  return static_cast<long>(bits << unused) >> unused;
}

EXPORTED void __ubsan_handle_out_of_bounds(const BoundsCheck* check, std::uintptr_t index) {
  fault_check(check->place, format("index %ld is out of bounds for %s",
                                   index_value(*check->index, index), check->array->name));
}
EXPORTED void __ubsan_handle_divrem_overflow(const CheckPlace* check, std::uintptr_t,
                                             std::uintptr_t) {
  fault_check(*check, format("divides an integer by zero"));
}
EXPORTED void __ubsan_handle_type_mismatch_v1(const AlignmentCheck* check, std::uintptr_t address) {
  fault_check(check->place, format("accesses %s at address 0x%lx, which is not a multiple of %d",
                                   check->type->name, static_cast<unsigned long>(address),
                                   1 << check->log2_alignment));
}

#include "asynchronous.h"
